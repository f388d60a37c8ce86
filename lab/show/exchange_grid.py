"""Who holds which (token, head) before and after an exchange: grids in the colours of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from lab.errors import LabError
from lab.show.palette import SERIES_COLOURS
from lab.show.picture import Picture, drawing, head

Held: TypeAlias = Sequence[Any]
"""By rank: the cells that it holds, an array or tensor [..., 2] of whole numbers, each (token, head)."""

Cells: TypeAlias = npt.NDArray[np.int64]

_NARROWEST = 1 / 3
"""Of the widest grid's width: that of a grid of few heads, so that its name and its ranks can be read."""

_NUMBER: dict[str, Any] = {
    "color": "black", "fontsize": 7, "ha": "center", "va": "center",
    "path_effects": [withStroke(linewidth=1.6, foreground="white")],
}  # fmt: skip


def exchange(grids: Mapping[str, Held], *, title: str = "") -> Picture:
    """Draw one grid a name, tokens downward and heads across, each cell in the colour of the rank it is on.

    A tensor [b, S, H, 2] whose entries are their own (token, head), sent through ``lab.techniques.exchange``
    as if head_dim were 2, is drawn as it came out. A cell that n ranks hold is cut in n stripes; one that
    nobody holds stays empty. Ranks are numbered in the middle of what they hold.

    Raises:
        LabError: nothing to draw, or not the shape above.
    """
    cells = {name: [_cells(name, of_rank) for of_rank in held] for name, held in grids.items()}
    if not cells or not all(map(len, cells.values())):
        raise LabError("no grids to draw: give each a name and what every rank holds, an array [..., 2]")
    sizes = {name: np.concatenate(held).max(axis=0) + 1 for name, held in cells.items()}
    with drawing(2.4) as figure:
        most = max(int(heads) for _, heads in sizes.values())
        widths = [max(int(heads), most * _NARROWEST) for _, heads in sizes.values()]
        row = figure.subplots(1, len(cells), squeeze=False, width_ratios=widths)[0]
        for axes, (name, held) in zip(row, cells.items(), strict=True):
            _draw(axes, held)
            _frame(axes, name, *map(int, sizes[name]))
        head(figure, title)
    said = "; ".join(f"{name}, {_in_words(held)}" for name, held in cells.items())
    return Picture(figure, f"{title or 'Who holds what'}: {said}.")


def _cells(name: str, of_rank: Any) -> Cells:
    """The distinct cells of a rank [n, 2]."""
    found = np.asarray(of_rank, dtype=np.int64)
    if found.size == 0 or found.shape[-1] != 2:
        raise LabError(
            f"{name!r}: what a rank holds is an array [..., 2] of (token, head), not {found.shape}"
        )
    return np.unique(found.reshape(-1, 2), axis=0)


def _draw(axes: Axes, held: Sequence[Cells]) -> None:
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, cells in enumerate(held):
        for token, of_head in cells.tolist():
            holders.setdefault((token, of_head), []).append(rank)
    for rank, cells in enumerate(held):
        stripes = []
        for token, of_head in cells.tolist():
            ranks = holders[token, of_head]
            width = 1 / len(ranks)
            stripes.append(Rectangle((of_head + ranks.index(rank) * width, token), width, 1))
        axes.add_collection(
            PatchCollection(stripes, facecolor=SERIES_COLOURS[rank % len(SERIES_COLOURS)], linewidth=0)
        )
        left, top = np.mean([stripe.get_xy() for stripe in stripes], axis=0)
        axes.text(left + stripes[0].get_width() / 2, top + 0.5, str(rank), **_NUMBER)


def _frame(axes: Axes, name: str, tokens: int, heads: int) -> None:
    axes.set_title(name, loc="left")
    axes.set_xlim(0, heads)
    axes.set_ylim(tokens, 0)
    axes.set_xlabel(_counted("head", range(heads)))
    axes.set_ylabel(_counted("token", range(tokens)))
    axes.set_xticks(range(1, heads), [])
    axes.set_yticks(range(1, tokens), [])
    axes.tick_params(length=0)
    axes.set_axisbelow(False)
    axes.grid(color="white", linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _in_words(held: Sequence[Cells]) -> str:
    """What each rank holds, or, where that is the same for all but for which cells, what every one does."""
    said = [" of ".join(map(_counted, ("token", "head"), cells.T)) for cells in held]
    copies = sum(map(len, held)) / len(np.unique(np.concatenate(held), axis=0))
    alike = (
        f"every rank {said[0]}"
        if len(set(said)) == 1
        else ", ".join(f"rank {rank} {text}" for rank, text in enumerate(said))
    )
    return alike + (f", each on {copies:g} ranks" if copies > 1 else "")


def _counted(what: str, numbers: Iterable[int]) -> str:
    count = len(set(numbers))
    return f"{count} {what}{'s' * (count > 1)}"
