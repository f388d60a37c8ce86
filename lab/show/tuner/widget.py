"""The tuner: a control for each value that decides whether a step fits, and the memory of its plan."""

from __future__ import annotations

from contextlib import suppress
from contextvars import copy_context
from html import escape
from pathlib import Path
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any

import ipywidgets

from lab.errors import LabError
from lab.models import shape_of
from lab.planning.bill import make_order
from lab.planning.hardware import make_machine
from lab.planning.plan import Plan
from lab.recipe.ladder import RUNGS, check_name
from lab.recipe.recipe import Recipe, check_fields
from lab.show.comparisons import stack
from lab.show.live.timeline import LiveTimeline
from lab.show.picture import Picture
from lab.show.tuner.knobs import Knobs
from lab.show.tuner.panel import LONGEST, Panel, panel_content
from lab.show.tuner.planner import Planner, Question, plan_in_process, plan_now
from lab.show.tuner.prediction import Prediction, predict, prediction_text, question_of
from lab.show.tuner.scaled_down import ScaledState, scale_down
from lab.show.tuner.state import NEUTRAL, State, as_text
from lab.training.records import Run
from lab.units import check_counts, format_bytes, parse_bytes, parse_tokens

if TYPE_CHECKING:
    # The tuner and Plan work without ipyparallel.
    from cluster.ranks import Cluster

RANKS = 4
"""How many ranks Run starts at most, if it has no cluster."""

RUN_HINT = "Train a small step like this one on ranks of this machine"

STEPS = 2
"""How many steps Run trains: the optimizer state exists from the second step on."""


