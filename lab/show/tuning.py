"""What a tuner stands at: model, sizes and knobs, the recipe they make, and what mends an illegal one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

from lab.errors import LabError, RecipeError
from lab.models import config_of
from lab.recipe import OFFLOADS, Recipe, check_fields
from lab.rungs import NAMES, RUNGS, check_name, named
from lab.units import GiB, KiB, Mi, MiB, TiB, format_bytes, format_tokens, parse_bytes, parse_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TILES = ("mlp_tile", "norm_tile", "loss_tile")

KNOBS = ("head_chunk", *TILES, "checkpoint", "offload")
"""The fields of a recipe that the reader turns; the rung gives the others."""

NEUTRAL: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint": False, "offload": "none"},
    "offload": {"offload": "none"},
    **{name: {name: None} for name in ("head_chunk", *TILES)},
}
"""A recipe without one of its knobs."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Where all the knobs stand.

    ``rung`` names the recipe that it begins with, ``by_hand`` the fields set after it; what derives
    from them follows. ``device_memory`` is bytes a rank, ``host_memory`` bytes a node.
    """

    model: str
    config: PretrainedConfig = field(repr=False, compare=False)
    rung: str
    tokens: int
    ranks: int
    by_hand: Mapping[str, Any]
    device_memory: int
    host_memory: int
    workspace: bool

    @property
    def base(self) -> dict[str, Any]:
        """All fields of the rung's recipe, with degrees set by hand."""
        degrees = {name: self.by_hand[name] for name in ("ulysses", "ring") if name in self.by_hand}
        made = named(self.rung, self.model, self.ranks, self.tokens, config=self.config, **degrees)
        return made.to_json() | degrees

    @property
    def fields(self) -> dict[str, Any]:
        """All fields of the recipe, legal or not."""
        return self.base | dict(self.by_hand)

    @property
    def recipe(self) -> Recipe:
        """The recipe.

        Raises:
            RecipeError: this combination is illegal with this model on these ranks.
        """
        return checked(self.fields, self)

    @property
    def step(self) -> tuple[Any, ...]:
        """What the bytes of a step depend on: two states of equal steps have the same plan."""
        return self.model, tuple(self.fields.items()), self.tokens, self.ranks, self.workspace

    def moved(self, name: str, value: Any) -> State:
        """The state after one move; another rung takes back what was set by hand."""
        if name == "model":
            return replace(self, model=value, config=config_of(value))
        if name == "rung":
            return replace(self, rung=value, by_hand={})
        if name in KNOBS:
            return replace(self, by_hand={**self.by_hand, name: value})
        return replace(self, **{name: value})


def begun(
    model: str | Path,
    recipe: str | Recipe,
    *,
    tokens: int | str,
    ranks: int,
    device_memory: int | str,
    host_memory: int | str,
    workspace: bool,
    **knobs: Any,
) -> State:
    """The state at which a tuner begins; a Recipe is told as the rung that is nearest to it, and the rest.

    Raises:
        LabError: a model, rung, knob or size that does not exist. An illegal combination is no error here.
    """
    if not isinstance(model, str | Path):
        raise LabError(f"a tuner writes its model as text: give a name or a directory, not {model!r}")
    if type(ranks) is not int or ranks < 1:
        raise LabError(f"ranks={ranks!r}: it takes a whole number, 1 or more")
    check_fields(knobs)
    if isinstance(recipe, str):
        check_name(recipe)
    state = State(
        model=str(model),
        config=config_of(model),
        rung=recipe if isinstance(recipe, str) else RUNGS[-1],
        tokens=parse_tokens(tokens),
        ranks=ranks,
        by_hand=knobs,
        device_memory=parse_bytes(device_memory),
        host_memory=parse_bytes(host_memory),
        workspace=workspace,
    )
    if isinstance(recipe, Recipe):
        fields = recipe.to_json() | knobs
        rungs = (replace(state, rung=rung, by_hand=_different(fields, state, rung)) for rung in NAMES)
        state = min(rungs, key=lambda found: len(found.by_hand))
    # What no recipe can hold is the caller's slip, and not a combination to explain.
    Recipe(**{**state.fields, "checkpoint": True})
    return state


def _different(fields: dict[str, Any], state: State, rung: str) -> dict[str, Any]:
    """What to set by hand on a rung to have these fields: first the degrees, for others follow them."""
    found: dict[str, Any] = {}
    for names in (("ulysses", "ring"), fields):
        base = replace(state, rung=rung, by_hand=found).base
        found |= {name: fields[name] for name in names if fields[name] != base[name]}
    return found


def checked(fields: Mapping[str, Any], state: State) -> Recipe:
    """The recipe of these fields for the state's model and ranks.

    Raises:
        RecipeError: it is illegal there.
    """
    recipe = Recipe(**fields)
    recipe.check(state.config, state.ranks)
    return recipe


# ---- what a knob can be set to, and what mends ------------------------------------------------------------


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
        return [value for value in OFFLOADS if value != state.fields[name]]
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


# ---- as text -----------------------------------------------------------------------------------------------

LABELS = {
    "head_chunk": "head chunk", "mlp_tile": "MLP tile", "norm_tile": "norm tile", "loss_tile": "loss tile",
    "checkpoint": "checkpoint", "offload": "offload", "tokens": "context", "ranks": "ranks",
    "device_memory": "device memory",
}  # fmt: skip


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
