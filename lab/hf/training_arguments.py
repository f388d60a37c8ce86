"""Training arguments with a recipe, and checks of the settings that do not go with one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from cluster.torchrun import rendezvous
from lab.errors import RecipeError
from lab.hf.accelerate_settings import PRECISION, launched_precision, refusal
from lab.hf.choice import RecipeChoice
from lab.recipe.recipe import Recipe, check_fields
from lab.units import abbreviate

A = TypeVar("A", bound=TrainingArguments)

CHOICE = "long_context"
"""The attribute of training arguments in which ``arguments`` keeps the ``RecipeChoice``."""


def arguments(
    given: type[A] | A,
    *,
    recipe: str | Recipe,
    tokens: int | str | None = None,
    knobs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> A:
    """Return training arguments with a recipe, for a trainer with ``LongContext``.

    Args:
        given: ``TrainingArguments``, ``SFTConfig``, or a subclass; or an object of one, such as a script has
            parsed. Of an object a copy is returned, in which the settings of ``_REPLACED`` are what a recipe
            needs. One line of accelerate's log says which of them have changed.
        recipe: A recipe, or the name of one, which is made for the trainer's model and ranks.
        tokens: The number of tokens in the longest row, from which the tiles of a named recipe derive. By
            default ``max_length``, if the arguments have this field.
        knobs: Fields of the recipe that are set by hand.
        settings: Fields of the class. ``bf16``, in the settings, in an object, or as ``mixed_precision`` of
            ``accelerate launch``, sets the recipe's ``compute_dtype``: parameters are cast for forward and
            backward, and autocast stays off. Without ``bf16``, a named recipe computes in the parameters' own
            dtype under ``TrainingArguments``, and in bf16 under ``SFTConfig``, as their defaults say; the
            dtype of the ladder is not used. Three defaults differ from those of the class: gradient
            checkpointing is off, because it is part of a recipe; evaluation returns losses alone; and a loss
            that is not finite is logged as it is.

    Raises:
        RecipeError: A setting that ``check_arguments`` refuses; ``bf16`` with another ``compute_dtype`` in
            the recipe; no number of tokens for a named recipe; ``given`` is neither a class of arguments nor
            an object of one, or ``knobs`` are not fields of a recipe with their values; settings with an
            object.
        ClusterError: A launcher has left variables that name a host which is not there.
    """
    is_class = isinstance(given, type)
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, TrainingArguments):
        text = kind.__name__ if is_class else f"an object of type {kind.__name__}"
        raise RecipeError(
            f"arguments of {text}: give the class TrainingArguments, or SFTConfig for SFTTrainer, and the "
            "settings by name, or an object of such a class"
        )
    if not (knobs is None or isinstance(knobs, Mapping)):
        raise RecipeError(
            f"knobs={abbreviate(repr(knobs))}: give fields of a recipe with their values, such as "
            "{'head_chunk': 16}"
        )
    check_fields(knobs or ())
    if settings and not is_class:
        raise RecipeError(
            f"{', '.join(settings)} together with arguments that are made: set them in the arguments, or "
            "give the class"
        )
    chosen = dict(knobs or {})
    # An object does not say whether bf16=False was set or is the default. One with a recipe has bf16=False.
    earlier: RecipeChoice | None = getattr(given, CHOICE, None)
    bf16 = settings.pop("bf16", None) if is_class else given.bf16 or None
    # The settings are checked before an object is made, because making it with some of them changes
    # environment variables.
    _check_settings(settings)
    launched = launched_precision() == "bf16"
    if launched and bf16 is False:
        raise refusal("bf16=False with mixed_precision='bf16': leave one of them out", PRECISION)
    bf16 = True if launched else bf16
    if bf16 is None and not isinstance(recipe, Recipe) and "compute_dtype" not in chosen:
        # The default of TRL's class, None, stands for bf16.
        bf16 = _computes_in_bf16(earlier) or (is_class and given.bf16 is not False)
    if bf16 is not None:
        _set_dtype(recipe, chosen, "bfloat16" if bf16 else None, launched)
    if isinstance(given, type):
        defaults = dict.fromkeys(("activation_checkpointing", "logging_nan_inf_filter"), False)
        with rendezvous():  # the object joins the process group
            made: A = given(**{"prediction_loss_only": True, **defaults, **settings, "bf16": False})
        made.mixed_precision = "no"
    else:
        made = _replaced(given, launched)
    tokens = getattr(made, "max_length", None) if tokens is None else tokens
    setattr(made, CHOICE, RecipeChoice.of(recipe, tokens, chosen))
    check_arguments(made)
    return made


_REPLACED: dict[str, tuple[object, str]] = {
    "gradient_checkpointing": (False, "recipes with checkpoint=True recompute layers"),
    "activation_checkpointing": (False, "it is the new name of gradient_checkpointing"),
    "bf16": (False, "the recipe has compute_dtype='bfloat16'"),
    "mixed_precision": ("no", "autocast stays off"),
    "prediction_loss_only": (True, "logits of a whole sequence never exist"),
}
"""For each setting of an object that a recipe does in its own way: the value that it gets, and the reason."""


def _computes_in_bf16(choice: RecipeChoice | None) -> bool:
    own = choice.recipe.compute_dtype if choice and isinstance(choice.recipe, Recipe) else None
    return choice is not None and choice.knobs.get("compute_dtype", own) == "bfloat16"


def _replaced(given: A, launched: bool) -> A:
    """Return a copy of arguments with the values of ``_REPLACED``, and log those that have changed.

    Args:
        given: The arguments.
        launched: Whether ``accelerate launch`` asks for bf16.
    """
    made = copy(given)
    for name, value in vars(given).items():
        # A trainer changes its accelerator_config.
        if isinstance(value, dict | list | AcceleratorConfig):
            setattr(made, name, deepcopy(value))
    changed = []
    if launched and not given.bf16 and not _computes_in_bf16(getattr(given, CHOICE, None)):
        changed.append(
            f"bf16=False, and the recipe has compute_dtype='bfloat16' ({PRECISION}=bf16 is in the "
            "environment)"
        )
    for name, (value, reason) in _REPLACED.items():
        before = getattr(made, name, value)
        if before != value:
            setattr(made, name, value)
            changed.append(f"{name}={before!r} is now {value!r} ({reason})")
    if changed:
        get_logger(__name__).warning("lab.hf.arguments: %s", "; ".join(changed))
    return made


_CHECKPOINTING: tuple[tuple[object, ...], str] = (
    (False, None),
    "a layer would be recomputed twice; leave it out, and use a recipe with checkpoint=True",
)

_KWARGS: tuple[tuple[object, ...], str] = (
    (None, {}, {"use_reentrant": False}),
    "a recipe recomputes layers in its own way; leave it out, and use one with offload='inputs' to offload",
)

_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "gradient_checkpointing": _CHECKPOINTING,
    "activation_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing_kwargs": _KWARGS,
    "activation_checkpointing_kwargs": _KWARGS,
    "fp16": ((False,), "gradients would need a loss scale, which no recipe has; use bf16=True"),
    "bf16": (
        (False,),
        "autocast would run around the techniques; make the arguments by lab.hf.arguments, whose bf16 sets "
        "the recipe's compute_dtype",
    ),
    "optim": (
        ("adamw_torch", "adamw_torch_fused"),
        "plans and checkpoints know AdamW; use 'adamw_torch'",
    ),
    "label_smoothing_factor": ((0.0, 0), "a recipe's loss is the cross-entropy; set it to 0"),
    "neftune_noise_alpha": ((None,), "noise on embeddings is not supported; leave it out"),
    "deepspeed": (
        (None, "", {}),
        "DeepSpeed's engine and a recipe would both shard the model; leave it out, and use fsdp=True in the "
        "recipe",
    ),
    "loss_type": (("nll",), "a recipe's loss is the cross-entropy; use 'nll'"),
    "activation_offloading": ((False,), "a recipe has its own; use one with offload='inputs'"),
    "use_liger_kernel": (
        (False,),
        "it replaces modules that the techniques call; use loss_kernel='liger' in the recipe",
    ),
    "torch_compile": ((False,), "the techniques run uncompiled; use compile='tiles' in the recipe"),
    "average_tokens_across_devices": (
        (True,),
        "the loss of a part of a sequence is a share of all labels; set it to True",
    ),
    "torch_empty_cache_steps": ((None,), "a step of a recipe does not empty the cache; leave it out"),
    "auto_find_batch_size": ((False,), "a recipe is applied once; ask lab.hf.fit(trainer, ...) instead"),
    "prediction_loss_only": ((True,), "logits of a whole sequence never exist; set it to True"),
    "fp16_full_eval": ((False,), "the model is evaluated as it is trained; set it to False"),
    "bf16_full_eval": ((False,), "the model is evaluated as it is trained; set it to False"),
    "batch_eval_metrics": ((False,), "evaluation returns losses alone; set it to False"),
}
"""For each setting, the only values that are right with a recipe, and the end of the message on any other."""


def check_arguments(args: TrainingArguments) -> RecipeChoice:
    """Return the recipe of training arguments, or refuse settings with which a trainer would compute wrongly.

    Raises:
        RecipeError: Arguments without a recipe; the first setting of ``_ONLY`` with another value; batches
            that the first process distributes, or that not all ranks have.
    """
    choice: RecipeChoice | None = getattr(args, CHOICE, None)
    if choice is None:
        raise RecipeError(
            "training arguments without a recipe: make them by lab.hf.arguments(TrainingArguments, "
            "recipe='upipe', ...), with SFTConfig for SFTTrainer, or from your own by "
            "lab.hf.arguments(args, recipe='upipe')"
        )
    _check_settings(vars(args))
    config: Any = args.accelerator_config
    if config.dispatch_batches or config.split_batches:
        raise RecipeError(
            "dispatch_batches or split_batches with a recipe: ranks that share a sequence must read the "
            "same batch themselves; leave both out"
        )
    if config.even_batches is False:
        raise RecipeError(
            "even_batches=False with a recipe: a rank without a batch would miss the exchanges of the "
            "others; leave it out, because rows that fill the last batch do not count"
        )
    return choice


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse an optimizer that is not right with a recipe.

    Raises:
        RecipeError: It is not AdamW, or it is AdamW with amsgrad; it has parameters that the model has no
            longer.
    """
    # From the second training on, accelerate's optimizer wraps the optimizer.
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.AdamW):
        raise RecipeError(
            f"the optimizer {type(inner).__name__} with a recipe: plans and checkpoints know AdamW; "
            "leave it out, or give torch.optim.AdamW"
        )
    if any(group["amsgrad"] for group in inner.param_groups):
        raise RecipeError(
            "AdamW with amsgrad=True, together with a recipe: plans and checkpoints know two moments of a "
            "parameter, and not a third; set amsgrad=False"
        )
    given = {parameter for group in inner.param_groups for parameter in group["params"]}
    if not given <= set(model.parameters()):
        raise RecipeError(
            "an optimizer that was made before the recipe, which has replaced the parameters by their "
            "shards: leave it out, and set learning_rate, weight_decay and adam_beta1 in the arguments"
        )


