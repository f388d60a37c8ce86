"""The tuner's knobs: sliders and lists that say which way they were turned, and follow what derives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any

import ipywidgets

from lab.models.presets import PRESETS
from lab.recipe.knobs import BY_NAME, KNOBS
from lab.recipe.ladder import NAMES
from lab.show.tuner.choices import choices
from lab.show.tuner.state import TILES, State
from lab.show.tuner.text import LABELS, written
from lab.units import format_bytes

SIZES = ("tokens", "ranks", "device_memory")
SLIDERS = (*SIZES, "head_chunk", *TILES)

OFF = 0
"""Stands in a slider for None, which it takes for no value at all."""

_STYLE = {"description_width": "108px"}

_COSTS = {
    "tokens": "The context: tokens of one sequence",
    "ranks": "GPUs in all",
    "device_memory": "What one GPU has",
    **{knob.name: knob.cost for knob in KNOBS if knob.turned},
}


class Knobs:
    """The left column. ``moved(name, value)`` is called when the reader turns one.

    Whoever calls ``stand_at`` holds the lock ``moving``, so that no turn of another thread is taken for one
    that merely follows.
    """

    def __init__(self, state: State, moved: Callable[[str, Any], None], moving: RLock) -> None:
        self._moved, self._moving, self._following = moved, moving, False
        models = list(PRESETS) if state.model in PRESETS else [*PRESETS, state.model]
        self.by_name: dict[str, Any] = {
            "model": ipywidgets.Dropdown(
                options=[(Path(model).name, model) for model in models], description="model"
            ),
            "rung": ipywidgets.Dropdown(options=NAMES, description="recipe"),
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
        self.saves = {name: ipywidgets.Label(layout={"width": "114px"}) for name in self.by_name}
        rows = []
        for name, knob in self.by_name.items():
            knob.style, knob.layout = _STYLE, {"width": "290px"}
            knob.observe(lambda change, name=name: self._turned(name, change["new"]), "value")
            rows.append(ipywidgets.HBox([knob, self.saves[name]]))
        self.box = ipywidgets.VBox(rows, layout={"flex": "0 0 auto"})

    def stand_at(self, state: State, saves: dict[str, int]) -> None:
        """Follow the state: what derives from a move stands elsewhere now, and saves other bytes."""
        self._following = True
        try:
            self._follow(state, saves)
        finally:
            self._following = False

    def _follow(self, state: State, saves: dict[str, int]) -> None:
        fields = state.fields
        self.by_name["model"].value, self.by_name["rung"].value = state.model, state.rung
        for name in SLIDERS:
            slider = self.by_name[name]
            options = [(_said(name, value), value or OFF) for value in choices(state, name)]
            if list(slider.options) != options:
                slider.options = options
            slider.value = getattr(state, name) if name in SIZES else fields[name] or OFF
        for name in ("checkpoint", "offload"):
            self.by_name[name].value = fields[name]
        for name, label in self.saves.items():
            label.value = f"saves {format_bytes(saves[name])}" if saves.get(name) else ""

    def _turned(self, name: str, value: Any) -> None:
        with self._moving:
            if self._following:
                return
            if name in SLIDERS and value == OFF:
                value = None
            self._moved(name, value)


def _said(name: str, value: Any) -> str:
    return "off" if value is None else written(name, value)
