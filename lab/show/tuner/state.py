"""The state of a tuner: the model, the sizes and the knobs, and the recipe that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.models import shape_of
from lab.planning.bill import Order, make_order
from lab.planning.cuda_workspace import NODE
from lab.planning.hardware import make_machine
from lab.recipe.knobs import BY_NAME, KNOBS
from lab.recipe.ladder import RECIPE_NAMES, RUNGS, check_name, recipe_by_name
from lab.recipe.recipe import Recipe, check_fields
from lab.shape import Shape
from lab.techniques.host_memory import reserve
from lab.units import check_counts, parse_bytes, parse_tokens

ADJUSTABLE = tuple(knob.name for knob in KNOBS if knob.turned)
"""The knobs of a recipe that have a control. The others have the value of the rung."""

TILES = tuple(name for name in ADJUSTABLE if BY_NAME[name].rung == "tiling")

NEUTRAL: dict[str, dict[str, Any]] = {name: {name: BY_NAME[name].neutral} for name in ADJUSTABLE}
"""The fields that switch off each knob."""

# Without checkpointing there is nothing to offload.
NEUTRAL["checkpoint"]["offload"] = BY_NAME["offload"].neutral

READERS = {"tokens": parse_tokens, "device_memory": parse_bytes, "host_memory": parse_bytes}
"""The functions that read the sizes of a state, given as numbers or as text."""

ORDER = ("tokens_total", "price")
"""The values of which a bill is made. Memory does not depend on them."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The values of all knobs.

    Attributes:
        model: The name or the directory of the model.
        shape: The sizes of the model.
        rung: The named recipe.
        tokens: The tokens of one sequence.
        ranks: The number of ranks.
        by_hand: The fields of the recipe that were set after the rung. Fields that derive from them follow.
        device_memory: The memory of a rank in bytes.
        host_memory: The host memory of a node in bytes.
        workspace: Whether to add the memory that CUDA takes outside torch.
        tokens_total: The tokens of the whole training, as they were given; None if they were not.
        price: The money for one GPU hour, as it was given; None if it was not.
    """

    model: str
    shape: Shape = field(repr=False, compare=False)
    rung: str
    tokens: int
    ranks: int
    by_hand: Mapping[str, Any]
    device_memory: int
    host_memory: int
    workspace: bool
    tokens_total: int | str | None = None
    price: float | str | None = None

    @property
    def order(self) -> Order | None:
        """The tokens of the whole training and the price; None if no tokens were given.

        Raises:
            LabError: One of them cannot be read.
        """
        return make_order(self.tokens_total, self.price)

    @property
    def host_available(self) -> int:
        """The bytes of a node's host memory that a step may take; see ``Machine.available``."""
        return max(self.host_memory - reserve(min(self.ranks, NODE)), 0)

    @property
    def base(self) -> dict[str, Any]:
        """All fields of the rung's recipe, with the ``ulysses`` and ``ring`` that were set by hand."""
        degrees = {name: self.by_hand[name] for name in ("ulysses", "ring") if name in self.by_hand}
        recipe = recipe_by_name(self.rung, self.model, self.ranks, self.tokens, shape=self.shape, **degrees)
        return recipe.to_json() | degrees

    @property
    def fields(self) -> dict[str, Any]:
        """All fields of the recipe, legal or not."""
        return self.base | dict(self.by_hand)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the state.

        Raises:
            RecipeError: The combination is illegal with this model on these ranks.
        """
        return recipe_of(self.fields, self)

    @property
    def step(self) -> tuple[Any, ...]:
        """The values on which the bytes of a step depend: states with equal ``step`` have the same plan."""
        return self.model, tuple(self.fields.items()), self.tokens, self.ranks, self.workspace

    def with_value(self, name: str, value: Any) -> State:
        """Return the state with one value changed. Another rung discards the fields set by hand.

        An illegal combination is not an error here, nor is an order that cannot be read.

        Raises:
            LabError: The name is not that of a value or of a field of a recipe, or the value is wrong by
                itself.
        """
        if name == "model":
            return replace(self, model=_as_text(value), shape=shape_of(value))
        if name == "rung":
            check_name(value)
            return replace(self, rung=value, by_hand={})
        if name == "ranks":
            check_counts({name: value})
            return replace(self, ranks=value)
        if name in ORDER:
            return replace(self, **{name: value})
        if name == "workspace":
            return replace(self, workspace=bool(value))
        if name in READERS:
            read: dict[str, Any] = {name: READERS[name](value)}
            return replace(self, **read)
        check_fields([name])
        return replace(self, by_hand={**self.by_hand, name: value})


def start_state(
    model: str | Path,
    recipe: str | Recipe,
    *,
    tokens: int | str,
    ranks: int,
    device_memory: int | str | None,
    host_memory: int | str,
    workspace: bool,
    tokens_total: int | str | None = None,
    price: float | str | None = None,
    **knobs: Any,
) -> State:
    """Return the state at which a tuner begins.

    A ``Recipe`` becomes the rung that differs least from it, with the other fields set by hand. An illegal
    combination is not an error here.

    Raises:
        LabError: A model, rung, knob or size does not exist; the total of tokens or the price cannot be read.
    """
    check_counts({"ranks": ranks})
    make_order(tokens_total, price)
    check_fields(knobs)
    if isinstance(recipe, str):
        check_name(recipe)
    state = State(
        model=_as_text(model),
        shape=shape_of(model),
        rung=recipe if isinstance(recipe, str) else RUNGS[-1],
        tokens=parse_tokens(tokens),
        ranks=ranks,
        by_hand=knobs,
        device_memory=make_machine(device_memory=device_memory).available("device", ranks) or 0,
        host_memory=parse_bytes(host_memory),
        workspace=workspace,
        tokens_total=tokens_total,
        price=price,
    )
    if isinstance(recipe, Recipe):
        fields = recipe.to_json() | knobs
        rungs = (
            replace(state, rung=rung, by_hand=_fields_by_hand(fields, state, rung)) for rung in RECIPE_NAMES
        )
        state = min(rungs, key=lambda candidate: len(candidate.by_hand))
    # A single value that no recipe can have is an error of the caller; the tuner explains combinations only.
    Recipe(**{**state.fields, "checkpoint": True})
    return state


def _as_text(model: object) -> str:
    if not isinstance(model, str | Path):
        raise LabError(f"a tuner writes its model as text: give a name or a directory, not {model!r}")
    return str(model)


def _fields_by_hand(fields: dict[str, Any], state: State, rung: str) -> dict[str, Any]:
    """Return what to set on a rung to get these fields: first the degrees, from which others derive."""
    by_hand: dict[str, Any] = {}
    for names in (("ulysses", "ring"), fields):
        base = replace(state, rung=rung, by_hand=by_hand).base
        by_hand |= {name: fields[name] for name in names if fields[name] != base[name]}
    return by_hand


def recipe_of(fields: Mapping[str, Any], state: State) -> Recipe:
    """Return the recipe of these fields, checked for the state's model and ranks.

    Raises:
        RecipeError: The recipe is illegal for them.
    """
    recipe = Recipe(**fields)
    recipe.check(state.shape, state.ranks)
    return recipe
