"""The parts of a panel of a memory timeline: bytes by category, phases, other memories, and a plan's line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from lab.memory.categories import CATEGORIES
from lab.memory.timeline import Timeline
from lab.show.live.thinning import Positions, widen_peaks
from lab.show.palette import CATEGORY_COLOURS, COLOURS, PHASE_TINTS, TEXT
from lab.show.picture import OVERLAY
from lab.show.scales import simplify_axes

Over = Literal["seconds", "operators"]
"""The horizontal axis: the seconds of the step, or its operators one by one."""

Lane = Literal["host", "disk"]
"""A memory other than the device's, which has a lane below the stack."""

_COLUMNS = 1000
"""How many intervals of time are drawn in a whole picture: fewer than its pixels."""

_LETTERS = 150
"""How many small letters fit side by side in a whole picture."""


@dataclass(frozen=True)
class Panel:
    """The rows of a timeline that a panel draws.

    Attributes:
        positions: The position of each row on the horizontal axis [n].
        rows: The rows.
        share: The width of the panel, as a share of the picture's.
    """

    positions: Positions
    rows: Timeline
    share: float


def row_positions(timeline: Timeline, over: Over) -> Positions:
    """Return the position of each row on the horizontal axis [n]."""
    return timeline.seconds if over == "seconds" else np.arange(len(timeline), dtype=np.float64)


def make_panel(timeline: Timeline, over: Over, share: float) -> Panel:
    """Select the rows that a panel with this share of the picture's width can show."""
    positions, rows = widen_peaks(row_positions(timeline, over), timeline.total, round(_COLUMNS * share))
    return Panel(positions, timeline.rows(rows), share)


def draw_stack(axes: Axes, panel: Panel) -> None:
    """Draw the bytes of each category, stacked on each other, and a ring at the peak."""
    at, rows = panel.positions, panel.rows
    above = np.zeros(len(rows), dtype=np.int64)
    for category, colour, size in zip(CATEGORIES, CATEGORY_COLOURS, rows.device.T, strict=True):
        axes.fill_between(at, above, above + size, step="post", facecolor=colour, linewidth=0, label=category)
        above = above + size
    highest = int(above.argmax())
    axes.plot(
        at[highest], above[highest], "o", markersize=5, markerfacecolor="none", color=TEXT, clip_on=False
    )


def draw_phases(axes: Axes, panel: Panel) -> None:
    """Draw a band behind each phase, its name if there is space, and a line where a step begins."""
    at, rows = panel.positions, panel.rows
    width = float(at[-1] - at[0]) or 1.0
    upright = axes.get_xaxis_transform()
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASE_TINTS}
    for phase, _, interval in _phase_intervals(rows):
        start, end = at[interval.start], at[min(interval.stop, len(at) - 1)]
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


def draw_lane(axes: Axes, panel: Panel, memory: Lane) -> None:
    """Draw the bytes in host memory, or those on the disk."""
    held = panel.rows.host if memory == "host" else panel.rows.disk
    axes.fill_between(
        panel.positions, 0, held, step="post", facecolor=COLOURS[memory], linewidth=0, label=memory
    )
    simplify_axes(axes)


def draw_planned(axes: Axes, timeline: Timeline, planned: Timeline, over: Over) -> None:
    """Draw the bytes of a plan as a line; each of its phases is as long as the measured phase."""
    for positions, size in align_plan(timeline, planned, row_positions(timeline, over)):
        axes.step(positions, size, where="post", **OVERLAY)


def align_plan(
    timeline: Timeline, planned: Timeline, at: npt.NDArray[np.float64]
) -> list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
    """Give the rows of a plan positions on the axis of a measured timeline, phase by phase.

    A plan has an order of rows and no times. A step that the plan does not have is compared with its last
    step.

    Args:
        timeline: The measured timeline.
        planned: The timeline of the plan.
        at: The position of each row of ``timeline`` on the axis [n].

    Returns:
        For each phase, the positions and the bytes of the plan's rows.
    """
    plan = {(phase, step, which): rows for phase, step, which, rows in _numbered_intervals(planned)}
    last = max((step for _, step, _ in plan), default=0)
    lines = []
    for phase, step, which, rows in _numbered_intervals(timeline):
        plan_rows = plan.get((phase, min(step, last), which))
        if plan_rows is not None:
            # Row k of n in the plan's phase gets the position at which k/n of the measured rows have passed.
            fractions = np.linspace(0, rows.stop - rows.start - 1, plan_rows.stop - plan_rows.start)
            positions = np.interp(fractions, np.arange(rows.stop - rows.start), at[rows])
            lines.append((positions, planned.total[plan_rows]))
    return lines


def _numbered_intervals(timeline: Timeline) -> Iterator[tuple[str, int, int, slice]]:
    """Yield them with the number of intervals of the phase before, in its step: one for each micro-batch."""
    seen: Counter[tuple[str, int]] = Counter()
    for phase, step, rows in _phase_intervals(timeline):
        yield phase, step, seen[phase, step], rows
        seen[phase, step] += 1


def _phase_intervals(timeline: Timeline) -> list[tuple[str, int, slice]]:
    """Return the phase, the step and the rows of each interval of one phase in one step."""
    changes = np.flatnonzero((np.diff(timeline.phase) != 0) | (np.diff(timeline.step) != 0)) + 1
    edges = [0, *changes.tolist(), len(timeline)]
    return [
        (timeline.phases[timeline.phase[start]], int(timeline.step[start]), slice(start, end))
        for start, end in pairwise(edges)
        if end > start
    ]
