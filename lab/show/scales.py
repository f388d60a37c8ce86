"""Axes of bytes, seconds and tokens: binary units, round ticks."""

from __future__ import annotations

from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lab.units import GiB, KiB, MiB, TiB, format_bytes, format_seconds


def byte_unit(top: float) -> tuple[str, int]:
    """Name and size of the unit for an axis that reaches ``top`` bytes."""
    for name, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB)):
        if top >= size:
            return name, size
    return "KiB", KiB


def byte_axis(axis: Axis, top: float, *, ticks: int = 4) -> None:
    """Round ticks in the unit that suits ``top`` bytes, which stands at the axis; the data stays in bytes."""
    name, size = byte_unit(top)
    steps = MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top / size)
    axis.set_ticks([step * size for step in steps if step * size <= top], minor=False)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}"))
    axis.set_label_text(name)


def log_axis(axis: Axis, unit: Literal["bytes", "seconds"], *, base: int) -> None:
    """Name each power of ``base`` on a logarithmic axis with its unit."""
    written = _short_bytes if unit == "bytes" else format_seconds
    axis.set_major_locator(LogLocator(base=base, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))


def _short_bytes(size: float) -> str:
    number, unit = format_bytes(size).split()
    return f"{float(number):g} {unit}"


def quiet(axes: Axes, along: Literal["x", "y"] = "y") -> None:
    """Leave of the axes what is read: faint lines at the ticks of the axis of values, no marks."""
    axes.grid(axis=along, linewidth=0.5, alpha=0.25)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")
    axes.spines["left" if along == "y" else "bottom"].set_visible(False)
