"""Will it fit? A trainer's own step, planned before it runs."""

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
from transformers import PreTrainedModel

from lab.decoder import shape_of
from lab.errors import DataError, RecipeError
from lab.hf.applying import combined_by_ddp, inner_model
from lab.models.lora import Lora
from lab.planning.fit import Fits
from lab.planning.fit import fit as fit_of
from lab.planning.plan import Plan
from lab.planning.plan import plan as plan_of
from lab.training.planning_process import answer_on_all_ranks
from lab.units import parse_tokens

if TYPE_CHECKING:
    from lab.hf.trainer import LongContext


def plan(
    trainer: LongContext, *, ranks: int | None = None, tokens: int | str | None = None, **machine: Any
) -> Plan:
    """Plan a step of a trainer: its own model with its adapters, its recipe, and its longest rows.

    What is frozen has no gradient and no state of an optimizer in the plan. Nothing is trained.

    Args:
        trainer: The trainer, before or after it has trained.
        ranks: P; by default the ranks that the trainer runs on. A named recipe is made for this number.
        tokens: The tokens of a row; by default those of the longest row of ``train_dataset``.
        machine: What ``lab.plan`` takes, such as ``device_memory="80GiB"``. The workspace of CUDA is counted
            where the trainer runs on a GPU, or for other ranks than its own.

    Raises:
        LabError: As ``lab.plan``; a dataset whose rows have no known length; replicas that DDP keeps equal,
            whose buckets no plan knows; a model that was given with a recipe.
    """
    step = _step(trainer, ranks, tokens)
    if combined_by_ddp(step["recipe"], step["ranks"]):
        raise RecipeError(
            "a plan of replicas in fp32, which DDP keeps equal: its buckets of gradients are not known; use "
            "fsdp=True in the recipe, or bf16=True"
        )
    own = ranks in (None, trainer.args.world_size) and trainer.args.device.type == "cpu"
    return _outside_of_ranks(plan_of, **{"workspace": not own, **step, **machine})


def fit(
    trainer: LongContext, *, ranks: int | None = None, tokens: int | str | None = None, **machine: Any
) -> Fits:
    """Find the recipes with which a step of a trainer fits, the fastest first; see ``lab.fit``.

    Args:
        trainer: As ``plan``.
        ranks: As ``plan``.
        tokens: As ``plan``.
        machine: What ``lab.fit`` takes: ``device_memory``, and perhaps ``host_memory``.

    Raises:
        LabError: As ``lab.fit``; a dataset whose rows have no known length.
        RecipeError: What the closed form, by which recipes are chosen, does not know: a recipe that computes
            in another dtype than bf16, weights of another than fp32, and frozen parameters other than those
            beside LoRA adapters.
    """
    step = _step(trainer, ranks, tokens)
    recipe, skeleton = step.pop("recipe"), step["model"]()
    if recipe.compute_dtype != "bfloat16" or skeleton.dtype != torch.float32:
        raise RecipeError(
            f"fit of a trainer with weights in {skeleton.dtype} that computes in {recipe.compute_dtype}: it "
            "knows fp32 weights and bf16=True; ask lab.hf.plan(trainer) for one recipe"
        )
    if not all(parameter.requires_grad for parameter in skeleton.parameters()):
        # The closed form knows the adapters by their name.
        step |= {"model": skeleton.config, "lora": _lora_of(trainer)}
    return _outside_of_ranks(fit_of, **step, **machine)


def _lora_of(trainer: LongContext) -> Lora:
    """Return the adapters of a trainer's model.

    Raises:
        RecipeError: There are none, several, or others than those that ``lab plan --lora`` makes.
    """
    configs = list(getattr(trainer.model, "peft_config", {}).values())
    inner = inner_model(trainer.model)
    if len(configs) == 1 and isinstance(configs[0], LoraConfig):
        [config] = configs
        adapted = {name.split(".")[-3] for name, _ in inner.named_parameters() if ".lora_A." in name}
        trained = {name for name, parameter in inner.named_parameters() if parameter.requires_grad}
        if all(".lora_" in name for name in trained) and not config.rank_pattern and not config.use_rslora:
            lora = Lora(config.r, float(config.lora_alpha), tuple(sorted(adapted)))
            lora.check_estimate(shape_of(inner.config))
            return lora
    raise RecipeError(
        "fit of a trainer with frozen parameters: it knows plain LoRA adapters of one rank; ask "
        "lab.hf.plan(trainer) for one recipe"
    )


T = TypeVar("T")


def _outside_of_ranks(function: Callable[..., T], **arguments: Any) -> T:
    """Call a function that plans; in a process of its own where this process is a rank, for all ranks."""
    if not dist.is_initialized():
        return function(**arguments)
    answer = answer_on_all_ranks("what the trainer needs", _pickled, function, arguments)
    result: T = cloudpickle.loads(b64decode(answer))
    return result


def _pickled(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Return what a function returns as a text, which travels between processes as JSON."""
    return b64encode(cloudpickle.dumps(function(**arguments))).decode()


def outline(model: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """Return a function that makes copies of a model without the values of its parameters.

    A copy has the modules, the adapters, the dtypes, and the frozen parameters of the model.
    """

    def without_values(source: nn.Module, device: str) -> PreTrainedModel:
        # deepcopy takes what its memo has for an object, so no value is copied.
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
    """Return the tokens of the longest row of a dataset with ``input_ids``.

    Raises:
        DataError: The rows have no ``input_ids``, or no end.
    """
    try:
        # A dataset that is read as a stream has no length, and may have no end.
        len(dataset)
        columns = getattr(dataset, "column_names", None)
        rows = dataset["input_ids"] if columns else [row["input_ids"] for row in dataset]
        return max(len(row) for row in rows)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(
            "a train_dataset whose rows have no input_ids, or no end: give tokens, those of the longest row"
        ) from error


def _step(trainer: LongContext, ranks: int | None, tokens: int | str | None) -> dict[str, Any]:
    """The arguments of ``lab.plan`` that are the trainer's."""
    model = trainer.outline
    if model is None:
        raise RecipeError(
            "a plan of a model that was given with a recipe, whose parameters are sharded already: call "
            "lab.plan with the model's config and the recipe"
        )
    ranks = ranks or trainer.args.world_size
    recipe = trainer.recipe_for(ranks)
    return {
        "model": model,
        "recipe": recipe,
        "tokens": longest_row(trainer.train_dataset) if tokens is None else parse_tokens(tokens),
        "ranks": ranks,
        "rows": trainer.args.per_device_train_batch_size * (ranks // (recipe.ulysses * recipe.ring)),
        "accumulate": trainer.args.gradient_accumulation_steps,
    }
