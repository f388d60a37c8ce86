"""The static memory timeline: a panel for each rank or name, all with the same axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol, TypeAlias, get_args, runtime_checkable

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.errors import LabError, ResultError
from lab.memory.categories import CATEGORIES, OTHER
from lab.memory.moment import Moment
from lab.memory.timeline import Timeline
from lab.show.live.recorded import Recorded
from lab.show.live.widget import display_recorded, is_in_browser
from lab.show.palette import COLOURS
from lab.show.panels import (
    Lane,
    Over,
    draw_lane,
    draw_phases,
    draw_planned,
    draw_stack,
    make_panel,
    row_positions,
)
from lab.show.picture import OVERLAY, Picture, annotate, draw_header, styled_figure
from lab.show.scales import byte_axis, simplify_axes
from lab.units import format_bytes

_PIXELS = 105
"""The height of a canvas for a picture, in pixels an inch of the picture."""


class HasTimeline(Protocol):
    """A result with the timeline of one rank: a plan or a rehearsal."""

    @property
    def timeline(self) -> Timeline: ...


@runtime_checkable
class HasTimelines(Protocol):
    """A result with a timeline for each rank: a run."""

    @property
    def timelines(self) -> tuple[Timeline, ...]: ...


@dataclass(frozen=True, eq=False, repr=False)
class TimelinePicture(Picture):
    """The picture of timelines. In a browser it answers clicks: who holds the bytes at an instant.

    Attributes:
        figure: The matplotlib figure, to change or to save.
        text: A description of what is drawn.
        recorded: The timelines.
    """

    recorded: Recorded

    def _ipython_display_(self) -> None:
        if not is_in_browser():
            # IPython displays the picture then.
            raise NotImplementedError
        height = round(self.figure.get_figheight() * _PIXELS)
        display_recorded(self.recorded, Picture(self.figure, self.text), height)


TimelineSource: TypeAlias = Timeline | HasTimeline | HasTimelines | Mapping[str, Timeline]


def timeline(
    measured: TimelineSource,
    *,
    planned: Timeline | HasTimeline | None = None,
    over: Over = "seconds",
    highest: int = 0,
) -> TimelinePicture:
    """Draw the memory of each rank over time, stacked by category, with its peak marked and described.

    In a browser a click on an instant shows the tensors that are held then.

    Args:
        measured: A run, a rehearsal, a plan or a timeline; its ``title`` becomes the title of the picture. Or
            timelines by name, which are drawn one above the other, each from its own beginning.
        planned: A plan, whose bytes are drawn as a line. Each phase of the line is as long as the measured
            phase.
        over: The horizontal axis: seconds, or operators one by one. The seconds of a plan mean nothing.
        highest: The axis of bytes reaches at least so high, as in another picture that this is compared with.

    Raises:
        LabError: There is nothing to draw, or only the plan or only the measured bytes have a workspace.
    """
    title, by_name = _panels(measured)
    timelines = tuple(by_name.values())
    plan = planned if isinstance(planned, Timeline) or planned is None else planned.timeline
    if plan is not None:
        _check_workspace(timelines, plan)
    columns = 1 if isinstance(measured, Mapping) else columns_for(len(timelines))
    rows = ceil(len(timelines) / columns)
    lanes = _lanes(timelines)
    height = 0.75 + rows * ((1.65 if rows > 1 else 2.6) + 0.45 * len(lanes))
    with styled_figure(height) as figure:
        grid = figure.subplots(
            rows * (1 + len(lanes)),
            columns,
            sharex=True,
            squeeze=False,
            gridspec_kw={"height_ratios": [1, *[0.22] * len(lanes)] * rows},
        )
        for number, (name, one) in enumerate(by_name.items()):
            row, column = divmod(number, columns)
            axes, *below = grid[row * (1 + len(lanes)) : (row + 1) * (1 + len(lanes)), column]
            panel = make_panel(one, over, 1 / columns)
            draw_phases(axes, panel)
            draw_stack(axes, panel)
            if plan is not None:
                draw_planned(axes, one, plan, over)
            _write_title(axes, name, one.peak, 152 // columns)
            for lane_axes, lane in zip(below, lanes, strict=True):
                draw_lane(lane_axes, panel, lane)
        _align_axes(grid.tolist(), timelines, lanes, over, max(highest, plan.device_peak if plan else 0))
        draw_header(figure, title, _legend(lanes, plan))
    recorded = Recorded(
        title=title,
        timelines=by_name,
        job=getattr(measured, "job", None),
        over=over,
        planned=plan,
        highest=highest,
        ranks=not isinstance(measured, Mapping),
    )
    return TimelinePicture(figure, _text(title, by_name, plan), recorded)


def columns_for(panels: int) -> int:
    """Return how many panels are side by side: up to 3 in one row, more in two rows."""
    return panels if panels <= 3 else ceil(panels / 2)


def _check_workspace(measured: Sequence[Timeline], plan: Timeline) -> None:
    """Refuse a plan that counts bytes which the measured timelines leave out, or the other way round."""
    planned, counted = plan.device[:, OTHER].any(), any(one.device[:, OTHER].any() for one in measured)
    more, less = "the plan counts", "the measured bytes do"
    if counted and not planned:
        more, less = "the measured bytes have", "the plan does"
    if planned != counted:
        raise ResultError(f"{more} the workspace of CUDA, and {less} not: plan with workspace={not planned}")


def _panels(measured: TimelineSource) -> tuple[str, dict[str, Timeline]]:
    """Return the title, and the timelines by the names of their panels."""
    if isinstance(measured, Mapping):
        # The timelines were measured at different times, and are compared from their beginnings.
        by_name = {
            name: replace(one, seconds=one.seconds - one.seconds[:1]) for name, one in measured.items()
        }
    elif isinstance(measured, Timeline):
        by_name = {"": measured}
    elif isinstance(measured, HasTimelines):
        ranks = measured.timelines
        by_name = {f"rank {rank}" if len(ranks) > 1 else "": one for rank, one in enumerate(ranks)}
    else:
        by_name = {"": measured.timeline}
    if not by_name or not all(map(len, by_name.values())):
        raise LabError("this timeline has no rows: nothing was measured")
    return getattr(measured, "title", ""), by_name


def _write_title(axes: Axes, name: str, peak: Moment, characters: int) -> None:
    first = " · ".join(filter(None, (name, f"peak {format_bytes(peak.device)}")))
    axes.set_title(first, loc="left", pad=14)
    below = {"xycoords": "axes fraction", "va": "baseline", "fontsize": 7}
    annotate(axes, _caption(peak, characters), (0, 1), (0, 4), **below)


def _caption(peak: Moment, characters: int) -> str:
    """Describe the peak in at most ``characters``: without its phase if too long, then cut at the left."""
    full = peak_text(peak).replace("aten.", "")
    short = full.removeprefix(f"{peak.phase}: ")
    candidates = [text for text in (full, short) if len(text) <= characters]
    return candidates[0] if candidates else "…" + short[1 - characters :]


def peak_text(peak: Moment) -> str:
    """Return the phase, the operator and the module of a moment as text."""
    module = f" in {peak.module}" if peak.module else ""
    return f"{peak.phase}: {peak.op}{module}"


def _align_axes(
    grid: Sequence[Sequence[Axes]],
    timelines: Sequence[Timeline],
    lanes: Sequence[Lane],
    over: Over,
    least: int,
) -> None:
    """Give all panels the same axes, and write numbers at the left and at the bottom only."""
    tops = [max(least, *(t.device_peak for t in timelines))]
    tops.extend(_highest(timelines, lane) for lane in lanes)
    end = max(float(row_positions(t, over)[-1]) for t in timelines)
    for number, row in enumerate(grid):
        lane = number % len(tops)
        # The names of the phases are in the space above the highest peak.
        top = max(tops[lane], 1) * (1.12 if lane == 0 else 1.05)
        for column, axes in enumerate(row):
            axes.set_ylim(0, top)
            byte_axis(axes.yaxis, tops[lane], ticks=4 if lane == 0 else 1)
            simplify_axes(axes)
            axes.set_xlim(0, end)
            rank = number // len(tops) * len(row) + column
            axes.set_visible(rank < len(timelines))
            if column > 0:
                axes.tick_params(labelleft=False)
                axes.set_ylabel("")
            elif lane > 0:
                axes.set_ylabel(f"{lanes[lane - 1]}\n{axes.get_ylabel()}")
            if lane == len(lanes) and rank + len(row) >= len(timelines):
                axes.tick_params(labelbottom=True)
                axes.set_xlabel(over)


def _lanes(timelines: Sequence[Timeline]) -> list[Lane]:
    """Return the memories other than the device's that hold something."""
    return [lane for lane in get_args(Lane) if _highest(timelines, lane)]


def _highest(timelines: Sequence[Timeline], lane: Lane) -> int:
    return max(one.host_peak if lane == "host" else one.disk_peak for one in timelines)


def _legend(lanes: Sequence[Lane], plan: Timeline | None) -> dict[str, Artist]:
    """Return the marks of the legend by name."""
    marks: dict[str, Artist] = {name: Patch(color=COLOURS[name]) for name in (*CATEGORIES, *lanes)}
    if plan is not None:
        marks["planned"] = Line2D([], [], **OVERLAY)
    return marks


def _text(title: str, by_name: Mapping[str, Timeline], plan: Timeline | None) -> str:
    said = [
        f"{name} peaks at {format_bytes(peak.device)} ({peak_text(peak)})".lstrip()
        for name, peak in ((name, one.peak) for name, one in by_name.items())
    ]
    said += [f"planned peak {format_bytes(plan.device_peak)}"] if plan else []
    return f"Memory timeline{f' of {title}' if title else ''}: {'; '.join(said)}."
