"""The modules of a model from outside: those that the techniques compute right, and the refusal of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from transformers import CONFIG_MAPPING, PreTrainedModel

from lab.decoder.config import shape_of
from lab.decoder.patch import Patch
from lab.errors import ModelError, RecipeError
from lab.torch_private import has_gradient_hooks, module_hooks


def check_materialized(model: nn.Module) -> None:
    """Refuse a model with a parameter on the meta device.

    Allocating it later makes a new parameter, without the hooks of this one.

    Raises:
        ModelError: There is such a parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name} has no memory (device meta): load the model's weights first")


def check_untouched(model: nn.Module) -> None:
    """Refuse a transformers model that is not as transformers makes it.

    Raises:
        RecipeError: The parameters are sharded, quantized, or have gradients or gradient hooks; a technique
            was applied; the loss function is another; or transformers' gradient checkpointing is on.
    """
    if not isinstance(model, PreTrainedModel):
        return
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise RecipeError(
            "the parameters of this model are sharded already: build the model again, and let the recipe "
            "shard them by fsdp=True"
        )
    for name, module in model.named_modules():
        patched = isinstance(vars(module).get("forward"), Patch)
        if patched or hasattr(module, "lab_kernel") or hasattr(module, "lab_attention"):
            raise RecipeError(
                "a recipe or a technique was applied to this model already, and a second would add to it: "
                "build the model again, then apply the recipe"
            )
        for weight in module.parameters(recurse=False):
            if not weight.is_floating_point():
                raise RecipeError(
                    f"{name} has a weight of {weight.dtype}: quantized weights are not supported; load the "
                    "model without quantization"
                )
        if any(parameter.grad is not None for parameter in module.parameters(recurse=False)):
            raise RecipeError(
                f"{name} has gradients already, which sharding would drop: call model.zero_grad() first"
            )
        if any(map(has_gradient_hooks, module.parameters(recurse=False))):
            raise RecipeError(
                f"{name} has a gradient hook on a parameter, which would see one rank's part of the "
                "gradient, or never run: remove it, and change gradients after backward"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise RecipeError(
                f"transformers' gradient checkpointing is on in {name}: a recipe has its own, "
                "checkpoint=True; call model.gradient_checkpointing_disable() first"
            )
    if "_loss_function" in vars(model):
        raise RecipeError(
            "this model has a loss_function of its own, which a recipe would replace by the cross-entropy: "
            "build the model again, and leave it out"
        )


_PLAIN = (
    nn.Dropout, nn.Embedding, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleDict, nn.ModuleList,
    nn.ParameterDict,
)  # fmt: skip
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""The files whose classes are activations."""
_ADAPTERS = {
    "peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding",
    "peft.utils.other.ModulesToSaveWrapper",
}  # fmt: skip
"""Modules of PEFT that replace a family's module and compute with plain operators. They are known by name,
because PEFT need not be installed."""
_EXPERTS_ADAPTER = "peft.tuners.lora.layer.ParamWrapper"
"""The module of PEFT that adds LoRA to parameters that are in no linear map."""


def has_cache(keywords: Mapping[str, object]) -> bool:
    """Return whether a layer's keywords have a key/value cache; transformers 5.24 gave it another name."""
    return any(keywords.get(name) is not None for name in ("cache", "past_key_values"))


def facts_of(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that are numbers, flags or texts. The module computes with them."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in ("training", "name_or_path")
        and name[0] != "_"
        and isinstance(value, bool | int | float | str | None)
    }


def check_modules(model: PreTrainedModel) -> None:
    """Refuse modules that the techniques are not tested with.

    Raises:
        ModelError: A module's class is not one of the family, of torch or of LoRA; other code than the lab
            replaced a ``forward``; there is dropout, or a variant of LoRA; a module or parameter has two
            places and is not a tied embedding; a weight changes each time that it is used; or the gradients
            of an embedding are sparse or depend on how often a token is in the batch.
    """
    shape = shape_of(model.config)
    for name, module in model.named_modules():
        if ".parametrizations" in name or isinstance(module, nn.Linear):
            for buffer, _ in module.named_buffers(recurse=False):
                raise ModelError(
                    f"{name} has a buffer {buffer}, which changes each time that the module runs, as in "
                    "spectral norms: a recomputed layer or a tile would change it again; remove the "
                    "parametrization"
                )
        if ".parametrizations" in name:
            continue
        kind = class_of(module)
        if f"{kind.__module__}.{kind.__name__}" == _EXPERTS_ADAPTER:
            raise ModelError(
                f"{name} is an adapter of experts (PEFT's {kind.__name__}), which the lab does not train: "
                f"add adapters to the attention alone, by target_modules={list(shape.attention_projections)}"
            )
        if not _belongs(kind, model.config.model_type):
            raise ModelError(
                f"{name} is a {kind.__module__}.{kind.__name__}: the lab is tested with the modules of "
                "transformers and the LoRA layers of PEFT alone; replace it by the model's own module"
            )
        forward = vars(module).get("forward")
        if forward is not None and not isinstance(forward, Patch):
            raise ModelError(
                f"the forward of {name or 'the model'} has been replaced (by accelerate's hooks, a kernel "
                "library or by hand), and the lab's techniques would not run it: give the model as "
                "transformers makes it"
            )
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                f"{name} has p={module.p}: dropout is not supported, because a layer that is recomputed in "
                "backward would draw another mask; set p to 0 (lora_dropout=0 for an adapter)"
            )
        if isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.sparse):
            raise ModelError(
                f"{name} has scale_grad_by_freq={module.scale_grad_by_freq}, sparse={module.sparse}: a rank "
                "would count its own tokens alone, and sparse gradients are not supported; set both to False"
            )
        for attribute, value in facts_of(module).items():
            if "dropout" in attribute and isinstance(value, float) and value > 0:
                raise ModelError(
                    f"{name} has {attribute}={value}: dropout is not supported, because a layer that is "
                    "recomputed in backward would draw another mask; set it to 0.0"
                )
        variants: Mapping[str, object] = getattr(module, "lora_variant", None) or {}
        for variant in variants.values():
            raise ModelError(
                f"{name} has a variant of LoRA ({type(variant).__name__}): only plain LoRA is supported; "
                "make the adapter without options such as use_dora"
            )
    # Last, for a class that is refused may share its parameters, too.
    _check_shared(model)