def check_trained(model: nn.Module) -> None:
    """Refuse a model of which nothing is trained, or adapters that would be trained without being used.

    Raises:
        RecipeError: Every parameter is frozen, as those of disabled adapters are; or adapters are merged, and
            not frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(
            "every parameter of this model is frozen: set requires_grad on those to train, or enable the "
            "adapters"
        )
    for name, module in model.named_modules():
        if getattr(module, "merged", False) and any(
            ".lora_" in f".{of}" and parameter.requires_grad for of, parameter in module.named_parameters()
        ):
            raise RecipeError(
                f"adapters of {name} that are merged, and would be trained: call unmerge_adapter() before, "
                "or freeze them"
            )


def _check_settings(settings: Mapping[str, object]) -> None:
    """Refuse the first setting of ``_ONLY`` that has another value."""
    for name, (works, reason) in _ONLY.items():
        value = settings.get(name, works[0])
        if value not in works:
            # Some settings are members of an enumeration of texts.
            raise RecipeError(f"{name}={getattr(value, 'value', value)!r} with a recipe: {reason}")


def _set_dtype(recipe: str | Recipe, knobs: dict[str, Any], dtype: str | None, launched: bool) -> None:
    """Set the knob ``compute_dtype`` to the dtype that ``bf16`` asks for.

    Args:
        recipe: The recipe.
        knobs: Its knobs.
        dtype: The dtype.
        launched: Whether ``accelerate launch`` asks for it.

    Raises:
        RecipeError: The recipe or the knob has another compute dtype.
    """
    given = knobs.get("compute_dtype", recipe.compute_dtype if isinstance(recipe, Recipe) else dtype)
    if given != dtype:
        said, other = f"bf16={dtype is not None}", f"bf16={given == 'bfloat16'}"
        if launched:
            said, other = "mixed_precision='bf16'", "mixed_precision='no'"
        message = (
            f"{said} with compute_dtype={given!r} in the recipe: they say different dtypes; set "
            f"compute_dtype={dtype!r} in the recipe, or {other}"
        )
        raise refusal(message, PRECISION) if launched else RecipeError(message)
    knobs["compute_dtype"] = dtype
