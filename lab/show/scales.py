"""Axes of bytes and seconds: units and round ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lab.units import GiB, KiB, MiB, TiB, format_bytes, format_seconds


def byte_axis(axis: Axis, top: float, *, ticks: int = 4) -> None:
    """Give an axis of bytes that ends at ``top`` round ticks and the name of a suitable unit."""
    units = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB))
    name, size = next((unit for unit in units if top >= unit[1]), ("KiB", KiB))
    steps = MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top / size)
    axis.set_ticks([step * size for step in steps if step * size <= top], minor=False)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))
    axis.set_label_text(name)


def log_axis(axis: Axis, unit: Literal["bytes", "seconds"], *, base: int) -> None:
    """Label the powers of ``base`` on a logarithmic axis, with their unit."""
    format_value = _short_bytes if unit == "bytes" else format_seconds
    axis.set_major_locator(LogLocator(base=base, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))


def _short_bytes(size: float) -> str:
    number, unit = format_bytes(size).split()
    return f"{float(number):g} {unit}"


def table_axes(
    axes: Axes, columns: Sequence[str], rows: Sequence[str], middle: tuple[float, float] = (0.5, 0.5)
) -> None:
    """Give an axes a column and a row of one unit for each name, from the upper left, and remove its lines.

    Args:
        axes: The axes.
        columns: The names above the columns.
        rows: The names left of the rows.
        middle: The place of the names, from the left edge of a column and from the upper edge of a row.
    """
    across, down = middle
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([n + across for n in range(len(columns))], columns)
    axes.set_yticks([n + down for n in range(len(rows))], rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def simplify_axes(axes: Axes, along: Literal["x", "y"] = "y") -> None:
    """Draw faint lines at the ticks of the axis ``along``, and remove its line and all tick marks."""
    axes.grid(axis=along, linewidth=0.5, alpha=0.25)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")
    axes.spines["left" if along == "y" else "bottom"].set_visible(False)
