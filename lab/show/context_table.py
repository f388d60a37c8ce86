"""The longest contexts as a table of coloured cells: models downward, machines to the right."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from lab.errors import LabError
from lab.planning.max_context_table import LongestContext
from lab.show.palette import SERIES_COLOURS
from lab.show.picture import Picture, draw_header, styled_figure
from lab.show.scales import table_axes
from lab.units import round_tokens

_COLOUR = SERIES_COLOURS[3]
_FAINTEST, _STRONGEST = 0.05, 0.35
"""The opacity of the shortest and of the longest context."""

_WIDTH, _HEIGHT = 0.97, 0.94
"""The size of a cell, of which a unit is for the cell and the gap to the next one."""

_CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}


def context_table(cells: Sequence[LongestContext], *, title: str = "Longest context") -> Picture:
    """Draw a cell for each model and machine: the tokens, the best recipe, and the memory that stops more.

    A longer context has a stronger colour, on a logarithmic scale. Where nothing fits there is no colour.

    Args:
        cells: As ``lab.planning.longest_contexts`` returns them.
        title: A title above the picture.

    Raises:
        LabError: There are no cells.
    """
    if not cells:
        raise LabError("no longest contexts to draw: give a model and a machine")
    models = list(dict.fromkeys(cell.model for cell in cells))
    rentals = list(dict.fromkeys(cell.rental for cell in cells))
    with styled_figure(0.75 + 0.42 * len(models)) as figure:
        axes = figure.subplots()
        for cell, opacity in zip(cells, _opacities(cells), strict=True):
            _draw_cell(axes, cell, opacity, rentals.index(cell.rental), models.index(cell.model))
        table_axes(axes, [rental.title for rental in rentals], models, (_WIDTH / 2, _HEIGHT / 2))
        draw_header(figure, f"{title}: tokens, the best recipe, and the memory that stops more")
    text = "; ".join(
        f"{cell.model} on {cell.rental.title} "
        + (f"{round_tokens(cell.tokens)} with {cell.recipe_name}" if cell.tokens else "nothing fits")
        for cell in cells
    )
    return Picture(figure, f"{title}: {text}.")


def _opacities(cells: Sequence[LongestContext]) -> list[float]:
    lengths = [log2(cell.tokens) for cell in cells if cell.tokens]
    low = min(lengths, default=0.0)
    spread = max(lengths, default=0.0) - low or 1.0
    return [
        _FAINTEST + (_STRONGEST - _FAINTEST) * (log2(cell.tokens) - low) / spread if cell.tokens else 0.0
        for cell in cells
    ]


def _draw_cell(axes: Axes, cell: LongestContext, opacity: float, x: int, y: int) -> None:
    middle = x + _WIDTH / 2
    if not cell.tokens:
        axes.text(middle, y + _HEIGHT / 2, "nothing fits", fontsize=6.5, **_CENTRED)
        return
    axes.add_patch(Rectangle((x, y), _WIDTH, _HEIGHT, facecolor=_COLOUR, alpha=opacity, linewidth=0))
    stop = f", {cell.limit}" if cell.limit else ""
    axes.text(middle, y + 0.3, round_tokens(cell.tokens), weight="bold", **_CENTRED)
    axes.text(middle, y + 0.68, f"{cell.recipe_name}{stop}", fontsize=6.5, **_CENTRED)
