"""Recipes in the trainers that people use: Trainer, TRL's SFTTrainer, and Accelerate alone.

The packages that this folder imports are an extra: ``pip install -e '.[hf]'``.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lab import load_on_first_use

if TYPE_CHECKING:
    from lab.hf.applying import apply
    from lab.hf.batches import shard_rows
    from lab.hf.planning import fit, plan
    from lab.hf.ranks import on_ranks
    from lab.hf.shared_sequences import parallelism
    from lab.hf.timeline import MemoryTimeline
    from lab.hf.token_rows import TokenRows
    from lab.hf.trainer import LongContext
    from lab.hf.training_arguments import arguments

__all__ = [
    "LongContext",
    "MemoryTimeline",
    "TokenRows",
    "apply",
    "arguments",
    "fit",
    "on_ranks",
    "parallelism",
    "plan",
    "shard_rows",
]

PACKAGES = ("accelerate", "datasets", "peft", "trl")
"""The packages of the extra."""

_load = load_on_first_use(
    __name__,
    {
        "LongContext": "lab.hf.trainer",
        "MemoryTimeline": "lab.hf.timeline",
        "TokenRows": "lab.hf.token_rows",
        "arguments": "lab.hf.training_arguments",
        "fit": "lab.hf.planning",
        "on_ranks": "lab.hf.ranks",
        "shard_rows": "lab.hf.batches",
        "parallelism": "lab.hf.shared_sequences",
        "plan": "lab.hf.planning",
        "apply": "lab.hf.applying",
    },
)


def __getattr__(name: str) -> Any:
    """Import the module of a name when the name is first used.

    Raises:
        ModuleNotFoundError: A package of the extra is not installed.
    """
    try:
        return _load(name)
    except ImportError as error:
        # transformers' own error does not say which package it lacks.
        missing = [package for package in PACKAGES if find_spec(package) is None]
        if not missing:
            raise
        raise ModuleNotFoundError(
            f"lab.hf.{name} without {', '.join(missing)}: install the extra, pip install -e '.[hf]'"
        ) from error


def __dir__() -> list[str]:
    return __all__
