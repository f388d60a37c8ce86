"""One panel of a memory timeline: bytes by category over time, phases behind, the peak marked."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from lab.memory.timeline import CATEGORIES, Timeline
from lab.show.live.thinning import Places, widened
from lab.show.palette import CATEGORY_COLOURS, COLOURS, PHASE_TINTS, TEXT
from lab.show.picture import OVERLAY
from lab.show.scales import quiet

Over = Literal["seconds", "operators"]
"""What runs along the horizontal axis: the time of the step, or its operators one by one."""

_COLUMNS = 1000
"""Stretches of time that a whole picture tells apart: fewer than its pixels."""

_LETTERS = 150
"""Small letters that fit side by side in a whole picture."""


@dataclass(frozen=True)
class Panel:
    """Where one timeline is drawn: the rows worth drawing, and the places where they stand on the axis.

    ``share`` is the part of the picture's width that the panel takes.
    """

    at: Places
    rows: Timeline
    share: float


def clock(timeline: Timeline, over: Over) -> Places:
    """Where each row stands on the horizontal axis [n]."""
    return timeline.seconds if over == "seconds" else np.arange(len(timeline), dtype=np.float64)


def panel(timeline: Timeline, over: Over, share: float) -> Panel:
    """Pick the rows that a panel of this share of the picture can show."""
    at, rows = widened(clock(timeline, over), timeline.total, round(_COLUMNS * share))
    return Panel(at, timeline.rows(rows), share)


def draw_stack(axes: Axes, panel: Panel) -> None:
    """Fill the bytes of each category over time, one on another, and ring the peak."""
    at, rows = panel.at, panel.rows
    above = np.zeros(len(rows), dtype=np.int64)
    for category, colour, held in zip(CATEGORIES, CATEGORY_COLOURS, rows.device.T, strict=True):
        axes.fill_between(at, above, above + held, step="post", facecolor=colour, linewidth=0, label=category)
        above = above + held
    highest = int(above.argmax())
    axes.plot(
        at[highest], above[highest], "o", markersize=5, markerfacecolor="none", color=TEXT, clip_on=False
    )


def draw_phases(axes: Axes, panel: Panel) -> None:
    """Tint the phases, name those that have room, and rule a line where a step begins."""
    at, rows = panel.at, panel.rows
    width = float(at[-1] - at[0]) or 1.0
    upright = axes.get_xaxis_transform()
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASE_TINTS}
    for phase, _, drawn in _runs(rows):
        start, end = at[drawn.start], at[min(drawn.stop, len(at) - 1)]
        if phase not in spans:
            continue
        spans[phase].append((start, end - start))
        if (end - start) / width * panel.share * _LETTERS > len(phase) + 1:
            axes.text((start + end) / 2, 0.985, phase, transform=upright, ha="center", va="top", fontsize=7)
    for phase, tint in PHASE_TINTS.items():
        bands = axes.broken_barh(spans[phase], (0, 1), color=TEXT, alpha=tint, linewidth=0, zorder=0)
        bands.set_transform(upright)
    steps = np.flatnonzero(np.diff(rows.step)) + 1
    if len(steps) < _LETTERS * panel.share:
        axes.vlines(at[steps], 0, 1, transform=upright, color=TEXT, linewidth=0.6, linestyle=(0, (2, 2)))


def draw_host(axes: Axes, panel: Panel) -> None:
    """The lane below: bytes that wait in host memory."""
    at, rows = panel.at, panel.rows
    axes.fill_between(at, 0, rows.host, step="post", facecolor=COLOURS["host"], linewidth=0, label="host")
    quiet(axes)


def draw_planned(axes: Axes, timeline: Timeline, planned: Timeline, over: Over) -> None:
    """A line: what the plan says, each of its phases stretched to the time that the phase really took."""
    for at, held in planned_over(timeline, planned, clock(timeline, over)):
        axes.step(at, held, where="post", **OVERLAY)


def planned_over(
    timeline: Timeline, planned: Timeline, at: npt.NDArray[np.float64]
) -> list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
    """Lay the plan's bytes on the measured clock, phase by phase: a plan knows an order, not a time.

    A step that the plan lacks is compared with its last one. Returns ``(at, bytes)`` for each phase.
    """
    plan = {(phase, step): rows for phase, step, rows in _runs(planned)}
    last = max((step for _, step in plan), default=0)
    laid = []
    for phase, step, rows in _runs(timeline):
        found = plan.get((phase, min(step, last)))
        if found is not None:
            # Row k of n in the plan's phase belongs where k/n of the measured phase's rows have passed.
            place = np.linspace(0, rows.stop - rows.start - 1, found.stop - found.start)
            laid.append((np.interp(place, np.arange(rows.stop - rows.start), at[rows]), planned.total[found]))
    return laid


def _runs(timeline: Timeline) -> list[tuple[str, int, slice]]:
    """Phase, step and rows of each stretch of one phase in one step."""
    changes = np.flatnonzero((np.diff(timeline.phase) != 0) | (np.diff(timeline.step) != 0)) + 1
    edges = [0, *changes.tolist(), len(timeline)]
    return [
        (timeline.phases[timeline.phase[start]], int(timeline.step[start]), slice(start, end))
        for start, end in pairwise(edges)
        if end > start
    ]
