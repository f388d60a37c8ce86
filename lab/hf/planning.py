"""Plans of a trainer's own step, before it runs: what it needs, and which recipes fit."""

from __future__ import annotations

import copy
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from transformers import DataCollatorWithFlattening, PreTrainedModel

from lab.decoder import shape_of
from lab.errors import DataError, RecipeError
from lab.hf.applying import combined_by_ddp, inner_model
from lab.models.lora import Lora
from lab.planning.fit import Fits
from lab.planning.fit import fit as fit_of
from lab.planning.plan import Plan
from lab.planning.plan import plan as plan_of
from lab.recipe.jobs import parse_lengths
from lab.training.planning_process import answer_on_all_ranks
from lab.units import parse_tokens

if TYPE_CHECKING:
    from lab.hf.trainer import LongContext


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
    if flattens(trainer):
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
        RecipeError: The trainer has what the closed form, by which recipes are chosen, does not know:
            several documents in a row, a compute dtype that is not bf16, weights that are not in fp32, or
            frozen parameters without plain LoRA adapters, the same in all layers.
    """
    if flattens(trainer):
        raise RecipeError(
            "fit of a trainer whose collator makes one row of a batch: it knows one document per row; ask "
            "lab.hf.plan(trainer, documents=...) for one recipe"
        )
    step = _plan_arguments(trainer, ranks, tokens)
    recipe, skeleton = step.pop("recipe"), step["model"]()
    if recipe.compute_dtype != "bfloat16" or skeleton.dtype != torch.float32:
        raise RecipeError(
            f"fit of a trainer with weights in {skeleton.dtype} that computes in {recipe.compute_dtype}: it "
            "knows fp32 weights and bf16=True; ask lab.hf.plan(trainer) for one recipe"
        )
    if not all(parameter.requires_grad for parameter in skeleton.parameters()):
        # The closed form takes a model without adapters, and their settings as ``lora``.
        step |= {"model": skeleton.config, "lora": _lora_of(trainer)}
    return _call_outside_of_ranks(fit_of, **step, **machine)


def flattens(trainer: LongContext) -> bool:
    """Return whether the collator of a trainer makes one row of the documents of a batch."""
    collator = trainer.data_collator
    flattens = isinstance(collator, DataCollatorWithFlattening)
    return flattens or bool(getattr(collator, "padding_free", False))


def _lora_of(trainer: LongContext) -> Lora:
    """Return the settings of the adapters in a trainer's model.

    Raises:
        RecipeError: There are no adapters, several, or adapters that ``lab plan --lora`` does not make.
    """
    configs = list(getattr(trainer.model, "peft_config", {}).values())
    inner = inner_model(trainer.model)
    if len(configs) == 1 and isinstance(configs[0], LoraConfig):
        [config], shape = configs, shape_of(inner.config)
        trained = {name: tuple(p.shape) for name, p in inner.named_parameters() if p.requires_grad}
        targets = {name.split(".")[-4] for name in trained if ".lora_A." in name}
        if targets <= shape.projections.keys() and not config.use_rslora:
            sizes = [shape.projections[name] for name in targets] * shape.L
            pairs = [((config.r, inputs), (outputs, config.r)) for inputs, outputs in sizes]
            if sorted(trained.values()) == sorted(matrix for pair in pairs for matrix in pair):
                return Lora(config.r, float(config.lora_alpha), tuple(sorted(targets)))
    raise RecipeError(
        "fit of a trainer with frozen parameters: it knows plain LoRA adapters of one rank, the same in all "
        "layers; ask lab.hf.plan(trainer) for one recipe"
    )


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


def empty_copies_of(model: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """Return a function that makes copies of a model without the values of its parameters and buffers.

    A copy has the model's modules and adapters, and its parameters have the same shapes and dtypes and are
    frozen where the model's are.
    """

    def without_values(source: nn.Module, device: str) -> PreTrainedModel:
        # deepcopy takes an object's copy from its memo where there is one, so it copies no value.
        memo: dict[int, Any] = {}
        for tensor in (*source.parameters(), *source.buffers()):
            empty = torch.empty_like(tensor, device=device, requires_grad=False)
            trained = tensor.requires_grad
            memo[id(tensor)] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
        copied: PreTrainedModel = copy.deepcopy(source, memo)  # type: ignore[assignment]
        return copied

    skeleton = without_values(model, "meta")
    return lambda: without_values(skeleton, "cpu")


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