def _check_shared(model: PreTrainedModel) -> None:
    """Refuse a module or parameter in two places of a model, which would be sharded or patched twice."""
    first: dict[object, str] = {}
    for name, part in (
        *model.named_modules(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ):
        earlier = first.setdefault(part, name)
        if earlier != name and not (isinstance(part, nn.Parameter) and "embed_tokens" in earlier + name):
            raise ModelError(
                f"{name} is the same as {earlier}: only a head and its embedding may share a parameter; give "
                "each layer its own"
            )
        if isinstance(part, nn.Parameter) and not part.is_contiguous():
            raise ModelError(f"{name} is not contiguous in memory: replace it by a contiguous parameter")


def class_of(module: nn.Module) -> type:
    """Return a module's class without the subclass that a parametrization or FSDP makes of it."""
    kind: type = type(module)
    if is_parametrized(module):
        kind = kind.__bases__[0]
    return kind.__bases__[1] if issubclass(kind, FSDPModule) else kind


def _belongs(kind: type, model_type: str) -> bool:
    where = kind.__module__
    package = CONFIG_MAPPING[model_type].__module__.rpartition(".")[0]
    return (
        kind in _PLAIN
        or where in ACTIVATIONS
        or where.startswith(f"{package}.")
        or f"{where}.{kind.__name__}" in _ADAPTERS
    )


def effective_weight(linear: nn.Module, technique: str) -> tuple[Tensor, Tensor | None]:
    """Return the weight [out, in] and bias [out] of a projection that a technique does not call.

    The weight of a LoRA layer is W + scale * B @ A, summed over its active adapters. A parametrized weight is
    the output of the parametrization. Both are computed under autograd, so their parameters get gradients.

    Costs: for a LoRA layer, one more weight matrix, and in backward its whole gradient, from which the
    gradients of A and B are computed. Source: LoRA (arXiv 2106.09685), section 4.1.

    Raises:
        RecipeError: The projection has hooks, which would not run; or its weight is quantized.
    """
    for module in linear.modules():
        check_hooks(module, technique)
    adapted: Any = linear
    if not hasattr(linear, "lora_A"):
        weight: Tensor = adapted.weight
        if not weight.is_floating_point():
            raise RecipeError(
                f"{technique} with a weight of {weight.dtype}: quantized projections are not supported; load "
                "the model without quantization"
            )
        return weight, adapted.bias
    weight, bias = effective_weight(adapted.base_layer, technique)
    if adapted.merged or adapted.disable_adapters:
        return weight, bias
    for adapter in adapted.active_adapters:
        if adapter in adapted.lora_A:
            a, b, scale = adapted.lora_A[adapter], adapted.lora_B[adapter], adapted.scaling[adapter]
            # The product is added to W in the adapter's dtype, and rounded once.
            wide = weight.to(a.weight.dtype)
            weight = torch.addmm(wide, b.weight, a.weight, alpha=scale).to(weight.dtype)
            if b.bias is not None:
                bias = scale * b.bias if bias is None else bias + (scale * b.bias).to(bias.dtype)
    return weight, bias


def check_hooks(module: nn.Module, technique: str) -> None:
    """Refuse hooks on a module that a technique does not call, or calls with slices of its input.

    The meter's hooks are allowed: they note which module runs, and use no tensor.

    Raises:
        RecipeError: There is a hook.
    """
    if any(getattr(hook, "__module__", None) != "lab.memory.meter" for hook in module_hooks(module)):
        raise RecipeError(
            f"a hook on a {type(module).__name__}: {technique} does not call this module, or calls it with "
            "slices of its input, so the hook would be skipped or see slices; remove the hook, or turn "
            f"{technique} off"
        )
