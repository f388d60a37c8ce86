"""Memory and throughput of each value of a knob, as two columns of bars."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from lab.errors import LabError
from lab.show.palette import SERIES_COLOURS
from lab.show.picture import Picture, annotate, draw_header, styled_figure
from lab.show.scales import byte_axis, simplify_axes
from lab.units import format_bytes

PLAIN, PICKED = SERIES_COLOURS[2], SERIES_COLOURS[3]


def memory_vs_speed(points: Mapping[str, tuple[int, float]], *, picked: str = "", title: str = "") -> Picture:
    """Draw a row for each name, with one bar of bytes and one of tokens per second.

    Args:
        points: (bytes, tokens per second) by name.
        picked: The name whose row is drawn in magenta; the others are grey.
        title: A title above the picture.

    Raises:
        LabError: There are no points, or ``picked`` is not one of them.
    """
    if not points or (picked and picked not in points):
        raise LabError(f"no point {picked!r} to draw: there are {', '.join(points) or 'none'}")
    sizes, rates = zip(*points.values(), strict=True)
    colours = [PICKED if name == picked else PLAIN for name in points]
    with styled_figure(0.95 + 0.3 * len(points)) as figure:
        memory, speed = figure.subplots(1, 2, sharey=True)
        _bars(memory, sizes, [format_bytes(size) for size in sizes], colours)
        _bars(speed, rates, [f"{rate:,.0f}" for rate in rates], colours)
        memory.set_yticks(range(len(points)), list(points))
        memory.invert_yaxis()
        byte_axis(memory.xaxis, max(sizes))
        speed.set_xlabel("tokens per second")
        memory.set_title("peak", loc="left")
        speed.set_title("throughput", loc="left")
        draw_header(figure, title)
    # The text leaves out the speed, because the text of a stored picture must be the same on every machine.
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in zip(points, sizes, strict=True))
    return Picture(
        figure, f"{title or 'Memory against throughput'}: {text}{f'; {picked} picked' * bool(picked)}."
    )


def _bars(axes: Axes, values: tuple[float, ...], labels: list[str], colours: list[str]) -> None:
    axes.barh(range(len(values)), values, 0.7, color=colours)
    for row, (value, label) in enumerate(zip(values, labels, strict=True)):
        annotate(axes, label, (value, row), (4, 0), fontsize=7.5)
    axes.set_xlim(0, max(values) * 1.2)
    simplify_axes(axes, along="x")
