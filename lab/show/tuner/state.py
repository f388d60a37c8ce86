"""The state of a tuner: the model, the sizes and the knobs, and the recipe that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.models import shape_of
from lab.planning.bill import Order, make_order
from lab.recipe.jobs import Job, Machine, make_job
from lab.recipe.ladder import RECIPE_NAMES, check_name, recipe_by_name
from lab.recipe.recipe import BY_NAME, KNOBS, Recipe, check_fields
from lab.shape import Shape
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

    @cached_property
    def base(self) -> dict[str, Any]:
        """All fields of the rung's recipe, with the ``ulysses`` and ``ring`` that were set by hand."""
        degrees = {name: self.by_hand[name] for name in ("ulysses", "ring") if name in self.by_hand}
        recipe = recipe_by_name(self.rung, self.model, self.ranks, self.tokens, shape=self.shape, **degrees)
        return recipe.to_json() | degrees

    @cached_property
    def fields(self) -> dict[str, Any]:
        """All fields of the recipe, legal or not."""
        return self.base | dict(self.by_hand)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the state.

        Raises:
            RecipeError: The combination is illegal with this model on these ranks.
        """
        recipe = Recipe(**self.fields)
        recipe.check(self.shape, self.ranks)
        return recipe

    @property
    def job(self) -> Job:
        """The step of the state.

        Raises:
            LabError: The combination is illegal, or the step is larger than the lab plans.
        """
        return make_job(self.model, self.recipe, tokens=self.tokens, ranks=self.ranks, shape=self.shape)

    @property
    def machine(self) -> Machine:
        """What the step is planned for."""
        return Machine(
            device_memory=self.device_memory, host_memory=self.host_memory, workspace=self.workspace
        )

    def value(self, name: str) -> Any:
        """Return a value by its name, or a field of the recipe."""
        return self.fields[name] if name in BY_NAME else getattr(self, name)

    def of_recipe(self, recipe: Recipe, knobs: Mapping[str, Any]) -> State:
        """Return the state of a recipe: the rung that differs least from it, with the other fields by hand.

        Args:
            recipe: The recipe.
            knobs: Fields that are set on it.
        """
        fields, states = {**recipe.to_json(), **knobs}, []
        for rung in RECIPE_NAMES:
            state = replace(self, rung=rung, by_hand={})
            # First the degrees, from which others derive.
            for names in (("ulysses", "ring"), fields):
                base = state.base
                changed = {name: fields[name] for name in names if fields[name] != base[name]}
                state = replace(state, by_hand={**state.by_hand, **changed})
            states.append(state)
        return min(states, key=lambda state: len(state.by_hand))

    def without(self, name: str) -> State:
        """Return the state with a knob switched off."""
        return replace(self, by_hand={**self.by_hand, **NEUTRAL[name]})

    def with_value(self, name: str, value: Any) -> State:
        """Return the state with one value changed. Another rung discards the fields set by hand.

        An illegal combination is not an error here, nor is an order that cannot be read.

        Raises:
            LabError: The name is not that of a value or of a field of a recipe, or the value is wrong by
                itself.
        """
        if name == "model":
            return replace(self, model=as_text(value), shape=shape_of(value))
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


def as_text(model: object) -> str:
    """Return the name or the directory of a model as text.

    Raises:
        LabError: It is neither.
    """
    if not isinstance(model, str | Path):
        raise LabError(f"a tuner writes its model as text: give a name or a directory, not {model!r}")
    return str(model)
