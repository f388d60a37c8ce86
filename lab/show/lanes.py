"""Which work ran when: bars in lanes, over one axis of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lab.errors import LabError
from lab.memory.spans import Span
from lab.show.palette import SERIES_COLOURS
from lab.show.picture import Picture, annotate, draw_header, styled_figure
from lab.show.scales import simplify_axes
from lab.units import format_seconds

_SHORTEST = 1 / 400
"""The length of the shortest bar, as a share of the axis: a shorter one could not be seen."""

_EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
"""The edge of a bar, which separates it from the next."""

_LETTERS = 150
"""How many small letters fit side by side in a whole picture."""


def lanes(runs: Mapping[str, Mapping[str, Sequence[Span]]], *, title: str = "") -> Picture:
    """Draw a group of lanes for each run: a lane and a colour for each kind of work, a bar for each span.

    The seconds of each run count from its earliest span. A label is written in its bar, or after it, if there
    is enough space.

    Args:
        runs: By name, the spans of a run by kind of work: (label, start, end), in seconds.
        title: A title above the picture.

    Raises:
        LabError: There is no run, or a run has no spans.
    """
    if not runs or not all(any(kinds.values()) for kinds in runs.values()):
        raise LabError("no lanes to draw: give each run its kinds of work, and each kind (label, start, end)")
    kinds = dict.fromkeys(kind for run in runs.values() for kind in run)
    colours = dict(zip(kinds, SERIES_COLOURS, strict=False))
    spans = {name: _from_zero(run) for name, run in runs.items()}
    ends = {name: max(end for lane in run.values() for _, _, end in lane) for name, run in spans.items()}
    longest = max(ends.values())
    with styled_figure(0.75 + 0.34 * sum(map(len, runs.values()))) as figure:
        axes = figure.subplots()
        places, names = [], []
        row = 0.0
        for name, run in spans.items():
            for kind, lane in run.items():
                bars = [(start, max(end - start, longest * _SHORTEST)) for _, start, end in lane]
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=colours[kind], **_EDGE)
                next_starts = [*(start for _, start, _ in lane[1:]), longest]
                for span, next_start in zip(lane, next_starts, strict=False):  # a lane may have no spans
                    _write_label(axes, span, next_start, row, longest)
                places.append(row)
                names.append(f"{name}: {kind}")
                row += 1
            row += 0.5
        axes.set_yticks(places, names)
        axes.set_ylim(row - 1, -0.6)
        axes.set_xlim(0, longest)
        axes.set_xlabel("seconds")
        simplify_axes(axes, along="x")
        axes.spines["left"].set_visible(False)
        draw_header(figure, title, {kind: Patch(color=colour) for kind, colour in colours.items()})
    text = ", ".join(f"{name} {format_seconds(end)}" for name, end in ends.items())
    return Picture(figure, f"{title or 'What ran when'}: {text}.")


def _from_zero(run: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    first = min(start for lane in run.values() for _, start, _ in lane)
    return {
        kind: sorted(
            ((label, start - first, end - first) for label, start, end in lane), key=lambda span: span[1]
        )
        for kind, lane in run.items()
    }


def _write_label(axes: Axes, span: Span, next_start: float, row: float, longest: float) -> None:
    """Write the label in its bar, or between the bar and ``next_start``, or not at all."""
    label, start, end = span
    width = (len(label) + 1) / _LETTERS * longest
    if end - start > width:
        axes.text((start + end) / 2, row, label, color="white", ha="center", va="center", fontsize=7)
    elif next_start - max(end, start + longest * _SHORTEST) > width:
        annotate(axes, label, (end, row), (3, 0), fontsize=7)
