"""What a model is: the families that the lab computes right, and a frozen view of a decoder's parts.

A family is here by name, because a parity test holds every rung of the ladder against transformers' own model
of it. Families with the same attribute names differ in what matters (rotary layouts, multipliers, masks), so
every other family is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import update_wrapper
from textwrap import shorten
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from lab.errors import ModelError, RecipeError
from lab.torch_private import has_gradient_hooks, module_hooks
from lab.units import check_counts

# ---- the families ------------------------------------------------------------------------------------------

SIZES = (
    "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "num_hidden_layers",
    "vocab_size",
)  # fmt: skip
"""The fields of a config that are counts, which no model is without."""

_USED = {
    *SIZES, "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings",
}  # fmt: skip
_HARMLESS = {
    # Of every config: notes, labels of classifiers, plans of other libraries.
    "architectures", "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan",
    "chunk_size_feed_forward", "dtype", "extra_config_files", "extra_files", "id2label", "label2id",
    "problem_type", "sub_configs_defaults", "transformers_version",
    # Of generation and of random weights.
    "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id", "use_cache",
}  # fmt: skip
_ONLY: dict[str, tuple[object, ...]] = {
    "attention_dropout": (0.0, None),
    "is_encoder_decoder": (False,),
    "output_hidden_states": (False, None),
    "return_dict": (True, None),
}
_UNDECLARED: dict[str, tuple[object, ...]] = {
    "auto_map": (None, {}),
    "is_causal": (True, None),
    "output_attentions": (False, None),
    "quantization_config": (None, {}),
}
"""What transformers reads from any config, though no class declares it."""

# A layer has a window where ``layer_types`` says so, whatever the other fields are.
_WINDOWS = frozenset({"max_window_layers", "sliding_window", "use_sliding_window"})
_NO_WINDOW: dict[str, tuple[object, ...]] = {"layer_types": ("full_attention",)}


@dataclass(frozen=True)
class Family:
    """A family of models that the lab computes right.

    Attributes:
        name: what its makers call it.
        used: fields of its config that the lab, or a module that runs unchanged, reads.
        harmless: fields that change neither loss nor gradients.
        only: fields that are right at these values alone, and refused at any other.
        gated: its MLP is ``down(act(gate(x)) * up(x))``; else ``down(act(up(x)))``.
        head_norms: it norms each head of q and k before they are rotated.
        logits_divisor: the field that the head's logits are divided by; None where they are not.
    """

    name: str
    used: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    gated: bool = True
    head_norms: bool = False
    logits_divisor: str | None = None

    def rules(self, name: str, default: object) -> tuple[object, ...] | None:
        """The values of a field that the lab computes right, None if every value is.

        For a field in none of the groups, its default alone.
        """
        if name in self.used | _USED | self.harmless | _HARMLESS:
            return None
        return {**_ONLY, **self.only}.get(name, (default,))

    def knows(self, name: str) -> bool:
        """Whether a field is in one of the groups."""
        return name in _USED | _HARMLESS | _ONLY.keys() | self.used | self.harmless | self.only.keys()


_BIASES = frozenset({"attention_bias", "mlp_bias"})

FAMILIES: dict[str, Family] = {
    "arcee": Family("Arcee", used=_BIASES, gated=False),
    "granite": Family(
        "Granite",
        used=_BIASES
        | {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"},
        logits_divisor="logits_scaling",
    ),
    "llama": Family("Llama", used=_BIASES, only={"pretraining_tp": (1,)}),
    "mistral": Family("Mistral", only={"sliding_window": (None,)}),
    "qwen2": Family("Qwen2", harmless=_WINDOWS, only=_NO_WINDOW),
    "qwen3": Family(
        "Qwen3", used=frozenset({"attention_bias"}), harmless=_WINDOWS, only=_NO_WINDOW, head_norms=True
    ),
    "starcoder2": Family(
        "Starcoder2",
        used=frozenset({"norm_epsilon", "use_bias"}),
        only={"embedding_dropout": (0.0,), "residual_dropout": (0.0,), "sliding_window": (None,)},
        gated=False,
    ),
}
"""The families by ``model_type``."""


def check_config(config: PretrainedConfig) -> Family:
    """The family of a config, every field of which the lab computes right.

    Raises:
        ModelError: another family, with those that work; a field at a value that the techniques would compute
            wrongly, by name, with the values that work; a size that is not 1 or more.
    """
    kind = config.model_type
    # A class of somebody's own may carry a family's name.
    foreign = kind not in CONFIG_MAPPING or type(config) is not CONFIG_MAPPING[kind]
    family = check_family(f"{kind or 'a model'} by {type(config).__name__}" if foreign else kind)
    check_counts({name: getattr(config, name, None) for name in SIZES}, ModelError)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}: no attention shares keys so"
        )
    for name, default in declared(type(config)):
        # A field in no group came with a release of transformers newer than the groups.
        works = family.rules(name, default)
        if works is not None:
            _check_value(family, name, getattr(config, name, default), works)
    for name, works in _UNDECLARED.items():
        _check_value(family, name, getattr(config, name, None), works)
    return family


def check_family(kind: str) -> Family:
    """The family with this ``model_type``.

    Raises:
        ModelError: it is none of ``FAMILIES``, which are named.
    """
    if kind not in FAMILIES:
        names = [family.name for family in FAMILIES.values()]
        raise ModelError(
            f"{kind} is not a family that the lab computes right: {', '.join(names[:-1])} and {names[-1]} are"
        )
    return FAMILIES[kind]


def declared(config_class: type[PretrainedConfig]) -> Iterator[tuple[str, Any]]:
    """The fields that a config class and its bases declare, each with its default."""
    for one in fields(config_class):
        yield one.name, one.default if one.default_factory is MISSING else one.default_factory()


def _check_value(family: Family, name: str, value: object, works: tuple[object, ...]) -> None:
    """Refuse a value, or one of a list of values by layer, that is not among those that work."""
    if value in works:
        return
    for one in value if isinstance(value, list) else [value]:
        if one not in works:
            raise ModelError(
                f"{name}={shorten(repr(one), 60)} in the config of a {family.name} model: the lab computes "
                f"it right only with {name}={works[0]!r}; set it, if the model was trained with that value"
            )


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, by the letters of the method.

    Attributes:
        L: layers.
        E: hidden size.
        H: query heads.
        K: key/value heads.
        D: head_dim.
        I: the MLP's inner width.
        V: vocabulary.
        matrices: of an MLP, each of E*I weights: 3 where it is gated, else 2.
        head_norms: each head of q and k is normed.
        tied: the head is the embedding.
    """

    L: int
    E: int
    H: int
    K: int
    D: int
    I: int  # noqa: E741
    V: int
    matrices: int
    head_norms: bool
    tied: bool


