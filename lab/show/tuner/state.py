"""What a tuner stands at: model, sizes and knobs, and the recipe they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.errors import LabError
from lab.models import config_of
from lab.recipe.knobs import BY_NAME, KNOBS
from lab.recipe.ladder import NAMES, RUNGS, check_name, named
from lab.recipe.recipe import Recipe, check_fields
from lab.units import check_counts, parse_bytes, parse_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TURNED = tuple(knob.name for knob in KNOBS if knob.turned)
"""The knobs of a recipe that have a control; the rung gives the others."""

TILES = tuple(name for name in TURNED if BY_NAME[name].rung == "tiling")

NEUTRAL: dict[str, dict[str, Any]] = {name: {name: BY_NAME[name].neutral} for name in TURNED}
"""What switches off a knob: its neutral value."""

# Without checkpointing there is nothing to offload.
NEUTRAL["checkpoint"]["offload"] = BY_NAME["offload"].neutral

READERS = {"tokens": parse_tokens, "device_memory": parse_bytes, "host_memory": parse_bytes}
"""How the sizes of a state are read, as numbers or as text."""


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
        """The state after one move; another rung takes back what was set by hand.

        Raises:
            LabError: a name that is neither of the state nor of a recipe, or a value that no state has. An
                illegal combination is no error here.
        """
        if name == "model":
            return replace(self, model=_as_text(value), config=config_of(value))
        if name == "rung":
            check_name(value)
            return replace(self, rung=value, by_hand={})
        if name == "ranks":
            check_counts({name: value})
            return replace(self, ranks=value)
        if name == "workspace":
            return replace(self, workspace=bool(value))
        if name in READERS:
            read: dict[str, Any] = {name: READERS[name](value)}
            return replace(self, **read)
        check_fields([name])
        return replace(self, by_hand={**self.by_hand, name: value})


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
    check_counts({"ranks": ranks})
    check_fields(knobs)
    if isinstance(recipe, str):
        check_name(recipe)
    state = State(
        model=_as_text(model),
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


def _as_text(model: object) -> str:
    if not isinstance(model, str | Path):
        raise LabError(f"a tuner writes its model as text: give a name or a directory, not {model!r}")
    return str(model)


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
