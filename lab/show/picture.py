"""A figure that a notebook shows as a PNG, and stores with a line of text that describes it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

from lab.show.palette import TEXT

DPI = 180
"""Pixels an inch of a stored picture: about twice those of a screen."""

WIDTH = 9.0
"""The width of a picture in inches: that of a notebook's cell."""

_SCREEN_DPI = 100

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "font.size": 8,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "xtick.labelsize": 7.5,
    "ytick.color": TEXT,
    "ytick.labelsize": 7.5,
}


_TITLE_SIZE, _LEGEND_SIZE = 9.5, 7.5
"""The sizes of letters, in points."""

OVERLAY: dict[str, Any] = {
    "color": "black",
    "linewidth": 0.9,
    "path_effects": [withStroke(linewidth=2.2, foreground="white")],
}
"""The style of a line over coloured areas: dark with a light edge, so that every colour shows it."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture that a notebook displays as the value of its cell.

    Attributes:
        figure: The matplotlib figure, to change or to save.
        text: A description of what is drawn.
    """

    figure: Figure
    text: str

    @cached_property
    def png(self) -> bytes:
        """The picture as a PNG with a transparent background, rendered once."""
        full, stored = BytesIO(), BytesIO()
        self.figure.savefig(full, format="png", dpi=DPI, transparent=True)
        # A palette of 256 colours is enough and a third of the size; notebooks are stored in git.
        palette = Image.open(full).quantize(256, method=Image.Quantize.FASTOCTREE)
        palette.save(stored, "PNG", optimize=True)
        return stored.getvalue()

    @property
    def stored(self) -> dict[str, str]:
        """What a page without a kernel shows in place of a widget: the picture and its text."""
        return {"image/png": b64encode(self.png).decode(), "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        return self.png, {"width": round(self.figure.get_figwidth() * _SCREEN_DPI)}


@contextmanager
def styled_figure(height: float) -> Iterator[Figure]:
    """Yield an empty figure of this height in inches. Whatever is drawn in the block has the lab's style.

    The figure does not belong to pyplot, so no backend draws it a second time.
    """
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def draw_header(figure: Figure, title: str, marks: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Write the title at the upper left, and the legend at the upper right, or below the title if it is long.

    Without a title, the legend is at the left. A legend that is wider than the figure has two rows.
    """
    beside = title and _fit_in_a_line(figure, title, marks)
    if title and not (marks and not beside):
        # The layout reserves space for the legend; the title is on the same line.
        position = {"y": 1 - 0.06 / figure.get_figheight()} if marks else {}
        # The name of a model may have dollar signs, which are no formula.
        figure.suptitle(title, x=0.01, ha="left", fontsize=_TITLE_SIZE, parse_math=False, **position)
    if marks:
        legend = figure.legend(
            marks.values(),
            marks.keys(),
            title=None if beside else title or None,
            title_fontsize=_TITLE_SIZE,
            alignment="left",
            loc="outside upper right" if beside else "outside upper left",
            ncols=len(marks) if _fit_in_a_line(figure, "", marks) else -(-len(marks) // 2),
            fontsize=_LEGEND_SIZE,
            handlelength=1,
            handletextpad=0.4,
            columnspacing=1.1,
            borderpad=0.2,
        )
        legend.get_title().set_parse_math(False)


def annotate(axes: Axes, text: str, at: tuple[float, float], points: tuple[int, int], **style: Any) -> None:
    """Write a text so many points to the right of a place and above it."""
    axes.annotate(text, at, points, textcoords="offset points", **{"va": "center", **style})


def _fit_in_a_line(figure: Figure, title: str, names: Iterable[str]) -> bool:
    """Return whether a title and a legend fit side by side; letters are 0.6 of their size wide on average."""
    legend = sum(0.6 * len(name) + 2.5 for name in names) * _LEGEND_SIZE
    return 0.6 * len(title) * _TITLE_SIZE + legend < figure.get_figwidth() * 72
