"""A search for the recipes that fit that plans few of them."""

from importlib import import_module

import pytest


def plan_few_recipes(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let ``lab.fit`` plan the recipes of these names, and no other."""
    module = import_module("lab.planning.fit")
    monkeypatch.setattr(module, "RECIPE_NAMES", names)
    for name in ("candidates", "with_other_degrees"):
        monkeypatch.setattr(module, name, lambda *args: ())
