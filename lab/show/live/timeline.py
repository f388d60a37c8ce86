"""The live memory timeline: drawn in the browser while ranks train; at its end a picture is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from lab.show.figures import HasTimelines, timeline
from lab.show.live.messages import Names, browser_message
from lab.show.live.widget import CellOutput, TimelineWidget, is_in_browser
from lab.show.picture import Picture
from lab.training.records import Ended, Progress, Started

_WARM_UP = 0.4
"""Seconds for which the first messages are held back: a browser that still loads the script loses them."""


class Display(Protocol):
    """A place on a page where the widget is shown, and without a browser the picture."""

    def show(self, content: Picture | TimelineWidget) -> None:
        """Show the content, and remove what was shown before."""


class LiveTimeline:
    """A timeline that draws each message of a run, for ``lab.run(..., watch=...)``.

    Its Stop button ends the run and keeps what was measured. After the run a click on an instant shows who
    holds the bytes then. Without a browser, as in papermill or a script, it shows only the picture at the
    end. It can watch several runs one after the other: the axis of each reaches at least as high as the peaks
    of those before.

    Args:
        height: The height of the canvas in pixels, for all ranks together.
        display: Where to show the runs; None for an output of its own for each run, in the running cell.
    """

    def __init__(self, height: int, display: Display | None = None) -> None:
        self._height, self._display = height, display
        self._highest = 0
        self._widget: TimelineWidget | None = None
        self._stop: Callable[[], None] = _do_nothing

    @property
    def visible(self) -> bool:
        """Whether it draws while a run goes on; without a browser it shows the picture at the end."""
        return self._display is not None or is_in_browser()

    def __call__(self, message: Started | Progress | HasTimelines | Ended) -> None:
        """Draw a message of a rank; at the end, given the run or another result, leave its picture."""
        if isinstance(message, Started):
            self._stop = message.stop
            self._open(f"starting {message.ranks} rank{'s' if message.ranks > 1 else ''}")
        elif isinstance(message, HasTimelines):
            self._finish(message)
        elif isinstance(message, Ended):
            self._discard()
        else:
            self._open("")
            self._draw(message)

    def _open(self, waiting: str) -> None:
        if self._widget is not None or not self.visible:
            return
        self._output, stop = self._display or CellOutput(), self._stop
        self._widget = TimelineWidget(self._height, waiting=waiting, highest=self._highest)
        # With subshells (JupyterLab 4.4, ipykernel 7) a message from the page arrives while the cell runs;
        # otherwise the reader interrupts the kernel.
        self._widget.on_msg(lambda _widget, content, _buffers: stop() if content.get("stop") else None)
        self._output.show(self._widget)
        self._opened = time.monotonic()
        self._waiting: list[Progress] = []
        self._names: Names = {}

    def _draw(self, progress: Progress) -> None:
        if self._widget is None:
            return
        self._waiting.append(progress)
        if time.monotonic() - self._opened < _WARM_UP:
            return
        for message in self._waiting:
            content, rows = browser_message(message, self._names)
            self._widget.send(content, buffers=[rows])
        self._waiting.clear()

    def _finish(self, run: HasTimelines) -> None:
        drawn = timeline(run, highest=self._highest)
        self._highest = max(self._highest, *(one.device_peak for one in run.timelines))
        picture = Picture(drawn.figure, drawn.text)
        if self._widget is None:
            (self._display or CellOutput()).show(picture)
            return
        self._widget.show_recorded(drawn.recorded)
        if self._display is None:
            self._widget.tell_replaced()
            self._output.show(picture)
        self._widget = None

    def _discard(self) -> None:
        if self._widget is not None:
            self._widget.close()
            self._widget = None


def _do_nothing() -> None:
    """Stand for the stop function of a run that has not sent one."""


def live(*, height: int = 400) -> LiveTimeline:
    """Watch a run in the browser: ``lab.run(..., watch=lab.show.live())``.

    Args:
        height: The height of the canvas in pixels, for all ranks together.
    """
    return LiveTimeline(height)
