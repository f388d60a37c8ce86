"""The memory that the all-to-alls of a rank read and write, and how often it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from lab.errors import LabError
from lab.memory.exchanges import Exchange, memory_ranges
from lab.show.palette import SERIES_COLOURS
from lab.show.picture import Picture, draw_header, styled_figure
from lab.show.scales import byte_axis, simplify_axes
from lab.units import format_bytes

SENT, RECEIVED = SERIES_COLOURS[5], SERIES_COLOURS[0]


def buffer_reuse(exchanges: Mapping[str, Sequence[Exchange]], *, title: str = "") -> Picture:
    """Draw the memory that all-to-alls read and write: time to the right, addresses upward.

    Addresses that no all-to-all of a panel uses are left out, so the height of a panel is the memory that it
    shows. A buffer that is used again is drawn at the same height again.

    Args:
        exchanges: The all-to-alls in order, by the name of their panel.
        title: A title above the picture.

    Raises:
        LabError: There is no name, or a name without all-to-alls.
    """
    if not exchanges or not all(exchanges.values()):
        raise LabError("no all-to-alls to draw: a group of one rank exchanges nothing")
    total = {name: sum(map(len, memory_ranges(panel))) for name, panel in exchanges.items()}
    moved = {name: sum(len(e.received) for e in panel) for name, panel in exchanges.items()}
    top = max(total.values())
    with styled_figure(3.0) as figure:
        widths = [max(len(panel), 6) for panel in exchanges.values()]
        grid = figure.subplots(
            1, len(exchanges), sharey=True, squeeze=False, gridspec_kw={"width_ratios": widths}
        )
        for axes, (name, panel) in zip(grid[0], exchanges.items(), strict=True):
            _draw(axes, panel)
            axes.set_title(f"{name}: {format_bytes(total[name])}", loc="left")
            axes.set_ylim(0, top * 1.04)
            axes.set_xlabel("all-to-all, in order")
            simplify_axes(axes)
        byte_axis(grid[0][0].yaxis, top)
        grid[0][0].set_ylabel(f"{grid[0][0].get_ylabel()}, gaps left out")
        for axes in grid[0][1:]:
            axes.tick_params(labelleft=False)
        marks = {"sent from": Patch(color=SENT), "received in": Patch(color=RECEIVED)}
        draw_header(figure, title, marks)
    text = "; ".join(
        f"{name} receives {format_bytes(moved[name])} in {len(panel)} all-to-alls and reads or writes "
        f"{format_bytes(total[name])}"
        for name, panel in exchanges.items()
    )
    return Picture(figure, f"{title or 'Buffers of all-to-alls'}: {text}.")


def _draw(axes: Axes, exchanges: Sequence[Exchange]) -> None:
    height = _heights(exchanges)
    for number, exchange in enumerate(exchanges):
        for memory, colour in ((exchange.sent, SENT), (exchange.received, RECEIVED)):
            corner = (number + 0.1, height(memory.start))
            axes.add_patch(Rectangle(corner, 0.8, len(memory), facecolor=colour, linewidth=0))
    axes.set_xlim(0, len(exchanges))
    ticks = range(0, len(exchanges), max(1, len(exchanges) // 10))
    axes.set_xticks([number + 0.5 for number in ticks], [str(number) for number in ticks])


def _heights(exchanges: Sequence[Exchange]) -> Callable[[int], int]:
    """Return the function from an address to its height: the bytes in use below the address."""
    parts = memory_ranges(exchanges)
    return lambda address: sum(min(len(part), max(0, address - part.start)) for part in parts)
