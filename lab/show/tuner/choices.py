"""What a tuner's knob can be set to, and which single moves make an illegal combination legal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lab.errors import RecipeError
from lab.recipe.knobs import BY_NAME
from lab.show.tuner.state import NEUTRAL, TILES, State
from lab.show.tuner.text import LABELS, written
from lab.units import GiB, KiB, Mi


def choices(state: State, name: str) -> list[Any]:
    """The values of a knob's slider, in the order in which memory grows, with the one that it stands at."""
    here = getattr(state, name) if name in ("tokens", "ranks", "device_memory") else state.fields[name]
    # Doublings, and half a step between them.
    steps = sorted(n for power in range(30) for n in (2**power, 3 * 2**power // 2) if n > 0)
    if name == "head_chunk":
        heads = state.config.num_attention_heads
        found = [n for n in range(1, heads + 1) if n in steps or heads % n == 0]
    elif name in TILES:
        found = [2**power for power in range(6, 21)]
    elif name == "tokens":
        found = [*(2**power for power in range(8, 21)), *(n * Mi for n in (2, 3, 4, 5, 6, 8, 12, 16))]
    elif name == "ranks":
        found = [n for n in steps if n <= 64]
    elif here < 16 * GiB:
        found = [max(here >> 3, KiB) << power for power in range(7)]
    else:
        found = [size * GiB for size in (16, 24, 40, 48, 64, 80, 96, 141, 192)]
    return [*sorted({*found, here} - {None}), *([None] if name in NEUTRAL else [])]


@dataclass(frozen=True)
class Mend:
    """One move that makes a combination legal."""

    name: str
    value: Any

    @property
    def words(self) -> str:
        """What its button says."""
        # 1 == True, and one rank is not "on".
        on = isinstance(self.value, bool) and ("on" if self.value else "off")
        return f"{LABELS[self.name]} {on or written(self.name, self.value)}"


def mends(state: State, moved: str = "") -> list[Mend]:
    """Single moves to a legal combination, each to the knob's nearest legal value; first of the one moved."""
    found = []
    for name in sorted(("head_chunk", "offload", "checkpoint", "ranks"), key=lambda name: name != moved):
        value = next((v for v in _nearest(state, name) if legal(state.moved(name, v))), state)
        if value is not state:
            found.append(Mend(name, value))
    return found


def _nearest(state: State, name: str) -> Iterable[Any]:
    """The other values of a knob, the nearest first."""
    if name == "offload":
        return [value for value in BY_NAME["offload"].choices if value != state.fields[name]]
    if name == "checkpoint":
        return [not state.fields[name]]
    here = state.ranks if name == "ranks" else state.fields[name]
    others = [value for value in choices(state, name) if value not in (None, here)]
    without = [None] if name in NEUTRAL and here is not None else []
    return [*sorted(others, key=lambda value: abs(value - (here or 0))), *without]


def legal(state: State) -> bool:
    """Whether the state has a recipe."""
    try:
        state.recipe  # noqa: B018
    except RecipeError:
        return False
    return True
