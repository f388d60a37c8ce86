"""The public names, each loaded when it is first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    from cluster.progress import notebook_shell
except ModuleNotFoundError as error:
    import cluster

    if hasattr(cluster, "__path__"):
        raise
    raise ImportError(f"{cluster.__file__} hides the lab's package `cluster`: rename that file") from error

if TYPE_CHECKING:
    from cluster.ranks import Cluster
    from lab import models, show
    from lab.errors import LabError
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


def load_on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: it imports the module of a name when the name is first used.

    Without it, ``lab --help`` and a saved answer would wait seconds for the import of torch.

    Args:
        package: The name of the package.
        modules: The module that defines each name; the name of a module itself stands for that module.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        return module if modules[name] == f"{package}.{name}" else getattr(module, name)

    return load


__getattr__ = load_on_first_use(
    __name__,
    {
        "Cluster": "cluster.ranks",
        "LabError": "lab.errors",
        "Recipe": "lab.recipe.recipe",
        "apply_recipe": "lab.step.compose",
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
        "models": "lab.models",
        "show": "lab.show",
    },
)


def __dir__() -> list[str]:
    return __all__


def _display_in_notebook(results: Mapping[str, str]) -> None:
    """Let the notebook that imports the lab display results as a table and a picture.

    A terminal shows their text. Nothing is imported before a result is displayed.

    Args:
        results: The module that defines each class of results.
    """
    shell = notebook_shell()
    if shell is None:
        return

    def display(result: object) -> None:
        import_module("lab.show.displays").display_result(result)

    for name, module in results.items():
        shell.display_formatter.ipython_display_formatter.for_type_by_name(module, name, display)


_display_in_notebook(
    {
        "Fits": "lab.planning.fit",
        "MaxContext": "lab.planning.max_context",
        "Plan": "lab.planning.plan",
        "Rehearsal": "lab.rehearsing.rehearsal",
        "Run": "lab.training.records",
        "Timeline": "lab.memory.timeline",
    }
)
