"""The panel of the tuner: the verdict, the bars of the estimate and of the plan, and the state as code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anywidget
import traitlets

from lab.planning.cuda_workspace import NODE
from lab.planning.plan import Plan
from lab.show.page import join_files
from lab.show.palette import COLOURS
from lab.show.tuner.estimate import Refusal, StateEstimate
from lab.show.tuner.state import State
from lab.show.tuner.text import as_command, as_python, bill_text
from lab.units import format_bytes

AXIS_END = 1.25
"""The end of the axis, as a multiple of the memory, if the bars are not longer."""

LONGEST = 3
"""The longest bar, as a multiple of the memory. A longer bar is cut, so that the memory's line is visible."""


class Panel(anywidget.AnyWidget):
    """The part of the page that draws ``content`` whenever it changes."""

    _esm = join_files("page.js", "tuner/panel.js")
    _css = join_files("page.css", "tuner/panel.css")
    look = traitlets.Dict(COLOURS).tag(sync=True)
    content = traitlets.Dict().tag(sync=True)


def panel_content(
    state: State, estimate: StateEstimate | Refusal, plan: Plan | None, *, current: bool
) -> dict[str, Any]:
    """Return what the panel shows: sizes in bytes, and all texts.

    Args:
        state: The state.
        estimate: Its estimate, or its error.
        plan: The last plan, which is shown below the estimate.
        current: Whether the plan is one of this state; if not, the panel says so.
    """
    content = {
        "verdict": estimate.verdict,
        "words": estimate.text,
        "bars": [],
        "texts": ["", ""],
        "note": "",
        "bill": bill_text(state, plan if current else None),
        "suggestions": [],
    }
    if isinstance(estimate, Refusal):
        return {**content, "suggestions": [suggestion.text for suggestion in estimate.suggestions]}
    scale = state.device_memory * AXIS_END
    planned = plan.device_peak if plan is not None else 0
    scale = max(scale, min(max(estimate.device, planned) * 1.02, state.device_memory * LONGEST))
    bars = [_bar("closed form, a rank", estimate.by_category, scale, format_bytes(state.device_memory))]
    if plan is not None:
        name = f"plan: {plan.peak.op.removeprefix('aten.')}{_module_text(plan)}"
        stale = "" if current else "plan of an earlier setting; Plan again for this one"
        bars.append(_bar(stale or name, plan.peak.by_category, scale, "", stale=not current))
    return {
        **content,
        "bars": bars,
        "limit": state.device_memory,
        "scale": scale,
        "host": _host_bar(state, estimate.host),
        "legend": [
            [name, format_bytes(size), _parts_text(estimate, name)]
            for name, size in estimate.by_category.items()
        ],
        "note": f"The predicted peak is in {estimate.moment}."
        f"{_workspace_note(state)}{_plan_note(state, plan, current)}",
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


def _host_bar(state: State, size: int) -> dict[str, Any] | None:
    if not size:
        return None
    name = f"host memory, a node of {min(state.ranks, NODE)} ranks"
    limit = state.host_available
    scale = max(limit * AXIS_END, min(size * 1.02, limit * LONGEST))
    return {**_bar(name, {"host": size}, scale, format_bytes(limit)), "limit": limit, "scale": scale}


def _parts_text(estimate: StateEstimate, category: str) -> str:
    parts = sorted((p for p in estimate.parts if p.category == category), key=lambda part: -part.size)
    return " · ".join(f"{part.name} {format_bytes(part.size)}" for part in parts if part.name != category)


def _module_text(plan: Plan) -> str:
    return f" in {plan.peak.module}" if plan.peak.module else ""


def _workspace_note(state: State) -> str:
    return (
        " Only the plan adds the memory that CUDA kernels take inside themselves." if state.workspace else ""
    )


def _plan_note(state: State, plan: Plan | None, current: bool) -> str:
    if plan is None or not current:
        return ""
    fits = plan.device_peak <= state.device_memory and plan.host_peak_per_node <= state.host_available
    return f" Planned: {format_bytes(plan.device_peak)}, {'fits' if fits else 'does not fit'}."
