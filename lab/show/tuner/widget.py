"""The tuner: a knob for all that decides whether a step fits, and the predicted stack with every move."""

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
from lab.show.tuner.estimate import Predicted, Refused, predict, table
from lab.show.tuner.knobs import Knobs
from lab.show.tuner.panel import LONGEST, Panel, drawn
from lab.show.tuner.scaled_down import Shrunk, shrunk
from lab.show.tuner.state import State, begun
from lab.show.tuner.text import as_command, as_python
from lab.training.records import Run
from lab.units import format_bytes

if TYPE_CHECKING:
    # A machine without ipyparallel can still tune and plan.
    from cluster.ranks import Cluster

RANKS = 4
"""Ranks that Run starts where it is given no cluster."""

STEPS = 2
"""Steps of a Run: the second has all its gradients and states from its beginning."""


class Tuner:
    """What ``tuner`` returns; a notebook displays it.

    ``state`` is where the knobs stand, ``planned`` the last plan and ``ran`` the last run that its buttons
    made; None where there is none.
    """

    def __init__(self, state: State, cluster: Cluster | None) -> None:
        self.state = state
        self.planned: Plan | None = None
        self.ran: Run | None = None
        self._planned_step: tuple[Any, ...] = ()
        self._cluster = cluster
        self._said = predict(state)
        self._moving = RLock()
        self._worker: Thread | None = None
        self.panel = Panel()
        self.panel.on_msg(lambda _panel, content, _buffers: self.mend(content["mend"]))
        self.knobs = Knobs(state, self.move, self._moving)
        self.plan_button = _button("Plan", "Plan this step on fake tensors, exactly", self.plan)
        self.run_button = _button(
            "Run", "Train a small step like this one on ranks of this machine", self.run
        )
        self.status = ipywidgets.HTML()
        self.place = ipywidgets.VBox()
        self._show()

    # ---- what a next cell reads ------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """The recipe as the knobs stand.

        Raises:
            RecipeError: they stand at an illegal combination.
        """
        return self.state.recipe

    @property
    def predicted(self) -> Predicted | Refused:
        """What the closed form says here, or why it says nothing."""
        return self._said

    @property
    def python(self) -> str:
        """The plan of this state, as Python."""
        return as_python(self.state)

    @property
    def command(self) -> str:
        """The same, as a command line."""
        return as_command(self.state)

    @property
    def picture(self) -> Picture | None:
        """The predicted stack as a picture; None at an illegal combination."""
        if isinstance(self._said, Refused):
            return None
        bars = {"closed form": self._said.by_category}
        if self.planned is not None and self._planned_step == self.state.step:
            bars["plan"] = self.planned.peak.by_category
        title, limit = self._said.words.partition(",")[0], self.state.device_memory
        return stack(bars, title=title, limit=limit, longest=LONGEST * limit)

    # ---- moves -------------------------------------------------------------------------------------------

    def move(self, name: str, value: Any) -> None:
        """Turn one knob: a field of the state, or of ``lab.show.tuner.state.TURNED``; everything follows."""
        with self._moving:
            self.state = self.state.moved(name, value)
            self._said = predict(self.state, name)
            self._show()

    def mend(self, number: int) -> None:
        """Make the move that one of the buttons under an illegal combination offers, counted from 0."""
        if isinstance(self._said, Refused):
            offered = self._said.mends[number]
            self.move(offered.name, offered.value)

    def _show(self) -> None:
        said = self._said
        self.knobs.stand_at(self.state, said.saves if isinstance(said, Predicted) else {})
        current = self._planned_step == self.state.step
        self.panel.shown = drawn(self.state, said, self.planned, current=current)
        busy = self._worker is not None or isinstance(said, Refused)
        self.plan_button.disabled = self.run_button.disabled = busy

    # ---- Plan and Run, each in a thread: the kernel stays free ---------------------------------------------

    def plan(self) -> None:
        """Plan the step as the knobs stand now; the result appears beside the closed form."""
        self._work(self._plan, self.state)

    def run(self) -> None:
        """Train a small step like this one on real ranks, watched live."""
        self._work(self._run, self.state)

    def wait(self) -> None:
        """Return when what Plan or Run began has come to its end."""
        worker = self._worker
        if worker is not None:
            worker.join()

    def _work(self, work: Callable[[State], str], state: State) -> None:
        # The page's messages to a thread carry who asked, which a new thread would not know.
        context = copy_context()
        with self._moving:
            if self._worker is not None:
                return  # a second click; the buttons are off, but a page may be slow to hear of it
            self._worker = Thread(target=lambda: context.run(self._worked, work, state), daemon=True)
            self._worker.start()
            self._show()

    def _worked(self, work: Callable[[State], str], state: State) -> None:
        try:
            said = work(state)
        except Exception as error:  # Whatever it is, the reader hears it here: no cell would show it.
            said = f"{type(error).__name__}: {error}"
        with self._moving:
            self._worker = None
            self._say(said)
            self._show()

    def _say(self, text: str) -> None:
        self.status.value = escape(text)

    def _plan(self, state: State) -> str:
        self._say("planning on fake tensors …")
        made = plan(
            state.model,
            state.recipe,
            tokens=state.tokens,
            ranks=state.ranks,
            device_memory=state.device_memory,
            host_memory=state.host_memory,
            workspace=state.workspace,
        )
        with self._moving:
            self.planned, self._planned_step = made, state.step
        return f"planned in {made.planning_seconds:.1f} s: {format_bytes(made.device_peak)} a rank"

    def _run(self, state: State) -> str:
        small = shrunk(state, self._cluster.ranks if self._cluster else min(state.ranks, RANKS))
        scaled = f"scaled to this machine: {', '.join(small.changes)}" if small.changes else "as it stands"
        self._say(f"{scaled} · {'running' if self._cluster else 'starting ranks'} …")
        if self._cluster is not None:
            self.ran = self._trained(small, self._cluster)
        else:
            from cluster.ranks import Cluster

            with Cluster(ranks=small.state.ranks) as cluster:
                self.ran = self._trained(small, cluster)
        said = predict(small.state)
        expected = f", {format_bytes(said.device)} by the closed form" if isinstance(said, Predicted) else ""
        return f"{scaled} · measured {format_bytes(self.ran.device_peak)} a rank{expected}"

    def _trained(self, small: Shrunk, cluster: Cluster) -> Run:
        from lab.training.run import run

        watch = LiveTimeline(320, _Box(self.place))
        state = small.state
        return run(state.model, state.recipe, tokens=state.tokens, steps=STEPS, cluster=cluster, watch=watch)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # Where no front end runs widgets, the stored notebook shows the stack as it stood, and its numbers.
        buttons = ipywidgets.HBox([self.plan_button, self.run_button])
        right = ipywidgets.VBox([self.panel, buttons], layout={"flex": "1 1 400px", "min_width": "360px"})
        top = ipywidgets.HBox(
            [self.knobs.box, right], layout={"flex_flow": "row wrap", "grid_gap": "12px 24px"}
        )
        bundle: dict[str, Any] = ipywidgets.VBox([top, self.status, self.place])._repr_mimebundle_(**kwargs)
        bundle["text/plain"] = table(self._said)
        if self.picture is not None:
            bundle["image/png"] = b64encode(self.picture.png).decode()
        return bundle


class _Box:
    """A place for a live timeline in a box of widgets."""

    def __init__(self, box: ipywidgets.VBox) -> None:
        self._box = box

    def show(self, shown: Picture | ipywidgets.DOMWidget) -> None:
        if isinstance(shown, Picture):
            shown = ipywidgets.Image(value=shown.png, layout={"width": "900px", "max_width": "100%"})
        self._box.children = [shown]


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
    device_memory: int | str = "80GiB",
    host_memory: int | str = "2TiB",
    workspace: bool = True,
    cluster: Cluster | None = None,
    **knobs: Any,
) -> Tuner:
    """Turn the knobs of one training step, and see with every move what it holds and whether that fits.

    The settings say where it begins; they are those of ``lab.plan``. What is drawn is the closed form, with
    what CUDA takes from the start on (``workspace``); Plan makes the exact plan in the background, and Run
    trains a small step like it, on ``cluster`` or on ranks of its own. A next cell finds what was set in
    ``.state`` and ``.recipe``.

    Raises:
        LabError: a model, rung, knob or size that does not exist. An illegal combination is only explained.
    """
    state = begun(
        model,
        recipe,
        tokens=tokens,
        ranks=ranks,
        device_memory=device_memory,
        host_memory=host_memory,
        workspace=workspace,
        **knobs,
    )
    return Tuner(state, cluster)
