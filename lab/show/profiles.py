"""A profiled step: its bytes above, its operators below, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lab.errors import LabError
from lab.memory.profiling import Profile, Total, name_of
from lab.memory.timeline import CATEGORIES
from lab.show.figures import where
from lab.show.palette import COLOURS, TEXT
from lab.show.panels import draw_phases, draw_stack, panel
from lab.show.picture import Picture, drawing, head
from lab.show.scales import byte_axis, quiet
from lab.units import format_bytes, format_seconds

Bars = list[tuple[float, float]]
"""Where a lane is filled: beginnings and lengths, in seconds."""


def profile(
    profile: Profile,
    *,
    by: Literal["op", "module", "phase"] = "op",
    lanes: int = 8,
    title: str = "",
) -> Picture:
    """Draw one rank's profiled step: memory over time, and below it when what ran, a lane a name.

    Lanes are the ``lanes`` operators (or kinds of module, or phases) that took the most seconds, the longest
    first, then all others, then the time in which no operator ran: Python, and the meter itself. Collectives
    run beside the operators, so the lanes may add up to more than the step.

    Raises:
        LabError: no lanes to draw, or nothing that ran.
    """
    spent = profile.totals(by)
    if lanes < 1 or not spent:
        raise LabError(f"lanes={lanes} of {len(spent)}: at least one lane, and a step in which operators ran")
    shown = spent[:lanes]
    drawn = panel(profile.last, "seconds", 1.0)
    bars = {s.name: _bars(profile, by, {s.name}) for s in shown}
    rest = {s.name for s in islice(spent, lanes, None)}
    if rest:
        bars[f"{len(rest)} others"] = _bars(profile, by, rest)
    bars["no operator"] = _gaps(profile)
    with drawing(2.5 + 0.19 * len(bars)) as figure:
        above, below = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [1.75, 0.19 * len(bars) + 0.05]}
        )
        draw_phases(above, drawn)
        draw_stack(above, drawn)
        peak = profile.last.peak
        above.set_ylim(0, peak.device * 1.12)
        byte_axis(above.yaxis, peak.device)
        quiet(above)
        above.set_title(f"peak {format_bytes(peak.device)}, {where(peak)}", loc="left", fontsize=8)
        _draw_lanes(below, bars, spent, profile.seconds)
        below.set_xlim(drawn.at[0], drawn.at[-1])
        # Seconds of the step, and not since the first one began.
        first = float(drawn.at[0])
        below.xaxis.set_major_formatter(lambda value, _: f"{value - first:.3g}")
        below.set_xticks([first + tick for tick in _ticks(profile.seconds)])
        below.set_xlabel("seconds")
        head(figure, title, [Patch(color=COLOURS[name]) for name in CATEGORIES], CATEGORIES)
    most = ", ".join(f"{s.name} {format_seconds(s.seconds)} in {s.calls} calls" for s in shown[:3])
    said = f"{title or 'A profiled step'}: {format_seconds(profile.seconds)}, most by {by} in {most}"
    return Picture(figure, f"{said}; peak {format_bytes(peak.device)} in {where(peak)}.")


def _draw_lanes(axes: Axes, bars: dict[str, Bars], spent: Sequence[Total], whole: float) -> None:
    calls = {s.name: s.calls for s in spent}
    for lane, (name, filled) in enumerate(bars.items()):
        # A thin edge, or what is over in microseconds would not be seen.
        axes.broken_barh(filled, (lane - 0.36, 0.72), facecolor=TEXT, edgecolor=TEXT, linewidth=0.25)
        seconds = sum(length for _, length in filled)
        many = f", {calls[name]} calls" if name in calls else ""
        axes.annotate(
            f"{format_seconds(seconds)}, {seconds / whole:.0%}{many}",
            (1, lane),
            (5, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.set_yticks(range(len(bars)), [_short(name.replace("aten.", "")) for name in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    quiet(axes, along="x")
    axes.grid(False)


def _short(name: str) -> str:
    """Both ends of a long name: operators differ in their last words."""
    return name if len(name) <= 32 else f"{name[:14]}…{name[-17:]}"


def _bars(profile: Profile, by: Literal["op", "module", "phase"], names: set[str]) -> Bars:
    return [(call.start, call.seconds) for call in profile.calls if name_of(call, by) in names]


def _gaps(profile: Profile) -> Bars:
    """The stretches of the step in which nothing ran."""
    at, end = float(profile.last.seconds[0]), float(profile.last.seconds[-1])
    gaps = []
    for call in profile.calls:
        if call.start > at:
            gaps.append((at, min(call.start, end) - at))
        at = max(at, call.start + call.seconds)
    return [*gaps, (at, max(end - at, 0.0))]


def _ticks(seconds: float) -> list[float]:
    """Five or so round numbers from 0."""
    step = next(s for s in (m * 10.0**e for e in range(-6, 6) for m in (1, 2, 5)) if seconds / s <= 6)
    return [step * k for k in range(int(seconds / step) + 1)]
