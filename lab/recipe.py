"""A recipe says which techniques a training step stacks; the ladder names the usual stacks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from lab.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which techniques a step uses. ``Recipe()`` is the plain model: replicated, everything kept.

    Attributes:
        fsdp: shard parameters, gradients and optimizer state over all ranks (FSDP2), per layer.
        checkpoint: keep only each layer's input in forward and recompute the rest in backward.
    """

    fsdp: bool = False
    checkpoint: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise RecipeError(f"{field.name}={value!r} is not True or False")

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Recipe:
        """Read what ``to_json`` wrote.

        Raises:
            RecipeError: a field no recipe has, or a value it cannot take.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(document) - set(known))
        if unknown:
            raise RecipeError(f"a recipe has no field {unknown[0]!r}: its fields are {', '.join(known)}")
        return cls(**document)


def ladder() -> dict[str, Recipe]:
    """The named recipes, each adding one technique to the one before."""
    return {
        "plain": Recipe(),
        "fsdp": Recipe(fsdp=True),
        "checkpoint": Recipe(fsdp=True, checkpoint=True),
    }


def named(recipe: str | Recipe) -> Recipe:
    """The recipe itself, or the ladder's recipe of this name.

    Raises:
        RecipeError: the ladder has no such name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    rungs = ladder()
    if recipe not in rungs:
        raise RecipeError(f"unknown recipe {recipe!r}: give one of {', '.join(rungs)}, or a Recipe")
    return rungs[recipe]
