"""The controls of the tuner: a slider or a list for each knob."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import RLock
from typing import Any

import ipywidgets

from lab.models.presets import PRESETS
from lab.recipe.ladder import RECIPE_NAMES
from lab.recipe.recipe import BY_NAME
from lab.show.tuner.choices import choices
from lab.show.tuner.state import ADJUSTABLE, ORDER, State
from lab.show.tuner.text import HINTS, LABELS, value_text
from lab.units import format_bytes

SLIDERS = ("tokens", "ranks", "device_memory", *(name for name in ADJUSTABLE if BY_NAME[name].count))
LISTS = tuple(name for name in ADJUSTABLE if name not in SLIDERS)

OFF = 0
"""The option of a slider for the value None: a slider takes None for no selection."""

_STYLE = {"description_width": "108px"}


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
            **{name: _control(name) for name in (*SLIDERS, *LISTS, *ORDER)},
        }
        self.saves = {name: ipywidgets.Label(layout={"width": "114px"}) for name in self.by_name}
        rows = []
        for name, knob in self.by_name.items():
            knob.style, knob.layout = _STYLE, {"width": "290px"}
            knob.observe(lambda change, name=name: self._changed(name, change["new"]), "value")
            rows.append(ipywidgets.HBox([knob, self.saves[name]]))
        self.box = ipywidgets.VBox(rows, layout={"flex": "0 0 auto"})

    def show(self, state: State, saves: Mapping[str, int]) -> None:
        """Show a state, and the bytes that each knob saves."""
        self._is_showing = True
        try:
            for name, control in self.by_name.items():
                value = state.value(name)
                if name in SLIDERS:
                    options = [(_option_text(name, option), option or OFF) for option in choices(state, name)]
                    if list(control.options) != options:
                        control.options = options
                    value = value or OFF
                elif name in ORDER:
                    value = "" if value is None else str(value)
                control.value = value
                self.saves[name].value = f"saves {format_bytes(saves[name])}" if saves.get(name) else ""
        finally:
            self._is_showing = False

    def _changed(self, name: str, value: Any) -> None:
        with self._lock:
            if self._is_showing:
                return
            if name in SLIDERS and value == OFF:
                value = None
            if name in ORDER:
                value = value.strip() or None
            self._on_change(name, value)


def _control(name: str) -> Any:
    """Return the control of a value: a slider, a text, or what fits the choices of a knob."""
    about = {"description": LABELS[name], "tooltip": HINTS[name]}
    if name in SLIDERS:
        return ipywidgets.SelectionSlider(options=[0], **about)
    if name in ORDER:
        return ipywidgets.Text(continuous_update=False, **about)
    if BY_NAME[name].choices == (True, False):
        return ipywidgets.Checkbox(indent=True, **about)
    return ipywidgets.Dropdown(options=BY_NAME[name].choices, **about)


def _option_text(name: str, value: Any) -> str:
    return "off" if value is None else value_text(name, value)
