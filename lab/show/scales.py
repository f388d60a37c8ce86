"""Axes of bytes and seconds: units and round ticks."""

from __future__ import annotations

from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lab.units import GiB, KiB, MiB, TiB, format_bytes, format_seconds


def byte_unit(top: float) -> tuple[str, int]:
    """Return the name and the size of the unit for an axis that ends at ``top`` bytes."""
    for name, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB)):
        if top >= size:
            return name, size
    return "KiB", KiB


def byte_axis(axis: Axis, top: float, *, ticks: int = 4) -> None:
    """Give an axis of bytes that ends at ``top`` round ticks and the name of a suitable unit."""
    name, size = byte_unit(top)
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


def simplify_axes(axes: Axes, along: Literal["x", "y"] = "y") -> None:
    """Draw faint lines at the ticks of the axis ``along``, and remove its line and all tick marks."""
    axes.grid(axis=along, linewidth=0.5, alpha=0.25)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")
    axes.spines["left" if along == "y" else "bottom"].set_visible(False)
