"""The tuner: a control for each value that decides whether a step fits, and the estimate of its memory."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from contextvars import copy_context
from html import escape
from pathlib import Path
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any

import ipywidgets

from lab.planning.plan import Plan, plan
from lab.recipe.recipe import Recipe
from lab.show.comparisons import stack
from lab.show.live.timeline import LiveTimeline
from lab.show.picture import Picture
from lab.show.tuner.estimate import Refusal, StateEstimate, estimate_state, estimate_text
from lab.show.tuner.knobs import Knobs
from lab.show.tuner.panel import LONGEST, Panel, panel_content
from lab.show.tuner.scaled_down import ScaledState, scale_down
from lab.show.tuner.state import State, start_state
from lab.show.tuner.text import as_command, as_python
from lab.training.records import Run
from lab.units import format_bytes

if TYPE_CHECKING:
    # The tuner and Plan work without ipyparallel.
    from cluster.ranks import Cluster

RANKS = 4
"""How many ranks Run starts at most, if it has no cluster."""

STEPS = 2
"""How many steps Run trains: the optimizer state exists from the second step on."""


class Tuner:
    """A tuner, which a notebook displays.

    Attributes:
        state: The values of the knobs.
        planned: The last plan by the button Plan; None if there is none.
        ran: The last run by the button Run; None if there is none.
        estimate: The estimate for the state, or its error.
    """

    def __init__(self, state: State, cluster: Cluster | None) -> None:
        self.state = state
        self.planned: Plan | None = None
        self.ran: Run | None = None
        self._planned_step: tuple[Any, ...] = ()
        self._cluster = cluster
        self.estimate = estimate_state(state)
        self._lock = RLock()
        self._worker: Thread | None = None
        self.panel = Panel()
        self.panel.on_msg(lambda _panel, content, _buffers: self.accept(content["suggestion"]))
        self.knobs = Knobs(state, self.change, self._lock)
        self.plan_button = _button("Plan", "Plan this step exactly, on fake tensors", self.plan)
        self.run_button = _button(
            "Run", "Train a small step like this one on ranks of this machine", self.run
        )
        self.status = ipywidgets.HTML()
        self.run_box = ipywidgets.VBox()
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
    def python(self) -> str:
        """The call of ``lab.plan`` for the state."""
        return as_python(self.state)

    @property
    def command(self) -> str:
        """The ``lab plan`` command for the state."""
        return as_command(self.state)

    @property
    def picture(self) -> Picture | None:
        """The bars of the estimate and of the plan; None if the combination is illegal."""
        if isinstance(self.estimate, Refusal):
            return None
        bars = {"closed form": self.estimate.by_category}
        if self.planned is not None and self._planned_step == self.state.step:
            bars["plan"] = self.planned.peak.by_category
        title, limit = self.estimate.text.partition(",")[0], self.state.device_memory
        return stack(bars, title=title, limit=limit, longest=LONGEST * limit)

    # ---- changes -----------------------------------------------------------------------------------------

    def change(self, name: str, value: Any) -> None:
        """Change a value of the state or a field of its recipe, and show the new estimate.

        Raises:
            LabError: The name does not exist, or the value is wrong by itself.
        """
        with self._lock:
            self.state = self.state.with_value(name, value)
            self.estimate = estimate_state(self.state, name)
            self._show()

    def accept(self, number: int) -> None:
        """Make the change that a button under an illegal combination suggests, counted from 0."""
        if isinstance(self.estimate, Refusal):
            suggestion = self.estimate.suggestions[number]
            self.change(suggestion.name, suggestion.value)

    def _show(self) -> None:
        estimate = self.estimate
        self.knobs.show(self.state, estimate.saves if isinstance(estimate, StateEstimate) else {})
        current = self._planned_step == self.state.step
        self.panel.content = panel_content(self.state, estimate, self.planned, current=current)
        busy = self._worker is not None or isinstance(estimate, Refusal)
        self.plan_button.disabled = self.run_button.disabled = busy

    # ---- Plan and Run, in a thread, so that the kernel is free ---------------------------------------------

    def plan(self) -> None:
        """Plan the step of the current state in the background, and show the plan below the estimate."""
        self._work(self._plan, self.state)

    def run(self) -> None:
        """Train a small step like this one on ranks in the background, under a live timeline."""
        self._work(self._run, self.state)

    def wait(self) -> None:
        """Wait until Plan or Run has ended."""
        worker = self._worker
        if worker is not None:
            worker.join()

    def _work(self, work: Callable[[State], str], state: State) -> None:
        # The thread runs in this context, so that its output goes to the cell or page that asked for it.
        context = copy_context()
        with self._lock:
            if self._worker is not None:
                return  # A second click: the page sent it before the buttons were disabled.
            self._worker = Thread(target=lambda: context.run(self._run_work, work, state), daemon=True)
            self._worker.start()
            self._show()

    def _run_work(self, work: Callable[[State], str], state: State) -> None:
        try:
            message = work(state)
        except Exception as error:  # No cell would show an error of this thread.
            message = f"{type(error).__name__}: {error}"
        with self._lock:
            self._worker = None
            self._set_status(message)
            self._show()

    def _set_status(self, text: str) -> None:
        self.status.value = escape(text)

    def _plan(self, state: State) -> str:
        self._set_status("planning on fake tensors …")
        result = plan(
            state.model,
            state.recipe,
            tokens=state.tokens,
            ranks=state.ranks,
            device_memory=state.device_memory,
            host_memory=state.host_memory,
            workspace=state.workspace,
        )
        with self._lock:
            self.planned, self._planned_step = result, state.step
        return f"planned in {result.planning_seconds:.1f} s: {format_bytes(result.device_peak)} per rank"

    def _run(self, state: State) -> str:
        small = scale_down(state, self._cluster.ranks if self._cluster else min(state.ranks, RANKS))
        scaled = f"scaled to this machine: {', '.join(small.changes)}" if small.changes else "not scaled down"
        self._set_status(f"{scaled} · {'running' if self._cluster else 'starting ranks'} …")
        if self._cluster is not None:
            self.ran = self._train(small, self._cluster)
        else:
            from cluster.ranks import Cluster

            with Cluster(ranks=small.state.ranks) as cluster:
                self.ran = self._train(small, cluster)
        result = estimate_state(small.state)
        device = result.device if isinstance(result, StateEstimate) else None
        expected = f", {format_bytes(device)} by the closed form" if device is not None else ""
        return f"{scaled} · measured {format_bytes(self.ran.device_peak)} per rank{expected}"

    def _train(self, small: ScaledState, cluster: Cluster) -> Run:
        from lab.training.run import run

        watch = LiveTimeline(320, _BoxDisplay(self.run_box))
        state = small.state
        return run(state.model, state.recipe, tokens=state.tokens, steps=STEPS, cluster=cluster, watch=watch)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A stored notebook without a kernel shows the picture and the text.
        buttons = ipywidgets.HBox([self.plan_button, self.run_button])
        right = ipywidgets.VBox([self.panel, buttons], layout={"flex": "1 1 400px", "min_width": "360px"})
        top = ipywidgets.HBox(
            [self.knobs.box, right], layout={"flex_flow": "row wrap", "grid_gap": "12px 24px"}
        )
        bundle: dict[str, Any] = ipywidgets.VBox([top, self.status, self.run_box])._repr_mimebundle_(**kwargs)
        texts = estimate_text(self.estimate), self.panel.content["bill"]
        bundle["text/plain"] = "\n".join(filter(None, texts))
        if self.picture is not None:
            bundle["image/png"] = b64encode(self.picture.png).decode()
        return bundle


class _BoxDisplay:
    """A box of widgets in which a live timeline is shown."""

    def __init__(self, box: ipywidgets.VBox) -> None:
        self._box = box

    def show(self, content: Picture | ipywidgets.DOMWidget) -> None:
        if isinstance(content, Picture):
            content = ipywidgets.Image(value=content.png, layout={"width": "900px", "max_width": "100%"})
        self._box.children = [content]


def _button(name: str, hint: str, act: Callable[[], None]) -> ipywidgets.Button:
    button = ipywidgets.Button(description=name, tooltip=hint, layout={"width": "auto"})
    button.on_click(lambda _: act())
    return button


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

    The estimate is that of the closed form. The button Plan makes the exact plan in the background; Run
    trains a small step like it. The next cell can read the ``state`` and the ``recipe`` of the result. An
    illegal combination is not an error: the tuner explains it and suggests changes.

    Args:
        model: The model at which the tuner begins. This and the next arguments are those of ``lab.plan``.
        recipe: A named recipe, or a ``Recipe``.
        tokens: The tokens of one sequence.
        ranks: The number of ranks.
        device_memory: The memory of a rank; by default that of the device of ``lab.plan``.
        host_memory: The host memory of a node.
        workspace: Whether to add the memory that CUDA takes when it starts.
        tokens_total: The tokens of the whole training, such as "10B" (decimal: 10^10), as in ``lab.fit``.
            After Plan, a line says the days, node hours and money that they take.
        price: The money for one GPU hour, as in ``lab.fit``.
        cluster: The ranks for Run; None to start ranks for each run.
        knobs: Fields of the recipe.

    Raises:
        LabError: A model, rung, knob or size does not exist; the total of tokens or the price cannot be read.
    """
    state = start_state(
        model,
        recipe,
        tokens=tokens,
        ranks=ranks,
        device_memory=device_memory,
        host_memory=host_memory,
        workspace=workspace,
        tokens_total=tokens_total,
        price=price,
        **knobs,
    )
    return Tuner(state, cluster)
