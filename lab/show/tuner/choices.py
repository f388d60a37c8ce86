"""The values of the tuner's knobs, and the single changes that make an illegal combination legal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lab.errors import LabError
from lab.planning.hardware import HARDWARE
from lab.recipe.recipe import BY_NAME
from lab.show.tuner.state import ADJUSTABLE, TILES, State
from lab.show.tuner.text import LABELS, value_text
from lab.units import GiB, KiB, Mi, format_bytes


def choices(state: State, name: str) -> list[Any]:
    """Return the values of a knob's control; those of a slider in the order in which memory grows.

    The current value is one of them.
    """
    if name in BY_NAME and not BY_NAME[name].count:
        return list(BY_NAME[name].choices)
    current = state.value(name)
    # Powers of two, and the number halfway between two of them.
    steps = sorted(n for power in range(30) for n in (2**power, 3 * 2**power // 2) if n > 0)
    if name == "head_chunk":
        heads = state.shape.H
        values = [n for n in range(1, heads + 1) if n in steps or heads % n == 0]
    elif name in TILES:
        values = [2**power for power in range(6, 21)]
    elif name == "tokens":
        values = [*(2**power for power in range(8, 21)), *(n * Mi for n in (2, 3, 4, 5, 6, 8, 12, 16))]
    elif name != "device_memory":
        values = [n for n in steps if n <= 64]
    elif current < 16 * GiB:
        values = [max(current >> 3, KiB) << power for power in range(7)]
    else:
        sizes = [*(int(device.memory.value) for device in HARDWARE.values()), current]
        # An A100 and an H100 have the same memory as text.
        values = list({format_bytes(size): size for size in sizes}.values())
    off = [None] if name in BY_NAME and None in BY_NAME[name].choices else []
    return [*sorted({*values, current} - {None}), *off]


@dataclass(frozen=True)
class Suggestion:
    """A change of one knob that makes a combination legal."""

    name: str
    value: Any

    @property
    def text(self) -> str:
        """The knob and its value, for a button."""
        # The type is tested, because 1 == True and one rank is not "on".
        switch = isinstance(self.value, bool) and ("on" if self.value else "off")
        return f"{LABELS[self.name]} {switch or value_text(self.name, self.value)}"


def suggest(state: State, changed: str = "") -> list[Suggestion]:
    """Return changes of one knob that make the combination legal, each to the knob's nearest legal value.

    Args:
        state: An illegal combination.
        changed: The knob that the reader has changed; its suggestion comes first.
    """
    suggestions = []
    for name in sorted((*ADJUSTABLE, "ranks"), key=lambda name: name != changed):
        # The state stands for no value, because None is a value.
        value = next((v for v in _nearest(state, name) if is_legal(state.with_value(name, v))), state)
        if value is not state:
            suggestions.append(Suggestion(name, value))
    return suggestions


def _nearest(state: State, name: str) -> Iterable[Any]:
    """Return the other values of a knob, the nearest first."""
    current = state.value(name)
    others = [value for value in choices(state, name) if value != current]
    if name in BY_NAME and not BY_NAME[name].count:
        return others
    # Off is the last.
    return sorted(others, key=lambda value: (value is None, abs((value or 0) - (current or 0))))


def is_legal(state: State) -> bool:
    """Return whether the combination is legal."""
    try:
        state.job  # noqa: B018
    except LabError:
        return False
    return True
