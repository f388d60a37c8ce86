"""The tuner's panel: the verdict, the predicted stack, the plan beside it, and the state as code to copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anywidget
import traitlets

from lab.planning.hardware import NODE
from lab.planning.plan import Plan
from lab.show.page import joined
from lab.show.palette import COLOURS
from lab.show.tuner.estimate import Predicted, Refused
from lab.show.tuner.state import State
from lab.show.tuner.text import as_command, as_python
from lab.units import format_bytes

ROOM = 1.25
"""Where the axis ends, in device memories, as long as the bars do not need more."""

LONGEST = 3
"""Bars beyond so many device memories are cut: a wall a hundred times too high would hide the line."""


class Panel(anywidget.AnyWidget):
    """The part of the page; it draws ``shown`` whenever that changes."""

    _esm = joined("page.js", "tuner/panel.js")
    _css = joined("page.css", "tuner/panel.css")
    look = traitlets.Dict(COLOURS).tag(sync=True)
    shown = traitlets.Dict().tag(sync=True)


def drawn(state: State, said: Predicted | Refused, plan: Plan | None, *, current: bool) -> dict[str, Any]:
    """What the panel shows: numbers of bytes, and every text in words.

    ``plan`` stands beside the closed form; if it is not ``current``, of this very step, it is said to be old.
    """
    shown = {
        "verdict": said.verdict,
        "words": said.words,
        "bars": [],
        "texts": ["", ""],
        "note": "",
        "mends": [],
    }
    if isinstance(said, Refused):
        return {**shown, "mends": [mend.words for mend in said.mends]}
    scale = state.device_memory * ROOM
    planned = plan.device_peak if plan is not None else 0
    scale = max(scale, min(max(said.device, planned) * 1.02, state.device_memory * LONGEST))
    bars = [_bar("closed form, a rank", said.by_category, scale, format_bytes(state.device_memory))]
    if plan is not None:
        name = f"plan: {plan.peak.op.removeprefix('aten.')}{_inside(plan)}"
        stale = "" if current else "plan of an earlier setting; Plan again for this one"
        bars.append(_bar(stale or name, plan.peak.by_category, scale, "", stale=not current))
    return {
        **shown,
        "bars": bars,
        "limit": state.device_memory,
        "scale": scale,
        "host": _host(state, said.host),
        "legend": [[name, format_bytes(size), _parts(said, name)] for name, size in said.by_category.items()],
        "note": f"The predicted peak is in {said.moment}.{_left_out(state)}{_planned(state, plan, current)}",
        "texts": [as_python(state), as_command(state)],
    }


def _bar(
    name: str, sizes: Mapping[str, int], scale: float, line: str, *, stale: bool = False
) -> dict[str, Any]:
    total = sum(sizes.values())
    cut = " »" if total > scale else ""
    texts = {category: format_bytes(size) for category, size in sizes.items()}
    return {
        "name": name,
        "total": format_bytes(total) + cut,
        "sizes": dict(sizes),
        "texts": texts,
        "line": line,
        "stale": stale,
    }


def _host(state: State, size: int) -> dict[str, Any] | None:
    if not size:
        return None
    name = f"host memory, a node of {min(state.ranks, NODE)} ranks"
    scale = max(state.host_memory * ROOM, min(size * 1.02, state.host_memory * LONGEST))
    bar = _bar(name, {"host": size}, scale, format_bytes(state.host_memory))
    return {**bar, "limit": state.host_memory, "scale": scale}


def _parts(said: Predicted, category: str) -> str:
    parts = sorted((p for p in said.parts if p.category == category), key=lambda part: -part.size)
    return " · ".join(f"{part.name} {format_bytes(part.size)}" for part in parts if part.name != category)


def _inside(plan: Plan) -> str:
    return f" in {plan.peak.module}" if plan.peak.module else ""


def _left_out(state: State) -> str:
    return " What CUDA kernels take inside themselves only the plan adds." if state.workspace else ""


def _planned(state: State, plan: Plan | None, current: bool) -> str:
    if plan is None or not current:
        return ""
    fits = plan.device_peak <= state.device_memory and plan.host_peak_per_node <= state.host_memory
    return (
        f" Planned: {format_bytes(plan.device_peak)}, {'fits' if fits else 'does not fit'}; grey in its bar "
        "is what nothing keeps for long."
    )
