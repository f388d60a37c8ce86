import dataclasses
from itertools import pairwise

import pytest

import lab
from lab.errors import RecipeError
from lab.recipe import Recipe, ladder, named


def test_the_default_is_the_plain_model():
    assert Recipe() == named("plain")
    assert not any(Recipe().to_json().values())


def test_each_rung_adds_one_technique():
    rungs = list(ladder().values())
    for below, above in pairwise(rungs):
        changed = [k for k, v in above.to_json().items() if v != below.to_json()[k]]
        assert len(changed) == 1


def test_json_both_ways():
    recipe = Recipe(fsdp=True, checkpoint=True)
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_frozen_and_by_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().fsdp = True
    with pytest.raises(TypeError):
        Recipe(True)


def test_an_unknown_name_field_or_value():
    with pytest.raises(RecipeError, match="unknown recipe 'fdsp': give one of plain, fsdp"):
        named("fdsp")
    with pytest.raises(RecipeError, match="a recipe has no field 'fsdp2': its fields are fsdp"):
        Recipe.from_json({"fsdp2": True})
    with pytest.raises(RecipeError, match="fsdp='yes' is not True or False"):
        Recipe(fsdp="yes")


def test_public_names():
    for name in lab.__all__:
        assert getattr(lab, name) is not None
    with pytest.raises(AttributeError, match="module 'lab' has no attribute 'plam'"):
        lab.plam  # noqa: B018
