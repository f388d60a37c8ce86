"""Bars of bytes by category, and lines of bytes or seconds over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

from matplotlib.axes import Axes

from lab.errors import LabError
from lab.memory.moment import Moment
from lab.show.palette import COLOURS, SERIES_COLOURS, SERIES_LINES
from lab.show.picture import OVERLAY, Picture, annotate, draw_header, styled_figure
from lab.show.scales import byte_axis, log_axis, simplify_axes
from lab.units import format_bytes, format_seconds, format_tokens


def stack(
    bars: Mapping[str, Mapping[str, int] | Moment],
    *,
    title: str = "",
    limit: int | None = None,
    longest: int | None = None,
    series: Sequence[str] = (),
) -> Picture:
    """Draw a bar for each name, split by category of bytes, with its total at the end.

    Args:
        bars: By name, a moment of a timeline (its device bytes), or bytes by category: the categories of a
            timeline, ``"host"`` and ``"disk"``.
        title: A title above the picture.
        limit: Bytes at which a line is drawn, for instance the memory of the device.
        longest: Bytes at which longer bars are cut and marked, so that one bar does not hide the others.
        series: The names of at most eight parts of bars that are no categories of bytes. They are drawn in
            colours that no category has.

    Raises:
        LabError: There are no bars, or a part of one is neither a category nor one of ``series``.
    """
    parts = {name: bar.by_category if isinstance(bar, Moment) else bar for name, bar in bars.items()}
    colours = COLOURS | dict(zip(series, SERIES_COLOURS, strict=False))
    unknown = {category for part in parts.values() for category in part} - colours.keys()
    if unknown or not parts:
        raise LabError(f"no bars to draw, or unknown categories {sorted(unknown)}: use {', '.join(colours)}")
    totals = [sum(part.values()) for part in parts.values()]
    top = max(*totals, limit or 0, 1)
    top = min(top, longest or top)
    with styled_figure(0.85 + 0.3 * len(parts)) as figure:
        axes = figure.subplots()
        starts, marks = [0] * len(parts), {}
        for category, colour in colours.items():
            widths = [part.get(category, 0) for part in parts.values()]
            if any(widths):
                marks[category] = axes.barh(range(len(parts)), widths, 0.7, starts, color=colour)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for row, total in enumerate(totals):
            # A label that the limit's line would cross is written to the right of the line.
            x = limit if limit is not None and total <= limit < total + top / 10 else min(total, top)
            annotate(axes, "» " * (total > top) + format_bytes(total), (x, row), (4, 0), fontsize=7.5)
        axes.set_yticks(range(len(parts)), list(parts))
        axes.invert_yaxis()
        # Leave space at the right for the label of the longest bar.
        axes.set_xlim(0, top * 1.1)
        for bar in axes.patches:
            # A bar that is cut ends where its label begins.
            bar.set_width(max(0, min(bar.get_width(), top - bar.get_x())))  # type: ignore[attr-defined]
        byte_axis(axes.xaxis, top, ticks=6)
        simplify_axes(axes, along="x")
        if limit is not None:
            axes.axvline(limit, **OVERLAY)
            above = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "baseline"}
            annotate(axes, format_bytes(limit), (limit, 1), (0, 2), fontsize=7, **above)
        draw_header(figure, title, marks)
    text = ", ".join(f"{name} {format_bytes(total)}" for name, total in zip(parts, totals, strict=True))
    end = f"; the line stands at {format_bytes(limit)}" if limit is not None else ""
    return Picture(figure, f"{title or 'Bytes'}: {text}{end}.")


def curves(
    tokens: Sequence[int],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: Literal["bytes", "seconds"] = "bytes",
    xlabel: str = "tokens",
    ylabel: str = "",
    title: str = "",
    log: bool = True,
) -> Picture:
    """Draw a line over tokens for each name, with its points marked and its name at its end.

    Args:
        tokens: The points of the horizontal axis.
        series: Values by name, one for each of ``tokens``; None for a value that is missing.
        unit: The unit of the values.
        xlabel: The label of the horizontal axis.
        ylabel: The label of the vertical axis.
        title: A title above the picture.
        log: Whether both axes are logarithmic. Then a value that grows with the square of the tokens rises
            twice as steeply as one that grows with the tokens.

    Raises:
        LabError: There is no series, one has no points, or one has not as many values as ``tokens``.
    """
    wrong = [name for name, values in series.items() if len(values) != len(tokens)]
    lines = {
        name: [(count, value) for count, value in zip(tokens, values, strict=False) if value is not None]
        for name, values in series.items()
    }
    if wrong or not lines or not all(lines.values()):
        raise LabError(f"each line needs {len(tokens)} values, not all None; wrong: {wrong or list(lines)}")
    with styled_figure(2.9) as figure:
        axes = figure.subplots()
        styles = cycle(zip(SERIES_COLOURS, SERIES_LINES, strict=True))
        for line, (colour, (dashes, marker)) in zip(lines.values(), styles, strict=False):
            style: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker}
            axes.plot(*zip(*line, strict=True), **style, markersize=4, linewidth=1.6)
        highest = max(value for line in lines.values() for _, value in line)
        base = 2 if unit == "bytes" else 10
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=base)
            log_axis(axes.yaxis, unit, base=base)
        else:
            axes.set_ylim(0, highest * 1.08)
            if unit == "bytes":
                byte_axis(axes.yaxis, highest)
        simplify_axes(axes)
        axes.set_xticks(tokens, [format_tokens(count) for count in tokens], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel or axes.get_ylabel() or ("" if log else unit))
        _name_ends(axes, {name: line[-1] for name, line in lines.items()})
        draw_header(figure, title)
    format_value = format_bytes if unit == "bytes" else format_seconds
    text = ", ".join(
        f"{name} {format_value(value)} at {format_tokens(count)}"
        for name, (count, value) in ((name, line[-1]) for name, line in lines.items())
    )
    return Picture(figure, f"{title or ylabel or unit.capitalize()} over {xlabel}: {text}.")


def _name_ends(axes: Axes, ends: Mapping[str, tuple[int, float]]) -> None:
    """Write the name of each line to the right of its last point; a name moves up if it would overlap."""
    colours = dict(zip(ends, cycle(SERIES_COLOURS), strict=False))
    lowest = -1.0
    for name, (count, value) in sorted(ends.items(), key=lambda end: end[1][1]):
        across, up = axes.transAxes.inverted().transform(axes.transData.transform((count, value)))
        lowest = max(float(up), lowest + 0.06)
        style = {"xycoords": "axes fraction", "color": colours[name]}
        annotate(axes, name, (across, lowest), (7, 0), **style)
