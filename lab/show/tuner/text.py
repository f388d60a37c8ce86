"""What a tuner stands at, as text: beside its sliders, as Python, and as a command line."""

from __future__ import annotations

import json
from shlex import join
from typing import Any

from lab.recipe.knobs import KNOBS
from lab.show.tuner.state import TILES, State
from lab.units import GiB, KiB, MiB, TiB, format_bytes, format_tokens

LABELS = {knob.name: knob.label for knob in KNOBS if knob.turned} | {
    "tokens": "context",
    "ranks": "ranks",
    "device_memory": "device memory",
}


def written(name: str, value: Any) -> str:
    """A knob's value as it stands beside its slider, and as ``--set`` reads it."""
    if name == "device_memory":
        return format_bytes(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return format_tokens(value) if name in (*TILES, "tokens") else str(value)


def set_by_hand(state: State) -> dict[str, Any]:
    """What remains to be set on the rung's recipe: all that is not as it would be anyway."""
    degrees = [name for name in state.by_hand if name in ("ulysses", "ring")]
    base = state.base
    return {n: value for n, value in state.by_hand.items() if n in degrees or value != base[n]}


def as_python(state: State) -> str:
    """The plan of this state as an expression."""
    settings = {"tokens": format_tokens(state.tokens), "ranks": state.ranks, **set_by_hand(state)}
    settings |= {"device_memory": _exact(state.device_memory), "host_memory": _exact(state.host_memory)}
    settings |= {} if state.workspace else {"workspace": False}
    said = ", ".join(f"{name}={_literal(value)}" for name, value in settings.items())
    return f"lab.plan({_literal(state.model)}, {_literal(state.rung)}, {said})"


def as_command(state: State) -> str:
    """The same as a command line."""
    words = ["lab", "plan", state.model, "--recipe", state.rung, "--tokens", format_tokens(state.tokens)]
    words += ["--ranks", str(state.ranks)]
    for name, value in set_by_hand(state).items():
        words += ["--set", f"{name}={written(name, value)}"]
    words += ["--device-memory", _exact(state.device_memory), "--host-memory", _exact(state.host_memory)]
    return join(words if state.workspace else [*words, "--no-workspace"])


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _exact(size: int) -> str:
    """Bytes as ``parse_bytes`` reads them back, to the byte."""
    units = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB))
    return next((f"{size // unit}{name}" for name, unit in units if size % unit == 0), str(size))
