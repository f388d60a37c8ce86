"""The panel of the tuner: the verdict, the bars of the device and of the host, and the state as code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anywidget
import traitlets

from lab.planning.plan import Plan
from lab.show.page import join_files
from lab.show.palette import COLOURS
from lab.show.tuner.prediction import Prediction, parts_of
from lab.show.tuner.state import State
from lab.show.tuner.text import as_command, as_python, seconds_text
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


def panel_content(state: State, answer: Prediction) -> dict[str, Any]:
    """Return what the panel shows: sizes in bytes, and all texts. Without a plan it has no bars.

    Args:
        state: The state.
        answer: What is known of it.
    """
    content = {
        "verdict": answer.verdict,
        "words": answer.text,
        "bar": None,
        "texts": ["", ""] if answer.verdict == "illegal" else [as_python(state), as_command(state)],
        "note": "",
        "seconds": "",
        "suggestions": [suggestion.text for suggestion in answer.suggestions],
    }
    plan = answer.plan
    if plan is None:
        return content
    parts = parts_of(plan)
    return {
        **content,
        "bar": _bar("a rank", answer.by_category, state.device_memory),
        "host": _host_bar(plan),
        "legend": [
            [name, format_bytes(size), _parts_text(parts[name], name)]
            for name, size in answer.by_category.items()
        ],
        "note": f"The peak: {plan.peak}",
        "seconds": seconds_text(state, plan),
    }


def _bar(name: str, sizes: Mapping[str, int], limit: int) -> dict[str, Any]:
    total = sum(sizes.values())
    scale = max(limit * AXIS_END, min(total * 1.02, limit * LONGEST))
    return {
        "name": name,
        "total": format_bytes(total) + " »" * (total > scale),
        "sizes": dict(sizes),
        "texts": {category: format_bytes(size) for category, size in sizes.items()},
        "line": format_bytes(limit),
        "limit": limit,
        "scale": scale,
    }


def _host_bar(plan: Plan) -> dict[str, Any] | None:
    if not plan.host_peak:
        return None
    name = f"host memory, a node of {plan.machine.node_ranks(plan.ranks)} ranks"
    return _bar(name, {"host": plan.host_peak_per_node}, plan.available("host") or 0)


def _parts_text(parts: Mapping[str, int], category: str) -> str:
    return " · ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if name != category)
