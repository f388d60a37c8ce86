"""The public names, each loaded when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.ranks import Cluster
    from lab import models, show
    from lab.errors import LabError
    from lab.planning.closed_form import estimate
    from lab.planning.fit import fit
    from lab.planning.max_context import max_context
    from lab.planning.plan import plan
    from lab.recipe.ladder import ladder
    from lab.recipe.recipe import Recipe
    from lab.rehearsing.rehearse import rehearse
    from lab.step.batches import shard_batch
    from lab.step.compose import apply_recipe
    from lab.step.training_step import loss, train_step
    from lab.training.profile import profile
    from lab.training.run import run
    from lab.training.train import train

__all__ = [
    "Cluster",
    "LabError",
    "Recipe",
    "apply_recipe",
    "estimate",
    "fit",
    "ladder",
    "loss",
    "max_context",
    "models",
    "plan",
    "profile",
    "rehearse",
    "run",
    "shard_batch",
    "show",
    "train",
    "train_step",
]

# `lab --help` must not wait seconds for torch: a name's module is imported when the name is first asked for.
_MODULES = {
    "Cluster": "cluster.ranks",
    "LabError": "lab.errors",
    "Recipe": "lab.recipe.recipe",
    "apply_recipe": "lab.step.compose",
    "estimate": "lab.planning.closed_form",
    "fit": "lab.planning.fit",
    "ladder": "lab.recipe.ladder",
    "loss": "lab.step.training_step",
    "max_context": "lab.planning.max_context",
    "plan": "lab.planning.plan",
    "profile": "lab.training.profile",
    "rehearse": "lab.rehearsing.rehearse",
    "run": "lab.training.run",
    "shard_batch": "lab.step.batches",
    "train": "lab.training.train",
    "train_step": "lab.step.training_step",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in __all__:
        return import_module(f"lab.{name}")
    raise AttributeError(f"module 'lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
