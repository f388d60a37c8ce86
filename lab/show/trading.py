"""Memory against throughput: what a knob's values cost, one point each."""

from __future__ import annotations

from collections.abc import Mapping

from lab.errors import LabError
from lab.show.palette import SERIES_COLOURS, TEXT
from lab.show.picture import Picture, drawing, head
from lab.show.scales import byte_axis, quiet
from lab.units import format_bytes


def trade(points: Mapping[str, tuple[int, float]], *, picked: str = "", title: str = "") -> Picture:
    """Draw ``{name: (bytes, tokens a second)}``, a line through them in order, the ``picked`` one ringed.

    Down and to the right is better. Both axes begin at 0, so that a distance is a share of the whole.

    Raises:
        LabError: no points, or a ``picked`` one that is not among them.
    """
    if not points or (picked and picked not in points):
        raise LabError(f"no point {picked!r} to draw: there are {', '.join(points) or 'none'}")
    sizes, rates = zip(*points.values(), strict=True)
    with drawing(2.9) as figure:
        axes = figure.subplots()
        axes.plot(rates, sizes, "o-", color=SERIES_COLOURS[0], markersize=5, linewidth=1)
        for number, (name, (size, rate)) in enumerate(points.items()):
            above = number % 2 == 0
            axes.annotate(
                name, (rate, size), (0, 9 if above else -9), textcoords="offset points",
                ha="center", va="bottom" if above else "top",
            )  # fmt: skip
        if picked:
            size, rate = points[picked]
            axes.plot(rate, size, "o", markersize=13, markerfacecolor="none", color=SERIES_COLOURS[1])
            label = f"{picked}: {format_bytes(size)}, {rate:,.0f} tokens a second"
            axes.text(0.99, 0.04, label, transform=axes.transAxes, ha="right", color=TEXT, fontsize=9)
        axes.set_xlim(0, max(rates) * 1.1)
        axes.set_ylim(0, max(sizes) * 1.25)
        byte_axis(axes.yaxis, max(sizes))
        axes.set_xlabel("tokens a second")
        quiet(axes)
        head(figure, title)
    said = ", ".join(f"{name} {format_bytes(size)}" for name, (size, _) in points.items())
    return Picture(
        figure, f"{title or 'Memory against throughput'}: {said}{f'; {picked} picked' * bool(picked)}."
    )
