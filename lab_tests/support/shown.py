"""What pictures, pages and executed cells show."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from nbclient import NotebookClient
from PIL import Image

from lab.show.live import widget as live_widget
from lab.show.picture import Picture
from lab_tests.support.browser import FROM_HERE


def pixels(picture: Picture) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture.png)).convert("RGBA")).astype(int)


def count_pixels(picture: Picture, colour: str) -> int:
    """How many pixels have this colour, as nearly as the stored palette has it."""
    wanted = [int(colour[n : n + 2], 16) for n in (1, 3, 5)] + [255]
    return int((np.abs(pixels(picture) - wanted).max(axis=2) < 10).sum())


def rectangles(axes: Axes) -> list[tuple[float, float, float, float, str]]:
    """The left, lower, right and upper edge, and the colour, of every shape of the collections."""
    return [
        (*path.vertices.min(axis=0), *path.vertices.max(axis=0), to_hex(shapes.get_facecolor()[0]).upper())
        for shapes in axes.collections
        for path in shapes.get_paths()
    ]


def execute_cell(code: str, folder: Path) -> nbformat.NotebookNode:
    """A notebook of one cell, executed in ``folder`` where nobody looks on."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FROM_HERE + code)])
    resources = {"metadata": {"path": folder}}
    return NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()


class Page:
    """Stands for a notebook's page: takes what is displayed and sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, metadata: Mapping[str, str]) -> None:
        self.shown: list[tuple[Any, dict[str, Any]]] = []
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        self.open_at_update: list[bool] = []
        self._metadata = metadata
        monkeypatch.setattr(live_widget, "get_ipython", lambda: self)
        monkeypatch.setattr(live_widget, "display", self._display)
        monkeypatch.setattr(
            live_widget.TimelineWidget,
            "send",
            lambda _, content, buffers: self.sent.append((content, buffers)),
        )

    @property
    def kinds(self) -> list[str]:
        return [content["kind"] for content, _ in self.sent]

    def get_parent(self) -> dict[str, Any]:
        return {"metadata": self._metadata}

    def _display(self, thing: Any, **where: Any) -> None:
        if where.get("update"):
            self.open_at_update.append(self.shown[-1][0].comm is not None)
        self.shown.append((thing, where))
