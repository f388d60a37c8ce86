"""The live memory timeline: drawn in the browser while ranks train, replaced by a picture at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import display

from lab.memory.categories import CATEGORIES
from lab.show.figures import timeline
from lab.show.live.messages import Names, browser_message
from lab.show.page import join_files
from lab.show.palette import COLOURS, PHASE_TINTS
from lab.show.picture import Picture
from lab.training.records import Progress, Run, Started

_WARM_UP = 0.4
"""Seconds for which the first messages are held back: a browser that still loads the script loses them."""


class _Widget(anywidget.AnyWidget):
    """The canvas in the browser. It receives messages; its traits never change."""

    # A widget has one script, which is joined from several files.
    _esm = join_files("page.js", "live/rows.js", "live/panels.js", "live/timeline.js")
    _css = join_files("page.css", "live/timeline.css")
    look = traitlets.Dict().tag(sync=True)


class Display(Protocol):
    """A place on a page where the widget is shown, and at the end the picture."""

    def show(self, content: Picture | _Widget) -> None:
        """Show the content, and remove what was shown before."""


class LiveTimeline:
    """A timeline that draws each message of a run, for ``lab.run(..., watch=...)``.

    Its Stop button ends the run and keeps what was measured. Without a browser, as in papermill or a script,
    it shows only the picture at the end. It can watch several runs one after the other.

    Args:
        height: The height of the canvas in pixels, for all ranks together.
        display: Where to show the runs; None for an output of its own for each run, in the running cell.
    """

    def __init__(self, height: int, display: Display | None = None) -> None:
        self._height, self._display = height, display
        self._view: _View | None = None
        self._stop: Callable[[], None] = _do_nothing

    def __call__(self, message: Started | Progress | Run) -> None:
        """Draw a message of a rank; at the end of the run, show its picture."""
        if isinstance(message, Started):
            self._stop = message.stop
            return
        if isinstance(message, Run):
            self._finish(timeline(message))
            return
        if self._view is None and (self._display or is_in_browser()):
            self._view = _View(self._height, self._stop, self._display or _CellOutput())
        if self._view is not None:
            self._view.draw(message)

    def _finish(self, picture: Picture) -> None:
        if self._view is None:
            (self._display or _CellOutput()).show(picture)
        else:
            self._view.replace(picture)
            self._view = None


class _View:
    """A widget on a page, and the names that were sent to its script."""

    def __init__(self, height: int, stop: Callable[[], None], display: Display) -> None:
        self._widget = _Widget(
            look={
                "categories": [[name, COLOURS[name]] for name in CATEGORIES],
                "host": COLOURS["host"],
                "tints": PHASE_TINTS,
                "height": height,
            }
        )
        # Stop is the only message from the page. With subshells (JupyterLab 4.4, ipykernel 7) it arrives
        # while the cell runs; otherwise the reader interrupts the kernel.
        self._widget.on_msg(lambda *_: stop())
        # ipykernel 7.4 and later pass a message from the page to the thread that last sent one: here the
        # thread of the running cell. Without this method the message goes to a subshell, as the page asks.
        self._widget.comm._reply_subshell_for = None
        self._display = display
        display.show(self._widget)
        self._opened = time.monotonic()
        self._waiting: list[Progress] = []
        self._names = Names()

    def draw(self, progress: Progress) -> None:
        self._waiting.append(progress)
        if time.monotonic() - self._opened < _WARM_UP:
            return
        for message in self._waiting:
            content, rows = browser_message(message, self._names)
            self._widget.send(content, buffers=[rows])
        self._waiting.clear()

    def replace(self, picture: Picture) -> None:
        # Show the picture before the widget is closed, so that the cells below do not move twice.
        self._display.show(picture)
        self._widget.close()


def _do_nothing() -> None:
    """Stand for the stop function of a run that has not sent one."""


def live(*, height: int = 400) -> LiveTimeline:
    """Watch a run in the browser: ``lab.run(..., watch=lab.show.live())``.

    Args:
        height: The height of the canvas in pixels, for all ranks together.
    """
    return LiveTimeline(height)


class _CellOutput:
    """An output of the running cell."""

    def __init__(self) -> None:
        self._where: dict[str, Any] = {}

    def show(self, content: Picture | _Widget) -> None:
        if not self._where and isinstance(content, _Widget):
            self._where = {"display_id": uuid4().hex}
        # IPython ships types, and this function has none.
        display(content, **self._where)  # type: ignore[no-untyped-call]
        self._where |= {"update": True} if self._where else {}


def is_in_browser() -> bool:
    """Return whether a page in a browser runs this cell: a page sends the cell's id, papermill does not."""
    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)()
    return "cellId" in parent.get("metadata", {})
