"""The widget that draws timelines on a page: while ranks run, and afterwards, when it answers clicks.

It leaves a picture in the notebook. On the page of JupyterLab or Notebook 7 the script then takes the
picture's place, and stays alive; a stored notebook, and a page without the kernel, show the picture.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import uuid4

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import display

from lab.memory.categories import CATEGORIES
from lab.show.live.messages import recorded_messages
from lab.show.live.recorded import Recorded
from lab.show.page import join_files
from lab.show.palette import COLOURS, PHASE_TINTS
from lab.show.picture import Picture


class TimelineWidget(anywidget.AnyWidget):
    """The canvas in the browser. It receives messages; its traits never change."""

    # A widget has one script, which is joined from several files.
    _esm = join_files(
        "page.js",
        "live/rows.js",
        "live/panels.js",
        "live/treemap.js",
        "live/holders.js",
        "live/timeline.js",
    )
    _css = join_files("page.css", "live/timeline.css", "live/holders.css")
    look = traitlets.Dict().tag(sync=True)

    def __init__(
        self, height: int, *, waiting: str = "", picture: Picture | None = None, highest: int = 0
    ) -> None:
        super().__init__(
            look={
                "categories": [[name, COLOURS[name]] for name in CATEGORIES],
                "host": COLOURS["host"],
                "disk": COLOURS["disk"],
                "tints": PHASE_TINTS,
                "height": height,
                "highest": highest,
                "waiting": waiting,
            }
        )
        # ipykernel 7.4 and later pass a message from the page to the thread that last sent one: here the
        # thread of the running cell. Without this method the message goes to a subshell, as the page asks.
        self.comm._reply_subshell_for = None
        self._recorded: Recorded | None = None
        self._picture = picture
        self.on_msg(lambda _widget, content, _buffers: self._answer(content))

    def show_recorded(self, recorded: Recorded) -> None:
        """Draw timelines that have ended, and answer clicks on them from now on."""
        self._recorded = recorded
        for content, buffers in recorded_messages(recorded):
            self.send(content, buffers=buffers)

    def tell_replaced(self) -> None:
        """Say to the script that the widget's output becomes a picture, whose place it takes."""
        self.send({"kind": "replaced"}, buffers=[])

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if self._picture is None or bundle is None:
            return bundle
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, **self._picture.stored}, metadata

    def _answer(self, content: dict[str, Any]) -> None:
        if self._recorded is not None and ("row" in content or "free" in content):
            send = partial(self.send, buffers=[])
            send(self._recorded.answer(content, send))


class CellOutput:
    """An output of the running cell."""

    def __init__(self) -> None:
        self._where: dict[str, Any] = {}

    def show(self, content: Picture | TimelineWidget) -> None:
        """Show the content, and remove what was shown before."""
        if not self._where and isinstance(content, TimelineWidget):
            self._where = {"display_id": uuid4().hex}
        # IPython ships types, and this function has none.
        display(content, **self._where)  # type: ignore[no-untyped-call]
        self._where |= {"update": True} if self._where else {}


def display_recorded(recorded: Recorded, picture: Picture, height: int) -> None:
    """Display timelines that have ended in the running cell, and leave their picture in the notebook."""
    widget, output = TimelineWidget(height, picture=picture, highest=recorded.highest), CellOutput()

    def begin(content: dict[str, Any]) -> None:
        # The page has loaded the script, which waits for the rows.
        if content.get("ready"):
            widget.show_recorded(recorded)
            if content["stays"]:
                widget.tell_replaced()
                output.show(picture)

    widget.on_msg(lambda _widget, content, _buffers: begin(content))
    output.show(widget)


def is_in_browser() -> bool:
    """Return whether a page in a browser runs this cell: a page sends the cell's id, papermill does not."""
    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)()
    return "cellId" in parent.get("metadata", {})
