"""A drawn figure that a notebook shows as one PNG and stores with one line of text that says the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

from lab.show.palette import TEXT

DPI = 180
"""Pixels an inch of a stored picture: about twice what a screen shows, so that it stays crisp."""

WIDTH = 9.0
"""Inches: the width of a notebook's cell."""

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


OVERLAY: dict[str, Any] = {
    "color": "black",
    "linewidth": 0.9,
    "path_effects": [withStroke(linewidth=2.2, foreground="white")],
}
"""A line over coloured areas: dark with a light edge, to be seen on every colour, by day and by night."""


@dataclass(frozen=True, eq=False)
class Picture:
    """What the functions of ``lab.show`` return: a notebook displays it once, as it is the cell's value.

    ``figure`` is matplotlib's, for whoever wants to change or save it; ``text`` says in words what is drawn.
    """

    figure: Figure
    text: str

    @cached_property
    def png(self) -> bytes:
        """The picture as stored, transparent, rendered once."""
        drawn, stored = BytesIO(), BytesIO()
        self.figure.savefig(drawn, format="png", dpi=DPI, transparent=True)
        # Few colours, so a palette does: a third of the size, and notebooks are kept in git.
        palette = Image.open(drawn).quantize(256, method=Image.Quantize.FASTOCTREE)
        palette.save(stored, "PNG", optimize=True)
        return stored.getvalue()

    def __repr__(self) -> str:
        return self.text

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        return self.png, {"width": round(self.figure.get_figwidth() * _SCREEN_DPI)}


@contextmanager
def drawing(height: float) -> Iterator[Figure]:
    """Yield an empty figure of this height in inches; what is drawn in the block has the lab's style.

    It never meets pyplot, so no backend draws it a second time.
    """
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def head(figure: Figure, title: str, marks: Sequence[Artist] = (), names: Sequence[str] = ()) -> None:
    """Write the title at the upper left and the legend beside it, or in its place."""
    if title:
        # With a legend beside it the layout has made room already, and the two should share a line.
        at = {"y": 1 - 0.06 / figure.get_figheight()} if marks else {}
        figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, **at)
    if marks:
        figure.legend(
            marks,
            names,
            loc="outside upper right" if title else "outside upper left",
            ncols=len(marks),
            fontsize=7.5,
            handlelength=1,
            handletextpad=0.4,
            columnspacing=1.1,
            borderpad=0.2,
        )
