"""The recipe that training arguments name. Its knobs are computed for the trainer's model and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from lab.errors import RecipeError
from lab.recipe.ladder import resolve_recipe
from lab.recipe.recipe import Recipe
from lab.units import parse_tokens


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe as the arguments give it: itself or its name, and the values from which its knobs derive.

    Attributes:
        recipe: A recipe, or the name of one.
        tokens: The number of tokens in the longest row, from which the tiles of a named recipe derive.
        knobs: Fields of the recipe that are set by hand.
    """

    recipe: str | Recipe
    tokens: int
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: str | Recipe, tokens: int | str | None, knobs: Mapping[str, Any]) -> RecipeChoice:
        """Return the choice of a recipe.

        Raises:
            RecipeError: The recipe is a name, and there is no number of tokens.
        """
        if tokens is None and isinstance(recipe, str):
            raise RecipeError(
                f"recipe={recipe!r} without tokens: its tiles derive from the longest row; give tokens, such "
                "as tokens='128K'"
            )
        return cls(recipe, 1 if tokens is None else parse_tokens(tokens), knobs)

    def resolve(self, config: PretrainedConfig, ranks: int) -> Recipe:
        """Return the recipe for a model on P ranks.

        Raises:
            LabError: a recipe that the model or the ranks forbid.
        """
        return resolve_recipe(self.recipe, config, ranks, self.tokens, **self.knobs)
