"""Which rank holds which (token, head) before and after an exchange, as grids in the ranks' colours."""

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
from lab.show.picture import Picture, draw_header, styled_figure

CellsByRank: TypeAlias = Sequence[Any]
"""The cells that each rank holds: an array or tensor [..., 2] of whole numbers, each (token, head)."""

Cells: TypeAlias = npt.NDArray[np.int64]
"""The distinct cells of a rank [n, 2]: each is (token, head)."""

_NARROWEST = 1 / 3
"""The smallest width of a grid, as a share of the widest: the name of a grid with few heads needs it."""

_NUMBER: dict[str, Any] = {
    "color": "black", "fontsize": 7, "ha": "center", "va": "center",
    "path_effects": [withStroke(linewidth=1.6, foreground="white")],
}  # fmt: skip


def exchange(grids: Mapping[str, CellsByRank], *, title: str = "") -> Picture:
    """Draw a grid for each name: tokens downward, heads to the right, each cell in the colour of its rank.

    The cells of a rank may come from a tensor [b, S, H, 2] (batch b, tokens S, heads H) whose entries are
    their own (token, head), after ``lab.techniques.exchange`` has sent it with a head_dim of 2. A cell that n
    ranks hold is drawn as n stripes; a cell that no rank holds is empty. The number of a rank is in the
    middle of its cells; of each piece, where its tokens are several pieces of the sequence.

    Args:
        grids: By name, the cells that each rank holds.
        title: A title above the picture.

    Raises:
        LabError: There is nothing to draw, or the shape is not [..., 2].
    """
    cells = {name: [_cells(name, values) for values in by_rank] for name, by_rank in grids.items()}
    if not cells or not all(map(len, cells.values())):
        raise LabError("no grids to draw: give each a name and what every rank holds, an array [..., 2]")
    sizes = {name: np.concatenate(by_rank).max(axis=0) + 1 for name, by_rank in cells.items()}
    with styled_figure(2.4) as figure:
        most = max(int(heads) for _, heads in sizes.values())
        widths = [max(int(heads), most * _NARROWEST) for _, heads in sizes.values()]
        row = figure.subplots(1, len(cells), squeeze=False, width_ratios=widths)[0]
        for axes, (name, by_rank) in zip(row, cells.items(), strict=True):
            _draw(axes, by_rank)
            _frame(axes, name, *map(int, sizes[name]))
        draw_header(figure, title)
    text = "; ".join(f"{name}, {_holdings_text(by_rank)}" for name, by_rank in cells.items())
    return Picture(figure, f"{title or 'Who holds what'}: {text}.")


def _cells(name: str, values: Any) -> Cells:
    array = np.asarray(values, dtype=np.int64)
    if array.size == 0 or array.shape[-1] != 2:
        raise LabError(
            f"{name!r}: what a rank holds is an array [..., 2] of (token, head), not {array.shape}"
        )
    return np.unique(array.reshape(-1, 2), axis=0)


def _draw(axes: Axes, by_rank: Sequence[Cells]) -> None:
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, cells in enumerate(by_rank):
        for token, of_head in cells.tolist():
            holders.setdefault((token, of_head), []).append(rank)
    for rank, cells in enumerate(by_rank):
        stripes = []
        for token, of_head in cells.tolist():
            ranks = holders[token, of_head]
            width = 1 / len(ranks)
            stripes.append(Rectangle((of_head + ranks.index(rank) * width, token), width, 1))
        axes.add_collection(
            PatchCollection(stripes, facecolor=SERIES_COLOURS[rank % len(SERIES_COLOURS)], linewidth=0)
        )
        for piece in _pieces(cells[:, 0]):
            left, top = np.mean([stripes[i].get_xy() for i in piece], axis=0)
            axes.text(left + stripes[0].get_width() / 2, top + 0.5, str(rank), **_NUMBER)


def _pieces(tokens: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Return the indices of ascending tokens, divided where a token is missing between two."""
    return np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(tokens) > 1) + 1)


def _frame(axes: Axes, name: str, tokens: int, heads: int) -> None:
    axes.set_title(name, loc="left")
    axes.set_xlim(0, heads)
    axes.set_ylim(tokens, 0)
    axes.set_xlabel(_count_text("head", range(heads)))
    axes.set_ylabel(_count_text("token", range(tokens)))
    axes.set_xticks(range(1, heads), [])
    axes.set_yticks(range(1, tokens), [])
    axes.tick_params(length=0)
    axes.set_axisbelow(False)
    axes.grid(color="white", linewidth=0.8)
    axes.spines[:].set_visible(False)


def _holdings_text(by_rank: Sequence[Cells]) -> str:
    """Return how many tokens and heads each rank holds; once, if all hold equally many."""
    counts = [" of ".join(map(_count_text, ("token", "head"), cells.T)) for cells in by_rank]
    copies = sum(map(len, by_rank)) / len(np.unique(np.concatenate(by_rank), axis=0))
    text = (
        f"every rank {counts[0]}"
        if len(set(counts)) == 1
        else ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
    )
    return text + (f", each on {copies:g} ranks" if copies > 1 else "")


def _count_text(unit: str, numbers: Iterable[int]) -> str:
    count = len(set(numbers))
    return f"{count} {unit}{'s' * (count > 1)}"
