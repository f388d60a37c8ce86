"""The public names, each loaded when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.ranks import Cluster
    from lab import data, models, show, units
    from lab.batches import Batch, shard_batch
    from lab.compose import apply_recipe
    from lab.errors import LabError, RecipeError
    from lab.memory.measured import measure
    from lab.memory.timeline import Timeline
    from lab.recipe import Recipe
    from lab.rungs import ladder
    from lab.step import loss, train_step
    from lab.verbs.fit import fit
    from lab.verbs.max_context import MaxContext, max_context
    from lab.verbs.messages import Run
    from lab.verbs.plan import Plan, plan, plan_ladder
    from lab.verbs.profile import Profiled, profile
    from lab.verbs.rehearsal import Rehearsal
    from lab.verbs.rehearse import rehearse
    from lab.verbs.run import run
    from lab.verbs.train import Trained, train

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
    "Batch": "lab.batches",
    "Cluster": "cluster.ranks",
    "LabError": "lab.errors",
    "MaxContext": "lab.verbs.max_context",
    "Plan": "lab.verbs.plan",
    "Profiled": "lab.verbs.profile",
    "Recipe": "lab.recipe",
    "RecipeError": "lab.errors",
    "Rehearsal": "lab.verbs.rehearsal",
    "Run": "lab.verbs.messages",
    "Timeline": "lab.memory.timeline",
    "Trained": "lab.verbs.train",
    "apply_recipe": "lab.compose",
    "fit": "lab.verbs.fit",
    "ladder": "lab.rungs",
    "loss": "lab.step",
    "max_context": "lab.verbs.max_context",
    "measure": "lab.memory.measured",
    "plan": "lab.verbs.plan",
    "plan_ladder": "lab.verbs.plan",
    "profile": "lab.verbs.profile",
    "rehearse": "lab.verbs.rehearse",
    "run": "lab.verbs.run",
    "shard_batch": "lab.batches",
    "train": "lab.verbs.train",
    "train_step": "lab.step",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in __all__:
        return import_module(f"lab.{name}")
    raise AttributeError(f"module 'lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
