"""Plans of a trainer's own step, before it runs: what it needs, and which recipes fit."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, TypeVar

import cloudpickle
import torch.distributed as dist

from lab.errors import DataError, RecipeError
from lab.hf.applying import combined_by_ddp
from lab.hf.batches import flattens
from lab.hf.trainer import LongContext
from lab.planning.fit import Fits
from lab.planning.fit import fit as fit_of
from lab.planning.plan import Plan
from lab.planning.plan import plan as plan_of
from lab.recipe.jobs import parse_lengths
from lab.training.planning_process import answer_on_all_ranks
from lab.units import parse_tokens


def plan(
    trainer: LongContext, *, ranks: int | None = None, tokens: int | str | None = None, **machine: Any
) -> Plan:
    """Plan a step of a trainer: its own model with its adapters, its recipe, and its longest rows.

    A frozen parameter has no gradient and no optimizer state in the plan. Nothing is trained.

    Args:
        trainer: The trainer, before or after it has trained.
        ranks: The number of ranks; by default that of the trainer. A named recipe is made for this number.
        tokens: The number of tokens in a row; by default that of the longest row of ``train_dataset``.
        machine: Further arguments of ``lab.plan``, such as ``device_memory="80GiB"``. By default
            ``workspace`` is False for a trainer on CPUs with its own number of ranks, and True otherwise.
            A trainer whose collator makes one row of a batch, as TRL's with ``packing`` does, needs
            ``documents``, the lengths of the documents of a batch; ``tokens`` is their sum.

    Raises:
        LabError: See ``lab.plan``; a dataset whose rows have no known length; replicas that DDP keeps equal,
            because a plan does not know DDP's buckets; a model to which a recipe was applied by hand.
    """
    step = _plan_arguments(trainer, ranks, tokens)
    if combined_by_ddp(step["recipe"], step["ranks"]):
        raise RecipeError(
            "a plan of replicas in fp32, which DDP keeps equal: a plan does not know DDP's buckets; use "
            "fsdp=True in the recipe, or bf16=True"
        )
    if flattens(trainer.data_collator):
        if machine.get("documents") is None:
            raise RecipeError(
                "a plan of a trainer whose collator makes one row of a batch: give documents, the lengths of "
                "the documents of a batch, such as [4096, 1024]"
            )
        step["tokens"] = sum(parse_lengths(machine["documents"]))
        step["rows"] //= trainer.args.per_device_train_batch_size
    own = ranks in (None, trainer.args.world_size) and trainer.args.device.type == "cpu"
    return _call_outside_of_ranks(plan_of, **{"workspace": not own, **step, **machine})


def fit(
    trainer: LongContext, *, ranks: int | None = None, tokens: int | str | None = None, **machine: Any
) -> Fits:
    """Find the recipes with which a step of a trainer fits, the fastest first; see ``lab.fit``.

    All recipes are planned with the same number of rows in a batch: that of the trainer with its own recipe,
    ``per_device_train_batch_size`` for each group of ranks that share a sequence.

    Args:
        trainer: As in ``plan``.
        ranks: As in ``plan``.
        tokens: As in ``plan``.
        machine: Further arguments of ``lab.fit``: ``device_memory``, and perhaps ``host_memory``.

    Raises:
        LabError: See ``lab.fit``; a dataset whose rows have no known length.
        RecipeError: The trainer has several documents in a row.
    """
    if flattens(trainer.data_collator):
        raise RecipeError(
            "lab.hf.fit plans one document per row, and this collator packs several; use "
            "lab.hf.plan(trainer, documents=...)"
        )
    step = _plan_arguments(trainer, ranks, tokens)
    return _call_outside_of_ranks(fit_of, compute_dtype=step.pop("recipe").compute_dtype, **step, **machine)


T = TypeVar("T")


def _call_outside_of_ranks(function: Callable[..., T], **arguments: Any) -> T:
    """Call a function that plans, in a process that is not a rank.

    This process calls it if there is no process group. Otherwise a new process calls it once, and every rank
    gets the result.
    """
    if not dist.is_initialized():
        return function(**arguments)
    answer = answer_on_all_ranks("what the trainer needs", _pickled, function, arguments)
    result: T = cloudpickle.loads(b64decode(answer))
    return result


def _pickled(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Call a function, and return its result as a text, because processes exchange JSON."""
    return b64encode(cloudpickle.dumps(function(**arguments))).decode()


def longest_row(dataset: Any) -> int:
    """Return the number of tokens in the longest row of a dataset with ``input_ids``.

    Raises:
        DataError: The rows have no ``input_ids``, or the dataset has no length.
    """
    try:
        # A dataset that is read as a stream has no length, and may never end.
        len(dataset)
        columns = getattr(dataset, "column_names", None)
        rows = dataset["input_ids"] if columns else [row["input_ids"] for row in dataset]
        return max(len(row) for row in rows)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(
            "a train_dataset without a length, or whose rows have no input_ids: give tokens, the number of "
            "tokens in the longest row"
        ) from error


def _plan_arguments(trainer: LongContext, ranks: int | None, tokens: int | str | None) -> dict[str, Any]:
    """Return the arguments of ``lab.plan`` that follow from a trainer.

    Raises:
        RecipeError: The trainer's model was sharded before the trainer was made.
        DataError: See ``longest_row``.
    """
    model = trainer.make_empty_copy
    if model is None:
        raise RecipeError(
            "a plan of a model that was given with a recipe: its parameters are sharded already; call "
            "lab.plan with the model's config and the recipe"
        )
    ranks = trainer.args.world_size if ranks is None else ranks
    recipe = trainer.recipe_for(ranks)
    return {
        "model": model,
        "recipe": recipe,
        "tokens": longest_row(trainer.train_dataset) if tokens is None else parse_tokens(tokens),
        "ranks": ranks,
        "rows": trainer.args.per_device_train_batch_size * (ranks // (recipe.ulysses * recipe.ring)),
        "accumulate": trainer.args.gradient_accumulation_steps,
    }
