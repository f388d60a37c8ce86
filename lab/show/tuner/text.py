"""The state of a tuner as text: the values of its sliders, an expression in Python, and a command."""

from __future__ import annotations

import json
from shlex import join
from typing import Any

from lab.errors import LabError
from lab.planning.plan import Plan
from lab.recipe.knobs import KNOBS
from lab.show.tuner.state import TILES, State
from lab.units import GiB, KiB, MiB, TiB, format_bytes, format_tokens

LABELS = {knob.name: knob.label for knob in KNOBS if knob.turned} | {
    "tokens": "context",
    "ranks": "ranks",
    "device_memory": "device memory",
    "tokens_total": "tokens in all",
    "price": "a GPU hour",
}


def value_text(name: str, value: Any) -> str:
    """Return a knob's value as its slider shows it, and as ``--set`` reads it."""
    if name == "device_memory":
        return format_bytes(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return format_tokens(value) if name in (*TILES, "tokens") else str(value)


def fields_to_set(state: State) -> dict[str, Any]:
    """Return the fields to set on the rung's recipe: those set by hand that change it."""
    degrees = [name for name in state.by_hand if name in ("ulysses", "ring")]
    base = state.base
    return {n: value for n, value in state.by_hand.items() if n in degrees or value != base[n]}


def as_python(state: State) -> str:
    """Return the call of ``lab.plan`` for this state."""
    settings = {"tokens": format_tokens(state.tokens), "ranks": state.ranks, **fields_to_set(state)}
    settings |= {"device_memory": _exact(state.device_memory), "host_memory": _exact(state.host_memory)}
    settings |= {} if state.workspace else {"workspace": False}
    arguments = ", ".join(f"{name}={_literal(value)}" for name, value in settings.items())
    return f"lab.plan({_literal(state.model)}, {_literal(state.rung)}, {arguments})"


def as_command(state: State) -> str:
    """Return the ``lab plan`` command for this state."""
    words = ["lab", "plan", state.model, "--recipe", state.rung, "--tokens", format_tokens(state.tokens)]
    words += ["--ranks", str(state.ranks)]
    for name, value in fields_to_set(state).items():
        words += ["--set", f"{name}={value_text(name, value)}"]
    words += ["--device-memory", _exact(state.device_memory), "--host-memory", _exact(state.host_memory)]
    return join(words if state.workspace else [*words, "--no-workspace"])


def bill_text(state: State, plan: Plan | None) -> str:
    """Return a line on what the order of a state takes, by the seconds of its plan, or what is missing.

    Args:
        state: The state.
        plan: The plan of this state; None if there is none yet.
    """
    try:
        order = state.order
        bill = None if order is None or plan is None else plan.bill(order)
    except LabError as error:
        return str(error)
    if plan is None:
        return "" if order is None else "Plan estimates the seconds of a step, of which the bill is made."
    mfu = f"MFU {plan.mfu:.1%} (estimate)"
    return mfu if order is None or bill is None else f"{bill.text(order)}; {mfu}"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _exact(size: int) -> str:
    """Return bytes as a text that ``parse_bytes`` reads exactly."""
    units = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB))
    return next((f"{size // unit}{name}" for name, unit in units if size % unit == 0), str(size))
