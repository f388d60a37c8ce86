"""What the refusal of a recipe suggests leads to a recipe that is not refused."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import models
from lab.decoder import FAMILIES
from lab.errors import RecipeError
from lab.recipe.knobs import Knob
from lab.recipe.recipe import KNOBS, Recipe, parse_knobs
from lab_tests.support.reference import config

RANKS = 4


@cache
def shape(family, heads, kv_heads):
    return models.shape_of(config(family, heads, kv_heads))


def followed(shape, knobs) -> tuple[Recipe, int]:
    """Return the recipe to which the suggestions of errors lead, and the number of errors."""
    knobs, seen = dict(knobs), list[str]()
    while True:
        try:
            recipe = Recipe(**knobs)
            recipe.check(shape, RANKS)
            return recipe, len(seen)
        except RecipeError as error:
            refusal = str(error)
        assert refusal not in seen, "following it leads back to it"
        seen.append(refusal)
        suggested = suggestion(refusal, knobs)
        assert suggested, f"no suggestion in {refusal}"
        knobs |= suggested


def suggestion(refusal: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs that an error suggests; nothing if it suggests none."""
    if match := re.search(r"these products work: ([\d, ]+)", refusal):
        return {"ulysses": min(map(int, match[1].split(","))), "ring": 1}
    if match := re.search(r"^(\w+)=.* these work: ([\d, ]+)", refusal):
        return {match[1]: min(map(int, match[2].split(",")), key=lambda n: abs(n - knobs[match[1]]))}
    for part in refusal.partition("set ")[2].split(", or "):
        if settings := re.findall(r"\b\w+=[\w']+", part):
            return parse_knobs(setting.replace("'", "") for setting in settings)
    return {}


def values_of(knob: Knob) -> st.SearchStrategy[Any]:
    chosen = st.sampled_from(knob.choices) if knob.choices else st.nothing()
    return chosen | st.integers(1, 30) if knob.count else chosen


DRAWN = st.fixed_dictionaries({knob.name: values_of(knob) for knob in KNOBS})


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)), kv_heads=st.integers(1, 6), group=st.integers(1, 4), knobs=DRAWN
)
def test_any_recipe_is_legal_or_leads_to_a_legal_one(family, kv_heads, group, knobs):
    followed(shape(family, kv_heads * group, kv_heads), knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"ulysses": 5},
        {"ulysses": 4, "ring": 2},
        {"ulysses": 2, "head_chunk": 3},
        {"offload": "inputs"},
        {"overlap": True},
        {"compile": "tiles"},
        {"stream": 5, "checkpoint": True, "offload": "inputs", "mlp_tile": 3},
        {"segment": 2},
        {"ulysses": 2, "ulysses_backend": "deepspeed", "head_chunk": 4},
    ],
)
def test_a_refusal_leads_to_a_legal_recipe(knobs):
    assert followed(shape("llama", 24, 6), knobs)[1] > 0


def test_a_legal_recipe_stays_and_a_refusal_without_a_suggestion_is_found():
    assert followed(shape("llama", 24, 6), {"ulysses": 2}) == (Recipe(ulysses=2), 0)
    assert suggestion("ulysses=5: it is odd", {"ulysses": 5}) == {}
