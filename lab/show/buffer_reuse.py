"""Memory used again, seen: where each all-to-all of a rank reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from lab.errors import LabError
from lab.memory.exchanges import Exchange, memory_ranges
from lab.show.palette import SERIES_COLOURS
from lab.show.picture import Picture, drawing, head
from lab.show.scales import byte_axis, quiet
from lab.units import format_bytes

SENT, RECEIVED = SERIES_COLOURS[5], SERIES_COLOURS[1]


def buffers(exchanges: Mapping[str, Sequence[Exchange]], *, title: str = "") -> Picture:
    """Draw the memory that all-to-alls read and write, one panel a name: time to the right, address upward.

    Addresses that none of a panel's exchanges touches are left out, so a panel is as high as the memory that
    it shows. A buffer that is used again stands at the same height again.

    Raises:
        LabError: a name without exchanges.
    """
    if not exchanges or not all(exchanges.values()):
        raise LabError("no all-to-alls to draw: a group of one rank exchanges nothing")
    total = {name: sum(map(len, memory_ranges(found))) for name, found in exchanges.items()}
    moved = {name: sum(len(e.received) for e in found) for name, found in exchanges.items()}
    top = max(total.values())
    with drawing(3.0) as figure:
        widths = [max(len(found), 6) for found in exchanges.values()]
        grid = figure.subplots(
            1, len(exchanges), sharey=True, squeeze=False, gridspec_kw={"width_ratios": widths}
        )
        for axes, (name, found) in zip(grid[0], exchanges.items(), strict=True):
            _draw(axes, found)
            axes.set_title(f"{name}: {format_bytes(total[name])}", loc="left")
            axes.set_ylim(0, top * 1.04)
            axes.set_xlabel("all-to-all, in order")
            quiet(axes)
        byte_axis(grid[0][0].yaxis, top)
        for axes in grid[0][1:]:
            axes.tick_params(labelleft=False)
        marks = {"sent from": Patch(color=SENT), "received in": Patch(color=RECEIVED)}
        head(figure, title, list(marks.values()), list(marks))
    said = "; ".join(
        f"{name} receives {format_bytes(moved[name])} in {len(found)} all-to-alls and touches "
        f"{format_bytes(total[name])}"
        for name, found in exchanges.items()
    )
    return Picture(figure, f"{title or 'Buffers of all-to-alls'}: {said}.")


def _draw(axes: Axes, found: Sequence[Exchange]) -> None:
    height = _closed_up(found)
    for number, exchange in enumerate(found):
        for memory, colour in ((exchange.sent, SENT), (exchange.received, RECEIVED)):
            at = (number + 0.1, height(memory.start))
            axes.add_patch(Rectangle(at, 0.8, len(memory), facecolor=colour, linewidth=0))
    axes.set_xlim(0, len(found))
    shown = range(0, len(found), max(1, len(found) // 10))
    axes.set_xticks([number + 0.5 for number in shown], [str(number) for number in shown])


def _closed_up(found: Sequence[Exchange]) -> Callable[[int], int]:
    """Maps an address to its height: how much of the memory that is touched lies below it."""
    parts = memory_ranges(found)
    return lambda address: sum(min(len(part), max(0, address - part.start)) for part in parts)
