"""The controls of the tuner: a slider or a list for each knob."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any

import ipywidgets

from lab.models.presets import PRESETS
from lab.recipe.knobs import BY_NAME, KNOBS
from lab.recipe.ladder import RECIPE_NAMES
from lab.show.tuner.choices import choices
from lab.show.tuner.state import ORDER, TILES, State
from lab.show.tuner.text import LABELS, value_text
from lab.units import format_bytes

SIZES = ("tokens", "ranks", "device_memory")
SLIDERS = (*SIZES, "head_chunk", *TILES)

OFF = 0
"""The option of a slider for the value None: a slider takes None for no selection."""

_STYLE = {"description_width": "108px"}

_COSTS = {
    "tokens": "The context: the tokens of one sequence",
    "ranks": "The number of GPUs",
    "device_memory": "The memory of one GPU",
    "tokens_total": "The tokens of the whole training, decimal: 10B = 10^10",
    "price": "The money for one GPU hour, in any currency",
    **{knob.name: knob.cost for knob in KNOBS if knob.turned},
}


class Knobs:
    """The controls, in the left column.

    Args:
        state: The state that is shown first.
        on_change: Called with the name and the value when the reader changes a control.
        lock: A lock that the caller of ``show`` holds, so that a change by the reader in another thread is
            not mistaken for one by ``show``.
    """

    def __init__(self, state: State, on_change: Callable[[str, Any], None], lock: RLock) -> None:
        self._on_change, self._lock, self._is_showing = on_change, lock, False
        models = list(PRESETS) if state.model in PRESETS else [*PRESETS, state.model]
        self.by_name: dict[str, Any] = {
            "model": ipywidgets.Dropdown(
                options=[(Path(model).name, model) for model in models], description="model"
            ),
            "rung": ipywidgets.Dropdown(options=RECIPE_NAMES, description="recipe"),
        }
        for name in SLIDERS:
            slider = ipywidgets.SelectionSlider(options=[0], description=LABELS[name], tooltip=_COSTS[name])
            self.by_name[name] = slider
        self.by_name["checkpoint"] = ipywidgets.Checkbox(
            description=LABELS["checkpoint"], tooltip=_COSTS["checkpoint"], indent=True
        )
        self.by_name["offload"] = ipywidgets.Dropdown(
            options=BY_NAME["offload"].choices, description=LABELS["offload"], tooltip=_COSTS["offload"]
        )
        for name in ORDER:
            self.by_name[name] = ipywidgets.Text(
                description=LABELS[name], tooltip=_COSTS[name], continuous_update=False
            )
        self.saves = {name: ipywidgets.Label(layout={"width": "114px"}) for name in self.by_name}
        rows = []
        for name, knob in self.by_name.items():
            knob.style, knob.layout = _STYLE, {"width": "290px"}
            knob.observe(lambda change, name=name: self._changed(name, change["new"]), "value")
            rows.append(ipywidgets.HBox([knob, self.saves[name]]))
        self.box = ipywidgets.VBox(rows, layout={"flex": "0 0 auto"})

    def show(self, state: State, saves: dict[str, int]) -> None:
        """Show a state, and the bytes that each knob saves."""
        self._is_showing = True
        try:
            self._set_controls(state, saves)
        finally:
            self._is_showing = False

    def _set_controls(self, state: State, saves: dict[str, int]) -> None:
        fields = state.fields
        self.by_name["model"].value, self.by_name["rung"].value = state.model, state.rung
        for name in SLIDERS:
            slider = self.by_name[name]
            options = [(_option_text(name, value), value or OFF) for value in choices(state, name)]
            if list(slider.options) != options:
                slider.options = options
            slider.value = getattr(state, name) if name in SIZES else fields[name] or OFF
        for name in ("checkpoint", "offload"):
            self.by_name[name].value = fields[name]
        for name in ORDER:
            given = getattr(state, name)
            self.by_name[name].value = "" if given is None else str(given)
        for name, label in self.saves.items():
            label.value = f"saves {format_bytes(saves[name])}" if saves.get(name) else ""

    def _changed(self, name: str, value: Any) -> None:
        with self._lock:
            if self._is_showing:
                return
            if name in SLIDERS and value == OFF:
                value = None
            if name in ORDER:
                value = value.strip() or None
            self._on_change(name, value)


def _option_text(name: str, value: Any) -> str:
    return "off" if value is None else value_text(name, value)