def shape_of(config: PretrainedConfig) -> Shape:
    """The sizes of a config that ``check_config`` lets pass."""
    c, family = config, FAMILIES[config.model_type]
    return Shape(
        L=c.num_hidden_layers,
        E=c.hidden_size,
        H=c.num_attention_heads,
        K=c.num_key_value_heads,
        D=head_dim_of(c),
        I=c.intermediate_size,
        V=c.vocab_size,
        matrices=3 if family.gated else 2,
        head_norms=family.head_norms,
        tied=c.tie_word_embeddings,
    )


def head_dim_of(config: PretrainedConfig) -> int:
    """D: the config's own, or the share of a head in the hidden size, as every family here takes it."""
    own: int | None = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


# ---- the parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer, x [b, s, E] -> [b, s, E], and its parts."""

    module: nn.Module
    attention: nn.Module
    mlp: nn.Module
    norms: tuple[nn.Module, nn.Module]
    """Before the attention and before the MLP, [b, s, E] -> [b, s, E]."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """The parts of a model that techniques take.

    Attributes:
        model: the model itself.
        shape: its sizes.
        layers: its layers, in order.
        norm: the norm before the head.
        head: hidden states [..., E] -> [..., V].
        rotary: x and position_ids [b, s] -> cos and sin.
        logits_divisor: what the head's output is divided by.
    """

    model: PreTrainedModel
    shape: Shape
    layers: tuple[Layer, ...]
    norm: nn.Module
    head: nn.Module
    rotary: nn.Module
    logits_divisor: float

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention of each layer, in order."""
        return [layer.attention for layer in self.layers]

    @property
    def norms(self) -> list[nn.Module]:
        """Every norm over the hidden size: two a layer, and the last."""
        return [*(norm for layer in self.layers for norm in layer.norms), self.norm]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., E] -> the logits of the model, [..., V]."""
        logits: Tensor = self.head(hidden)
        return logits if self.logits_divisor == 1 else logits / self.logits_divisor


def decoder_of(model: nn.Module) -> Decoder:
    """The parts of a transformers model of one of ``FAMILIES``.

    Techniques may have been applied to it.

    Raises:
        ModelError: see ``check_config``; a class that is not the family's causal language model; a module
            that does not belong to the family.
    """
    if type(model).__module__.startswith("peft."):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ModelError("prompt and prefix tuning are not supported: LoRA is")
        raise ModelError(
            f"a {type(model).__name__} of PEFT around a model: give the model in it, with its adapters, "
            "model.get_base_model()"
        )
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"a {type(model).__name__} is not a transformers model: give the model itself, before it is "
            "compiled or wrapped"
        )
    family, config = check_config(model.config), model.config
    expected: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if _class_of(model) is not expected:
        raise ModelError(
            f"a {type(model).__name__}: of the {family.name} family the lab takes {expected.__name__}"
        )
    check_modules(model)
    divisor = family.logits_divisor
    return Decoder(
        model=model,
        shape=shape_of(config),
        layers=tuple(
            Layer(
                module=layer,
                attention=layer.self_attn,
                mlp=layer.mlp,
                norms=(layer.input_layernorm, layer.post_attention_layernorm),
            )
            for layer in model.model.layers
        ),
        norm=model.model.norm,
        head=model.lm_head,
        rotary=model.model.rotary_emb,
        logits_divisor=1.0 if divisor is None else float(getattr(config, divisor)),
    )


def check_materialized(model: nn.Module) -> None:
    """Refuse a model whose parameters have no memory yet, for what would be lost when they are given some.

    Raises:
        ModelError: the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"{name} has no memory (device meta): load the model's weights first")