class Tuner:
    """A tuner, which a notebook displays.

    Attributes:
        state: The values of the knobs.
        answer: What is known of the state.
        ran: The last run by the button Run; None if there is none.
    """

    answer: Prediction

    def __init__(self, state: State, cluster: Cluster | None) -> None:
        self.state = state
        self.ran: Run | None = None
        self._cluster = cluster
        self._lock = RLock()
        self._worker: Thread | None = None
        self._changed = ""
        self._planner = Planner(self._plan_what_is_missing)
        self.panel = Panel()
        self.panel.on_msg(lambda _panel, content, _buffers: self.accept(content["suggestion"]))
        self.knobs = Knobs(state, self.change, self._lock)
        self.run_button = ipywidgets.Button(description="Run", tooltip=RUN_HINT, layout={"width": "auto"})
        self.run_button.on_click(lambda _: self.run())
        self.status = ipywidgets.HTML()
        self.run_box = ipywidgets.VBox()
        # A page without a kernel shows the first picture, so it waits for its plan.
        with suppress(LabError):
            plan_now(question_of(state))
        self._show()

    # ---- for the next cell -----------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """The recipe of the state.

        Raises:
            RecipeError: The combination is illegal.
        """
        return self.state.recipe

    @property
    def plan(self) -> Plan | None:
        """The plan of the state; None while it is being made, or if the combination is illegal."""
        return self.answer.plan

    @property
    def picture(self) -> Picture | None:
        """The bar of the plan; None without a plan."""
        if self.plan is None:
            return None
        limit = self.state.device_memory
        bars = {"a rank": self.answer.by_category}
        return stack(bars, title=self.answer.text, limit=limit, longest=LONGEST * limit)

    # ---- changes -----------------------------------------------------------------------------------------

    def change(self, name: str, value: Any) -> None:
        """Change a value of the state or a field of its recipe, and show its plan when there is one.

        Raises:
            LabError: The name does not exist, or the value is wrong by itself.
        """
        with self._lock:
            self.state = self.state.with_value(name, value)
            # A plan that is being made for another knob is not ended for a change that needs none.
            self._changed = name if name in NEUTRAL else self._changed
            self._plan_what_is_missing()

    def accept(self, number: int) -> None:
        """Make the change that a button under an illegal combination suggests, counted from 0."""
        if self.answer.suggestions:
            suggestion = self.answer.suggestions[number]
            self.change(suggestion.name, suggestion.value)

    def _plan_what_is_missing(self) -> None:
        with self._lock:
            self._planner.ask(self._show())

    def _show(self) -> list[Question]:
        """Show what is known, and return what is not."""
        self.answer, missing = predict(self.state, self._changed)
        self.knobs.show(self.state, self.answer.saves)
        self.panel.content = panel_content(self.state, self.answer)
        self.run_button.disabled = self._worker is not None or self.answer.verdict == "illegal"
        return missing

    def wait(self) -> None:
        """Wait until all plans are made, and Run has ended."""
        self._planner.wait()
        worker = self._worker
        if worker is not None:
            worker.join()

    # ---- Run, in a thread, so that the kernel is free ----------------------------------------------------

    def run(self) -> None:
        """Train a small step like this one on ranks in the background, under a live timeline."""
        # The thread runs in this context, so that its output goes to the cell or page that asked for it.
        context = copy_context()
        with self._lock:
            if self._worker is not None:
                return  # A second click: the page sent it before the button was disabled.
            self._worker = Thread(target=lambda: context.run(self._run_and_say, self.state), daemon=True)
            self._worker.start()
            self._show()

    def _run_and_say(self, state: State) -> None:
        try:
            message = self._run(state)
        except Exception as error:  # No cell would show an error of this thread.
            message = f"{type(error).__name__}: {error}"
        with self._lock:
            self._worker = None
            self.status.value = escape(message)
            self._show()

    def _run(self, state: State) -> str:
        small = scale_down(state, self._cluster.ranks if self._cluster else min(state.ranks, RANKS))
        scaled = f"scaled to this machine: {', '.join(small.changes)}" if small.changes else "not scaled down"
        self.status.value = escape(f"{scaled} · {'running' if self._cluster else 'starting ranks'} …")
        if self._cluster is not None:
            self.ran = self._train(small, self._cluster)
        else:
            from cluster.ranks import Cluster

            with Cluster(ranks=small.state.ranks) as cluster:
                self.ran = self._train(small, cluster)
        plan = plan_in_process(question_of(small.state), lambda: True)
        planned = f", planned {format_bytes(plan.device_peak)}" if isinstance(plan, Plan) else ""
        return f"{scaled} · measured {format_bytes(self.ran.device_peak)} per rank{planned}"

    def _train(self, small: ScaledState, cluster: Cluster) -> Run:
        from lab.training.run import run

        watch = LiveTimeline(320, _BoxDisplay(self.run_box))
        state = small.state
        return run(state.model, state.recipe, tokens=state.tokens, steps=STEPS, cluster=cluster, watch=watch)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A stored notebook without a kernel shows the picture and the text.
        self._plan_what_is_missing()
        right = ipywidgets.VBox(
            [self.panel, ipywidgets.HBox([self.run_button])],
            layout={"flex": "1 1 400px", "min_width": "360px"},
        )
        top = ipywidgets.HBox(
            [self.knobs.box, right], layout={"flex_flow": "row wrap", "grid_gap": "12px 24px"}
        )
        bundle: dict[str, Any] = ipywidgets.VBox([top, self.status, self.run_box])._repr_mimebundle_(**kwargs)
        texts = prediction_text(self.answer), self.panel.content["seconds"]
        still = self.picture.stored if self.picture is not None else {}
        return {**bundle, **still, "text/plain": "\n".join(filter(None, texts))}


class _BoxDisplay:
    """A box of widgets in which a live timeline is shown."""

    def __init__(self, box: ipywidgets.VBox) -> None:
        self._box = box

    def show(self, content: Picture | ipywidgets.DOMWidget) -> None:
        if isinstance(content, Picture):
            content = ipywidgets.Image(value=content.png, layout={"width": "900px", "max_width": "100%"})
        self._box.children = [content]


def tuner(
    model: str | Path = "llama3-8b",
    recipe: str | Recipe = "upipe",
    *,
    tokens: int | str = "3M",
    ranks: int = 8,
    device_memory: int | str | None = None,
    host_memory: int | str = "2TiB",
    workspace: bool = True,
    tokens_total: int | str | None = None,
    price: float | str | None = None,
    cluster: Cluster | None = None,
    **knobs: Any,
) -> Tuner:
    """Change the knobs of a training step, and see after each change what a rank holds and whether it fits.

    Every number is that of ``lab.plan``. A plan that is not known is made in the background; until then the
    picture of the setting before stays, pale. What each knob saves appears as the plans without it end. The
    button Run trains a small step like this one. The next cell can read the ``state``, the ``recipe`` and
    the ``plan`` of the result. An illegal combination is not an error: the tuner explains it and suggests
    changes.

    Args:
        model: The model at which the tuner begins. This and the next arguments are those of ``lab.plan``.
        recipe: A named recipe, or a ``Recipe``.
        tokens: The tokens of one sequence.
        ranks: The number of ranks.
        device_memory: The memory of a rank; by default that of the device of ``lab.plan``.
        host_memory: The host memory of a node.
        workspace: Whether to add the memory that CUDA takes when it starts.
        tokens_total: The tokens of the whole training, such as "10B" (decimal: 10^10), as in ``lab.fit``.
            A line says the days, node hours and money that they take.
        price: The money for one GPU hour, as in ``lab.fit``.
        cluster: The ranks for Run; None to start ranks for each run.
        knobs: Fields of the recipe.

    Raises:
        LabError: A model, rung, knob or size does not exist; the total of tokens or the price cannot be read.
    """
    check_counts({"ranks": ranks})
    make_order(tokens_total, price)
    check_fields(knobs)
    if isinstance(recipe, str):
        check_name(recipe)
    state = State(
        model=as_text(model),
        shape=shape_of(model),
        rung=recipe if isinstance(recipe, str) else RUNGS[-1],
        tokens=parse_tokens(tokens),
        ranks=ranks,
        by_hand=knobs,
        device_memory=make_machine(device_memory=device_memory).device_memory or 0,
        host_memory=parse_bytes(host_memory),
        workspace=workspace,
        tokens_total=tokens_total,
        price=price,
    )
    if isinstance(recipe, Recipe):
        state = state.of_recipe(recipe, knobs)
    # A single value that no recipe can have is an error of the caller; the tuner explains combinations only.
    Recipe(**{**state.fields, "checkpoint": True})
    return Tuner(state, cluster)
