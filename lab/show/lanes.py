"""What ran when: bars in lanes, all on one axis of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lab.errors import LabError
from lab.memory.spans import Span
from lab.show.palette import SERIES_COLOURS
from lab.show.picture import Picture, drawing, head
from lab.show.scales import quiet
from lab.units import format_seconds

_SHORTEST = 1 / 400
"""Of the axis: a bar is drawn at least so long, that it can be seen."""

_SEAM: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
"""Between bars that touch."""

_LETTERS = 150
"""Small letters that fit side by side in a whole picture."""


def lanes(runs: Mapping[str, Mapping[str, Sequence[Span]]], *, title: str = "") -> Picture:
    """Draw one group of lanes a run, in it one lane and one colour a kind of work, a bar for every span.

    All runs begin at the left: their seconds count from the earliest start of each. A label is written where
    its bar, or the room up to the next one, is long enough.

    Raises:
        LabError: no run, or one in which nothing ran.
    """
    if not runs or not all(any(kinds.values()) for kinds in runs.values()):
        raise LabError("no lanes to draw: give each run its kinds of work, and each kind (label, start, end)")
    kinds = list(dict.fromkeys(kind for run in runs.values() for kind in run))
    spans = {name: _from_zero(run) for name, run in runs.items()}
    ends = {name: max(end for lane in run.values() for _, _, end in lane) for name, run in spans.items()}
    longest = max(ends.values())
    with drawing(0.75 + 0.34 * sum(map(len, runs.values()))) as figure:
        axes = figure.subplots()
        places, names = [], []
        row = 0.0
        for name, run in spans.items():
            for kind, lane in run.items():
                bars = [(start, max(end - start, longest * _SHORTEST)) for _, start, end in lane]
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=SERIES_COLOURS[kinds.index(kind)], **_SEAM)
                rooms = [*(start for _, start, _ in lane[1:]), longest]
                for span, room in zip(lane, rooms, strict=False):  # no bar, no room
                    _write(axes, span, room, row, longest)
                places.append(row)
                names.append(f"{name}: {kind}")
                row += 1
            row += 0.5
        axes.set_yticks(places, names)
        axes.set_ylim(row - 1, -0.6)
        axes.set_xlim(0, longest)
        axes.set_xlabel("seconds")
        quiet(axes, along="x")
        axes.spines["left"].set_visible(False)
        head(figure, title, [Patch(color=SERIES_COLOURS[kinds.index(kind)]) for kind in kinds], kinds)
    said = ", ".join(f"{name} {format_seconds(end)}" for name, end in ends.items())
    return Picture(figure, f"{title or 'What ran when'}: {said}.")


def _from_zero(run: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    first = min(start for lane in run.values() for _, start, _ in lane)
    return {
        kind: sorted(
            ((label, start - first, end - first) for label, start, end in lane), key=lambda span: span[1]
        )
        for kind, lane in run.items()
    }


def _write(axes: Axes, span: Span, room: float, row: float, longest: float) -> None:
    """The label in its bar; else right of it, where nothing stands up to ``room``; else not at all."""
    label, start, end = span
    wide = (len(label) + 1) / _LETTERS * longest
    if end - start > wide:
        axes.text((start + end) / 2, row, label, color="white", ha="center", va="center", fontsize=7)
    elif room - max(end, start + longest * _SHORTEST) > wide:
        axes.annotate(label, (end, row), (3, 0), textcoords="offset points", va="center", fontsize=7)
