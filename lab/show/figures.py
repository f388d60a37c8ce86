"""The static memory timeline: one panel a rank, or one a name, all on the same axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Protocol, TypeAlias, runtime_checkable

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.errors import LabError
from lab.memory.timeline import CATEGORIES, Moment, Timeline
from lab.show.palette import COLOURS
from lab.show.panels import Over, clock, draw_host, draw_phases, draw_planned, draw_stack, panel
from lab.show.picture import OVERLAY, Picture, drawing, head
from lab.show.scales import byte_axis, quiet
from lab.units import format_bytes


class HasTimeline(Protocol):
    """A plan or a rehearsal: the timeline of one rank."""

    @property
    def timeline(self) -> Timeline:
        """Its rows."""


@runtime_checkable
class HasTimelines(Protocol):
    """A run: the timelines of all its ranks."""

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """One a rank."""


Measured: TypeAlias = Timeline | HasTimeline | HasTimelines | Mapping[str, Timeline]


def timeline(
    measured: Measured, *, planned: Timeline | HasTimeline | None = None, over: Over = "seconds"
) -> Picture:
    """Draw memory over time, stacked by category, one panel a rank, the peak of each named.

    ``measured`` is a run, a rehearsal, a plan or a bare timeline; its ``title``, if any, stands above. Or it
    is timelines by name, before and after: they stand one above the other, and each begins at the left.
    ``planned`` lays a line over it: the plan's bytes, each phase stretched to the time it really took.
    ``over="operators"`` counts operators along the axis in place of seconds, which say nothing in a plan.

    Raises:
        LabError: there is nothing to draw.
    """
    title, named = _panels(measured)
    timelines = tuple(named.values())
    plan = planned if isinstance(planned, Timeline) or planned is None else planned.timeline
    columns = 1 if isinstance(measured, Mapping) else columns_for(len(timelines))
    rows = ceil(len(timelines) / columns)
    lanes = 2 if any(t.host_peak for t in timelines) else 1
    height = 0.75 + rows * ((1.65 if rows > 1 else 2.6) + 0.45 * (lanes - 1))
    with drawing(height) as figure:
        grid = figure.subplots(
            rows * lanes,
            columns,
            sharex=True,
            squeeze=False,
            gridspec_kw={"height_ratios": [1, 0.22][:lanes] * rows},
        )
        for number, (name, one) in enumerate(named.items()):
            row, column = divmod(number, columns)
            axes = grid[row * lanes, column]
            drawn = panel(one, over, 1 / columns)
            draw_phases(axes, drawn)
            draw_stack(axes, drawn)
            if plan is not None:
                draw_planned(axes, one, plan, over)
            _name(axes, name, one.peak, 152 // columns)
            if lanes == 2:
                draw_host(grid[row * lanes + 1, column], drawn)
        _finish(grid.tolist(), timelines, lanes, over, plan)
        marks = _marks(lanes, plan)
        head(figure, title, list(marks.values()), list(marks))
    return Picture(figure, _in_words(title, named, plan))


def columns_for(panels: int) -> int:
    """Panels side by side: 1 to 3 in one row, 4 as two by two, 8 as four by two."""
    return panels if panels <= 3 else ceil(panels / 2)


def _panels(measured: Measured) -> tuple[str, dict[str, Timeline]]:
    """The title, and the timelines by the names of their panels."""
    if isinstance(measured, Mapping):
        # Whenever they were measured, they are compared from their beginnings.
        named = {name: replace(one, seconds=one.seconds - one.seconds[:1]) for name, one in measured.items()}
    elif isinstance(measured, Timeline):
        named = {"": measured}
    elif isinstance(measured, HasTimelines):
        ranks = measured.timelines
        named = {f"rank {rank}" if len(ranks) > 1 else "": one for rank, one in enumerate(ranks)}
    else:
        named = {"": measured.timeline}
    if not named or not all(map(len, named.values())):
        raise LabError("this timeline has no rows: nothing was measured")
    return getattr(measured, "title", ""), named


def _name(axes: Axes, name: str, peak: Moment, characters: int) -> None:
    first = " · ".join(filter(None, (name, f"peak {format_bytes(peak.device)}")))
    axes.set_title(first, loc="left", pad=14)
    axes.annotate(
        _caption(peak, characters),
        (0, 1),
        (0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=7,
    )


def _caption(peak: Moment, characters: int) -> str:
    """Where the peak is, as far as there is room: first the phase goes, then the beginning of the path."""
    full = where(peak).replace("aten.", "")
    short = full.removeprefix(f"{peak.phase}: ")
    fits = [text for text in (full, short) if len(text) <= characters]
    return fits[0] if fits else "…" + short[1 - characters :]


def where(peak: Moment) -> str:
    """Phase, operator and module of an instant, in words."""
    module = f" in {peak.module}" if peak.module else ""
    return f"{peak.phase}: {peak.op}{module}"


def _finish(
    grid: Sequence[Sequence[Axes]],
    timelines: Sequence[Timeline],
    lanes: int,
    over: Over,
    plan: Timeline | None,
) -> None:
    """Give all panels the same axes, and write their numbers at the left and below only."""
    tops = [max([t.device_peak for t in timelines] + ([plan.device_peak] if plan else []))]
    tops.append(max(t.host_peak for t in timelines))
    end = max(float(clock(t, over)[-1]) for t in timelines)
    for number, row in enumerate(grid):
        lane = number % lanes
        # The names of the phases stand in the tenth above the highest peak.
        top = max(tops[lane], 1) * (1.12 if lane == 0 else 1.05)
        for column, axes in enumerate(row):
            axes.set_ylim(0, top)
            byte_axis(axes.yaxis, tops[lane], ticks=4 if lane == 0 else 1)
            quiet(axes)
            axes.set_xlim(0, end)
            rank = number // lanes * len(row) + column
            axes.set_visible(rank < len(timelines))
            if column > 0:
                axes.tick_params(labelleft=False)
                axes.set_ylabel("")
            elif lane == 1:
                axes.set_ylabel(f"host\n{axes.get_ylabel()}")
            if lane == lanes - 1 and rank + len(row) >= len(timelines):
                axes.tick_params(labelbottom=True)
                axes.set_xlabel(over)


def _marks(lanes: int, plan: Timeline | None) -> dict[str, Artist]:
    """What the legend shows, by name."""
    names = [*CATEGORIES, *(["host"] if lanes == 2 else [])]
    marks: dict[str, Artist] = {name: Patch(color=COLOURS[name]) for name in names}
    if plan is not None:
        marks["planned"] = Line2D([], [], **OVERLAY)
    return marks


def _in_words(title: str, named: Mapping[str, Timeline], plan: Timeline | None) -> str:
    peaks = []
    for name, peak in ((name, one.peak) for name, one in named.items()):
        peaks.append(f"{name} peaks at {format_bytes(peak.device)} ({where(peak)})".lstrip())
    planned = [f"planned peak {format_bytes(plan.device_peak)}"] if plan else []
    return f"Memory timeline{f' of {title}' if title else ''}: {'; '.join([*peaks, *planned])}."