def check_untouched(model: nn.Module) -> None:
    """Refuse a transformers model that techniques were applied to, or that checkpoints itself.

    Raises:
        RecipeError: what was applied, and what works.
    """
    if not isinstance(model, PreTrainedModel):
        return
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise RecipeError(
            "the parameters of this model are sharded already: build the model again, then apply one recipe "
            "to it, which shards them with fsdp=True"
        )
    for name, module in model.named_modules():
        patched = isinstance(vars(module).get("forward"), Patch)
        if patched or hasattr(module, "lab_kernel") or hasattr(module, "lab_attention"):
            raise RecipeError(
                "a recipe or a technique was applied to this model already: a second one would add to it; "
                "build the model again, then apply the recipe"
            )
        if any(parameter.grad is not None for parameter in module.parameters(recurse=False)):
            raise RecipeError(
                f"{name} has gradients already, which sharding would drop: call model.zero_grad() first"
            )
        if any(map(has_gradient_hooks, module.parameters(recurse=False))):
            raise RecipeError(
                f"{name} has a gradient hook on a parameter: it would see one rank's part of the gradient, "
                "or never run; remove it, and change gradients after backward"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise RecipeError(
                f"transformers' gradient checkpointing is on in {name}: a recipe has its own, "
                "checkpoint=True; call model.gradient_checkpointing_disable() first"
            )


# ---- modules that are not what a family makes of them ------------------------------------------------------

_PLAIN = (
    nn.Dropout, nn.Embedding, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleDict, nn.ModuleList,
    nn.ParameterDict,
)  # fmt: skip
_ADAPTERS = {
    "peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding",
    "peft.utils.other.ModulesToSaveWrapper",
}  # fmt: skip
"""What PEFT puts in a module's place, and runs as autograd differentiates it. Recognised by name, for PEFT
need not be installed."""


def facts_of(module: nn.Module) -> dict[str, object]:
    """What a module computes with beside its tensors: numbers, flags and names among its attributes."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in ("training", "name_or_path")
        and name[0] != "_"
        and isinstance(value, bool | int | float | str | None)
    }


def check_modules(model: PreTrainedModel) -> None:
    """Refuse modules that a family's techniques were not proved with.

    Raises:
        ModelError: a module of another class than transformers, torch or LoRA make; one whose ``forward`` was
            replaced by others than the lab; dropout; a variant of LoRA; modules or parameters in two places,
            but for a head that is the embedding; a weight that changes whenever it is used.
    """
    _check_shared(model)
    for name, module in model.named_modules():
        if ".parametrizations" in name or isinstance(module, nn.Linear):
            for buffer, _ in module.named_buffers(recurse=False):
                raise ModelError(
                    f"{name} has a buffer {buffer}, as spectral norms have, which changes when the module "
                    "runs: a recomputed layer or a tile would change it again; remove the parametrization"
                )
        if ".parametrizations" in name:
            continue
        kind = _class_of(module)
        if not _belongs(kind, model.config.model_type):
            raise ModelError(
                f"{name} is a {kind.__module__}.{kind.__name__}: the lab is proved with the modules of "
                "transformers and the LoRA layers of PEFT alone; put the model's own module in its place"
            )
        forward = vars(module).get("forward")
        if forward is not None and not isinstance(forward, Patch):
            raise ModelError(
                f"the forward of {name or 'the model'} has been replaced (by accelerate's hooks, a kernel "
                "library or by hand): the lab's techniques would leave that out; give the model as "
                "transformers makes it"
            )
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                f"{name} has p={module.p}: dropout is not supported, because a layer that is recomputed in "
                "backward would draw another mask; set it to 0 (lora_dropout=0 for an adapter)"
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
                f"{name} has a variant of LoRA ({type(variant).__name__}): plain LoRA alone is supported; "
                "make the adapter without use_dora and the like"
            )


def _check_shared(model: PreTrainedModel) -> None:
    """Refuse what stands in two places of a model, and would be sharded or patched twice."""
    first: dict[object, str] = {}
    for name, part in (
        *model.named_modules(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ):
        earlier = first.setdefault(part, name)
        if earlier != name and not (isinstance(part, nn.Parameter) and "embed_tokens" in earlier + name):
            raise ModelError(
                f"{name} is {earlier} again: modules and parameters in two places are not supported, but for "
                "a head that is the embedding; give each layer its own"
            )
        if isinstance(part, nn.Parameter) and not part.is_contiguous():
            raise ModelError(f"{name} is not contiguous in memory: set it to a parameter of .contiguous()")


def _class_of(module: nn.Module) -> type:
    """A module's own class, where a parametrization or FSDP has put one of theirs over it."""
    kind: type = type(module)
    if is_parametrized(module):
        kind = kind.__bases__[0]
    return kind.__bases__[1] if issubclass(kind, FSDPModule) else kind


def _belongs(kind: type, model_type: str) -> bool:
    where = kind.__module__
    return (
        kind in _PLAIN
        or where in ("torch.nn.modules.activation", "transformers.activations")
        or where.startswith(f"transformers.models.{model_type}.")
        or f"{where}.{kind.__name__}" in _ADAPTERS
    )


def effective_weight(linear: nn.Module, technique: str) -> tuple[Tensor, Tensor | None]:
    """The weight [out, in] and bias [out] of a projection, for a technique that multiplies by them itself.

    A LoRA layer's weight is W + scale * B @ A over its active adapters, and a parametrized weight is the
    parametrization's output. Both are computed here with autograd on, so their parameters get gradients.

    Costs: for a LoRA layer, one more weight matrix, and the whole gradient of it in backward, from which
    those of A and B are made. Source: LoRA (arXiv 2106.09685), section 4.1.

    Raises:
        RecipeError: hooks on the projection, which would not run; a quantized weight.
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
            # One product that adds to W and rounds once; adapters in a wider dtype are added in theirs.
            wide = weight.to(a.weight.dtype)
            weight = torch.addmm(wide, b.weight, a.weight, alpha=scale).to(weight.dtype)
            if b.bias is not None:
                bias = scale * b.bias if bias is None else bias + (scale * b.bias).to(bias.dtype)
    return weight, bias


def check_hooks(module: nn.Module, technique: str) -> None:
    """Refuse hooks on a module that a technique does not call, or calls on slices of its input.

    The meter's hooks stay: they note which module runs, and see no tensor.

    Raises:
        RecipeError: there is a hook.
    """
    if any(getattr(hook, "__module__", None) != "lab.memory.meter" for hook in module_hooks(module)):
        raise RecipeError(
            f"a hook on a {type(module).__name__}: {technique} does not call this module, or calls it on "
            "slices of its input, so the hook would be skipped or see slices; remove the hook, or turn "
            f"{technique} off"
        )


class Patch:
    """A forward that a technique puts on a module in the place of its own.

    It holds the module that it was made for. A copy of that module would go on computing with the original's
    weights, so what has one is neither copied nor pickled.
    """

    checkpointed = False
    """On a decoder layer: it keeps its input alone and runs again in backward."""

    sequence: tuple[int, int] | None = None
    """On a model that ``lab.loss`` may call: the Ulysses and ring degree of its batches."""

    def __init__(self, forward: Callable[..., Any], replaced: Callable[..., Any]) -> None:
        # transformers asks for the signature of a forward.
        update_wrapper(self, replaced, updated=())
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to be copied."""
        refuse_copy(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled."""
        refuse_pickle(protocol)


def refuse_copy(_: Any) -> NoReturn:
    """What ``copy.deepcopy`` of a model with techniques comes to.

    Raises:
        RecipeError: always.
    """
    raise RecipeError(
        "a model with techniques applied cannot be copied: the copy would compute with the original's "
        "weights; copy the model first, then apply the recipe to each"
    )


def refuse_pickle(_: Any) -> NoReturn:
    """What ``pickle`` of a model with techniques comes to.

    Raises:
        RecipeError: always.
    """
    raise RecipeError(
        "a model with techniques applied cannot be pickled: save its state_dict, where it is sharded by "
        "torch.distributed.checkpoint, and apply the recipe after loading"
    )
