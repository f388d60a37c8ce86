"""A profiled step: its bytes over time, and below them the operators that ran."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lab.errors import LabError
from lab.memory.categories import CATEGORIES
from lab.memory.profiling import Profile, Total, name_of
from lab.show.figures import peak_text
from lab.show.palette import COLOURS, TEXT
from lab.show.panels import draw_phases, draw_stack, make_panel
from lab.show.picture import Picture, annotate, draw_header, styled_figure
from lab.show.scales import byte_axis, simplify_axes
from lab.units import format_bytes, format_seconds

Bars = list[tuple[float, float]]
"""The bars of a lane: starts and lengths, in seconds."""


def profile(
    profile: Profile,
    *,
    by: Literal["op", "module", "phase"] = "op",
    lanes: int = 8,
    title: str = "",
) -> Picture:
    """Draw the profiled step of a rank: memory over time, and below it a lane for each operator.

    After the lanes of the operators that took the most seconds follow a lane of all other operators, and one
    of the time without any operator: Python, and the meter itself. Collectives run at the same time as
    operators, so the lanes can add up to more than the step.

    Args:
        profile: The profile.
        by: What has a lane: operators, kinds of module, or phases.
        lanes: How many operators, modules or phases have their own lane.
        title: A title above the picture.

    Raises:
        LabError: ``lanes`` is less than 1, or no operator ran.
    """
    spent = profile.totals(by)
    if lanes < 1 or not spent:
        raise LabError(f"lanes={lanes} of {len(spent)}: at least one lane, and a step in which operators ran")
    longest = spent[:lanes]
    panel = make_panel(profile.last, "seconds", 1.0)
    bars = {s.name: _bars(profile, by, {s.name}) for s in longest}
    rest = {s.name for s in islice(spent, lanes, None)}
    if rest:
        bars[f"{len(rest)} others"] = _bars(profile, by, rest)
    bars["no operator"] = _gaps(profile)
    with styled_figure(2.5 + 0.19 * len(bars)) as figure:
        above, below = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [1.75, 0.19 * len(bars) + 0.05]}
        )
        draw_phases(above, panel)
        draw_stack(above, panel)
        peak = profile.last.peak
        above.set_ylim(0, peak.device * 1.12)
        byte_axis(above.yaxis, peak.device)
        simplify_axes(above)
        above.set_title(f"peak {format_bytes(peak.device)}, {peak_text(peak)}", loc="left", fontsize=8)
        _draw_lanes(below, bars, spent, profile.seconds)
        below.set_xlim(panel.positions[0], panel.positions[-1])
        # The seconds of the timeline count from the first step; the axis counts from this one.
        first = float(panel.positions[0])
        below.xaxis.set_major_formatter(lambda value, _: f"{value - first:.3g}")
        below.set_xticks([first + tick for tick in _ticks(profile.seconds)])
        below.set_xlabel("seconds")
        draw_header(figure, title, {name: Patch(color=COLOURS[name]) for name in CATEGORIES})
    most = ", ".join(f"{s.name} {format_seconds(s.seconds)} in {s.calls} calls" for s in longest[:3])
    text = f"{title or 'A profiled step'}: {format_seconds(profile.seconds)}, most by {by} in {most}"
    return Picture(figure, f"{text}; peak {format_bytes(peak.device)} in {peak_text(peak)}.")


def _draw_lanes(axes: Axes, bars: dict[str, Bars], spent: Sequence[Total], whole: float) -> None:
    calls = {s.name: s.calls for s in spent}
    for lane, (name, filled) in enumerate(bars.items()):
        # The edge makes a bar of microseconds visible.
        axes.broken_barh(filled, (lane - 0.36, 0.72), facecolor=TEXT, edgecolor=TEXT, linewidth=0.25)
        seconds = sum(length for _, length in filled)
        count = f", {calls[name]} calls" if name in calls else ""
        text = f"{format_seconds(seconds)}, {seconds / whole:.0%}{count}"
        annotate(axes, text, (1, lane), (5, 0), xycoords=axes.get_yaxis_transform(), fontsize=7)
    axes.set_yticks(range(len(bars)), [_short(name.replace("aten.", "")) for name in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    simplify_axes(axes, along="x")
    axes.grid(False)


def _short(name: str) -> str:
    """Shorten a long name in its middle, because the last words of operators differ."""
    return name if len(name) <= 32 else f"{name[:14]}…{name[-17:]}"


def _bars(profile: Profile, by: Literal["op", "module", "phase"], names: set[str]) -> Bars:
    return [(call.start, call.seconds) for call in profile.calls if name_of(call, by) in names]


def _gaps(profile: Profile) -> Bars:
    """Return the intervals of the step in which no operator ran."""
    at, end = float(profile.last.seconds[0]), float(profile.last.seconds[-1])
    gaps = []
    for call in profile.calls:
        if call.start > at:
            gaps.append((at, min(call.start, end) - at))
        at = max(at, call.start + call.seconds)
    return [*gaps, (at, max(end - at, 0.0))]


def _ticks(seconds: float) -> list[float]:
    """Return up to seven round numbers from 0 to ``seconds``."""
    step = next(s for s in (m * 10.0**e for e in range(-6, 6) for m in (1, 2, 5)) if seconds / s <= 6)
    return [step * k for k in range(int(seconds / step) + 1)]
