"""The state of a tuner as text: the values of its sliders, an expression in Python, and a command."""

from __future__ import annotations

import json
from dataclasses import replace
from shlex import join
from typing import Any

from lab.errors import LabError
from lab.planning.plan import Plan
from lab.recipe.recipe import KNOBS
from lab.show.tuner.state import TILES, State
from lab.units import GiB, KiB, MiB, TiB, format_bytes, format_tokens

_CONTROLS = (
    ("tokens", "context", "The context: the tokens of one sequence"),
    ("ranks", "ranks", "The number of GPUs"),
    ("device_memory", "device memory", "The memory of one GPU"),
    ("tokens_total", "tokens in all", "The tokens of the whole training, decimal: 10B = 10^10"),
    ("price", "a GPU hour", "The money for one GPU hour, in any currency"),
    *((knob.name, knob.label, knob.cost) for knob in KNOBS if knob.turned),
)
LABELS = {name: label for name, label, _ in _CONTROLS}
HINTS = {name: hint for name, _, hint in _CONTROLS}


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


def step_text(state: State) -> str:
    """Return the title of a legal state's step, with the recipe by its name."""
    by_hand = (f"{name}={value_text(name, value)}" for name, value in fields_to_set(state).items())
    return replace(state.job, recipe_name=" ".join([state.rung, *by_hand])).title


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


def seconds_text(state: State, plan: Plan | None) -> str:
    """Return a line on what a step takes, and the order of a state if it has one, or what is missing.

    Args:
        state: The state.
        plan: The plan of this state; None if there is none yet.
    """
    try:
        order = state.order
        bills = [] if order is None or plan is None else [plan.bill(order).text(order)]
    except LabError as error:
        return str(error)
    if plan is None:
        return ""
    step = f"a step takes {plan.seconds_text} on {plan.device}, MFU {plan.mfu:.1%} (estimate)"
    return "; ".join([*bills, step])


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _exact(size: int) -> str:
    """Return bytes as a text that ``parse_bytes`` reads exactly."""
    units = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB))
    return next((f"{size // unit}{name}" for name, unit in units if size % unit == 0), str(size))
