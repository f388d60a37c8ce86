"""The public names, each loaded when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.ranks import Cluster
    from lab import models, show, units
    from lab.errors import LabError, RecipeError
    from lab.memory.measure import measure
    from lab.memory.timeline import Timeline
    from lab.planning.fit import fit
    from lab.planning.max_context import MaxContext, max_context
    from lab.planning.plan import Plan, plan, plan_ladder
    from lab.recipe.ladder import ladder
    from lab.recipe.recipe import Recipe
    from lab.rehearsing.rehearsal import Rehearsal
    from lab.rehearsing.rehearse import rehearse
    from lab.step import data
    from lab.step.batches import Batch, shard_batch
    from lab.step.compose import apply_recipe
    from lab.step.training_step import loss, train_step
    from lab.training.profile import Profiled, profile
    from lab.training.records import Run
    from lab.training.run import run
    from lab.training.train import Trained, train

__all__ = [
    "Batch",
    "Cluster",
    "LabError",
    "MaxContext",
    "Plan",
    "Profiled",
    "Recipe",
    "RecipeError",
    "Rehearsal",
    "Run",
    "Timeline",
    "Trained",
    "apply_recipe",
    "data",
    "fit",
    "ladder",
    "loss",
    "max_context",
    "measure",
    "models",
    "plan",
    "plan_ladder",
    "profile",
    "rehearse",
    "run",
    "shard_batch",
    "show",
    "train",
    "train_step",
    "units",
]

# `lab --help` must not wait seconds for torch: a name's module is imported when the name is first asked for.
_HOME = {
    "Batch": "lab.step.batches",
    "Cluster": "cluster.ranks",
    "LabError": "lab.errors",
    "MaxContext": "lab.planning.max_context",
    "Plan": "lab.planning.plan",
    "Profiled": "lab.training.profile",
    "Recipe": "lab.recipe.recipe",
    "RecipeError": "lab.errors",
    "Rehearsal": "lab.rehearsing.rehearsal",
    "Run": "lab.training.records",
    "Timeline": "lab.memory.timeline",
    "Trained": "lab.training.train",
    "apply_recipe": "lab.step.compose",
    "fit": "lab.planning.fit",
    "ladder": "lab.recipe.ladder",
    "loss": "lab.step.training_step",
    "max_context": "lab.planning.max_context",
    "measure": "lab.memory.measure",
    "plan": "lab.planning.plan",
    "plan_ladder": "lab.planning.plan",
    "profile": "lab.training.profile",
    "rehearse": "lab.rehearsing.rehearse",
    "run": "lab.training.run",
    "shard_batch": "lab.step.batches",
    "train": "lab.training.train",
    "train_step": "lab.step.training_step",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "data":
        return import_module("lab.step.data")
    if name in __all__:
        return import_module(f"lab.{name}")
    raise AttributeError(f"module 'lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
