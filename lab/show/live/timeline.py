"""The live memory timeline: drawn while the ranks train, a picture once they are done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import display

from lab.memory.timeline import CATEGORIES
from lab.show.figures import timeline
from lab.show.live.messages import Names, delta
from lab.show.page import joined
from lab.show.palette import COLOURS, PHASE_TINTS
from lab.show.picture import Picture
from lab.training.records import Progress, Run, Started

_WARM_UP = 0.4
"""Seconds for which the first messages wait: a browser that still loads the script would lose them."""


class _Widget(anywidget.AnyWidget):
    """The canvas in the browser. It is sent messages; its traits never change."""

    # A widget is one module of script: its parts are plain scripts, joined.
    _esm = joined("page.js", "live/rows.js", "live/panels.js", "live/timeline.js")
    _css = joined("page.css", "live/timeline.css")
    look = traitlets.Dict().tag(sync=True)


class Place(Protocol):
    """Where a timeline stands: first the widget is shown there, and in the end the picture instead."""

    def show(self, shown: Picture | _Widget) -> None:
        """Show it, in place of what was shown before."""


class LiveTimeline:
    """Give it to ``lab.run(..., watch=...)``: it draws each message, and turns into a picture at the end.

    Its Stop ends the run, which then is what it measured. Where no browser looks on (papermill, a script)
    there is the picture only. It can watch one run after another, each in an output of its own, or all in
    the ``place`` that is given.
    """

    def __init__(self, height: int, place: Place | None = None) -> None:
        self._height, self._place = height, place
        self._showing: _Showing | None = None
        self._stop: Callable[[], None] = _nothing

    def __call__(self, message: Started | Progress | Run) -> None:
        """Draw a message of a running rank, or the run at its end."""
        if isinstance(message, Started):
            self._stop = message.stop
            return
        if isinstance(message, Run):
            self._finish(timeline(message))
            return
        if self._showing is None and (self._place or _is_watched()):
            self._showing = _Showing(self._height, self._stop, self._place or _Output())
        if self._showing is not None:
            self._showing.draw(message)

    def _finish(self, picture: Picture) -> None:
        if self._showing is None:
            (self._place or _Output()).show(picture)
        else:
            self._showing.replace(picture)
            self._showing = None


class _Showing:
    """A displayed widget, and what its script has been told."""

    def __init__(self, height: int, stop: Callable[[], None], place: Place) -> None:
        self._widget = _Widget(
            look={
                "categories": [[name, COLOURS[name]] for name in CATEGORIES],
                "host": COLOURS["host"],
                "tints": PHASE_TINTS,
                "height": height,
            }
        )
        # The one thing that the page says. It is heard while the cell blocks where the kernel has subshells
        # (JupyterLab 4.4, ipykernel 7); elsewhere the kernel's interrupt does the same.
        self._widget.on_msg(lambda *_: stop())
        # From 7.4 ipykernel hands what the page says to the thread that last spoke to it: the one that the
        # cell blocks. Without this method the page's own choice holds, which is a subshell.
        self._widget.comm._reply_subshell_for = None
        self._place = place
        place.show(self._widget)
        self._opened = time.monotonic()
        self._waiting: list[Progress] = []
        self._names = Names()

    def draw(self, progress: Progress) -> None:
        self._waiting.append(progress)
        if time.monotonic() - self._opened < _WARM_UP:
            return
        for message in self._waiting:
            content, rows = delta(message, self._names)
            self._widget.send(content, buffers=[rows])
        self._waiting.clear()

    def replace(self, picture: Picture) -> None:
        # The picture first: a closed widget leaves an empty place, and the cells below would jump.
        self._place.show(picture)
        self._widget.close()


def _nothing() -> None:
    """Stop a run that has not said how."""


def live(*, height: int = 400) -> LiveTimeline:
    """Watch a run: ``lab.run(..., watch=lab.show.live())``; ``height`` in pixels, of all ranks together."""
    return LiveTimeline(height)


class _Output:
    """A place among the outputs of the cell that runs."""

    def __init__(self) -> None:
        self._where: dict[str, Any] = {}

    def show(self, shown: Picture | _Widget) -> None:
        if not self._where and isinstance(shown, _Widget):
            self._where = {"display_id": uuid4().hex}
        # IPython says that it is typed, and this function is not.
        display(shown, **self._where)  # type: ignore[no-untyped-call]
        self._where |= {"update": True} if self._where else {}


def _is_watched() -> bool:
    """Whether a notebook's page runs this cell: a page names the cell that it runs, papermill does not."""
    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)()
    return "cellId" in parent.get("metadata", {})
