"""The families of models that the lab supports, and a frozen view of the parts of a decoder.

The supported families are listed by name. For each of them a parity test compares every rung of the ladder
with transformers' own model. Other families may have modules of the same names, and still differ in rotary
embeddings, multipliers or masks. So every other family is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import update_wrapper
from math import inf, isfinite
from textwrap import shorten
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from lab.errors import ModelError, RecipeError
from lab.shape import HeadNorms, Shape
from lab.torch_private import has_gradient_hooks, module_hooks
from lab.units import check_counts

# ---- the families ------------------------------------------------------------------------------------------

SIZES = (
    "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "num_hidden_layers",
    "vocab_size",
)  # fmt: skip
"""The fields of a config that are counts. Every model has them."""

LARGEST_SIZE = 2**24
"""The largest of these fields. Products of them must fit into 64 bits."""

_USED = {
    *SIZES, "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings",
}  # fmt: skip
_HARMLESS = {
    # Notes, labels of classifiers, and plans of other libraries.
    "architectures", "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan",
    "chunk_size_feed_forward", "dtype", "extra_config_files", "extra_files", "id2label", "label2id",
    "problem_type", "sub_configs_defaults", "transformers_version",
    # Settings of generation and of random weights.
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
}
"""Fields that transformers reads from any config, although no config class declares them."""

Rotation: TypeAlias = Literal["halves", "half_tables", "interleaved", "interleaved_tables", "none"]
"""The pairs of dimensions that a rotary embedding rotates, if R dimensions of each head are rotated: i and
i + R/2, or 2i and 2i+1; or it rotates nothing. The cosines and sines have R dimensions, of which both halves
are equal. With "half_tables", the pairs are those of "halves", and the tables have R/2 dimensions. With
"interleaved_tables", the pairs are those of "interleaved", and so are the equal dimensions of the tables."""

PER_LAYER = ("layer_types", "no_rope_layers")
"""The fields of a config with a value for each layer."""

# ``layer_types`` decides which layers have a window, whatever these fields are.
_WINDOWS = frozenset({"max_window_layers", "use_sliding_window"})
_TYPES: dict[str, tuple[object, ...]] = {"layer_types": ("full_attention", "sliding_attention")}


@dataclass(frozen=True)
class Family:
    """A family of models that the lab computes right.

    Attributes:
        name: The name that its authors use.
        used: Fields of its config that the lab reads, or that a module reads which runs unchanged.
        harmless: Fields that change neither the loss nor the gradients.
        only: Fields with the only values that the lab computes right. Other values are refused.
        mlp_projections: The names of the MLP's projections. Three are ``down(act(gate(x)) * up(x))``, and two
            are ``down(act(up(x)))``. One named ``gate_up_proj`` computes gate and up together.
        norms: The names of a layer's norms over the hidden size, in this order: before attention, after it,
            before the MLP, and after it. None if there is no such norm.
        head_norms: Whether q and k have a norm before the rotary embedding: "each" is a norm of each head,
            "own" is one of each head with scales of its own, and "all" is one norm of all heads together.
        optional_head_norms: The name of the field without which they have none; None if they always have it.
        fused_attention: Whether one projection ``qkv_proj`` computes q, k and v.
        interleaved: Whether the rotary embedding rotates the pairs of dimensions 2i and 2i+1 of each head.
            Otherwise the pairs are i and i + R/2, if the first R dimensions are rotated.
        interleaved_tables: Whether the cosines and sines of such a pair are beside each other too.
        half_tables: Whether the rotary embedding returns cosines and sines of R/2 dimensions, and not of R.
        joined_heads: Whether the rotary embedding concatenates parts of each head, which makes a copy of it.
        layer_norms: Whether the norms over the hidden size are LayerNorm. Otherwise they are RMSNorm.
        bare_norms: Whether they are LayerNorm in fp32, without scales and biases.
        centered_norms: Whether they subtract the mean before they normalize, as LayerNorm, in operators of
            fp32 and without biases.
        parallel: Whether the MLP takes what the attention takes, the output of the norm before it, and both
            results are added to the layer's input.
        wide_rotation: Whether the family's own attention rotates q and k in fp32.
        rotates_windows: Whether only the layers with a window have rotary positions.
        qkv_biases: Whether the projections of q, k and v always have biases, and no field says so.
        output_biases: Whether the projection of attention's output has a bias if those of q, k and v have.
        clip: The name of the field with the largest absolute value of q, k and v: after their projections,
            larger ones are clipped. None if there is none.
        scaled_residual: Whether what attention and MLP return is multiplied before it is added.
        logits_divisor: The name of the field by which the logits are divided; None if there is none.
        logits_multiplier: The name of the field that multiplies the logits; None if there is none.
        logits_cap: The name of the field with the cap of the logits, which become cap * tanh(logits / cap);
            None if there is none.
        wide_scales: Whether the norms multiply by their scales in fp32, and not in the input's dtype.
        scaled_embedding: Whether the embedding multiplies its output by a number.
        windows: Whether ``sliding_window`` is the number of keys that a query sees: in the layers of
            ``layer_types`` with "sliding_attention", or in all layers if the config has no such field.
        sinks: Whether each query head has a sink: a learned logit in the softmax, which has no value.
        expert_width: The field with the inner width of an expert, in a family whose MLPs are mixtures of
            experts; None if all MLPs are dense.
        clamped_experts: Whether the experts and their router have biases, and gate and up are interleaved and
            clamped: ``down((up + 1) * gate * sigmoid(alpha * gate))``. The MLP then returns the router's
            weights too.
        counts: Fields of its config that are counts, in addition to ``SIZES``. Every model of the family has
            them.
    """

    name: str
    used: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    mlp_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    head_norms: HeadNorms = "none"
    optional_head_norms: str | None = None
    fused_attention: bool = False
    interleaved: bool = False
    interleaved_tables: bool = False
    half_tables: bool = False
    joined_heads: bool = False
    layer_norms: bool = False
    bare_norms: bool = False
    centered_norms: bool = False
    parallel: bool = False
    wide_rotation: bool = False
    rotates_windows: bool = False
    qkv_biases: bool = False
    output_biases: bool = True
    clip: str | None = None
    scaled_residual: bool = False
    logits_divisor: str | None = None
    logits_multiplier: str | None = None
    logits_cap: str | None = None
    wide_scales: bool = False
    scaled_embedding: bool = False
    windows: bool = False
    sinks: bool = False
    expert_width: str | None = None
    clamped_experts: bool = False
    counts: tuple[str, ...] = ()

    def rules(self, name: str, default: object) -> tuple[object, ...] | None:
        """Return the values of a field that the lab computes right; None stands for every value.

        For a field in none of the groups, this is its default alone.
        """
        if name in self.used.union(_USED, self.harmless, _HARMLESS, self.counts):
            return None
        return {**_ONLY, **self.only}.get(name, (default,))

    def knows(self, name: str) -> bool:
        """Return whether a field is in one of the groups."""
        return name in self.used.union(_USED, _HARMLESS, _ONLY, self.harmless, self.only, self.counts)


_BIASES = frozenset({"attention_bias", "mlp_bias"})
_WINDOW = frozenset({"sliding_window"})
_NORMS_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")

# The loss that balances the experts is computed from the whole sequence, which no rank has. It is refused.
_BALANCED = {"output_router_logits": (False,)}
_BALANCE = frozenset({"router_aux_loss_coef"})

_COHERE = Family(
    "Cohere",
    used=frozenset({"attention_bias", "layer_norm_eps", "logit_scale"}),
    norms=("input_layernorm", None, None, None),
    interleaved=True,
    interleaved_tables=True,
    centered_norms=True,
    parallel=True,
    wide_rotation=True,
    logits_multiplier="logit_scale",
    wide_scales=True,
)

FAMILIES: dict[str, Family] = {
    "arcee": Family("Arcee", used=_BIASES, mlp_projections=("up_proj", "down_proj")),
    "cohere": replace(
        _COHERE, used=_COHERE.used | {"use_qk_norm"}, head_norms="own", optional_head_norms="use_qk_norm"
    ),
    "cohere2": replace(
        _COHERE, name="Cohere 2", used=_COHERE.used | _WINDOW, only=_TYPES, rotates_windows=True, windows=True
    ),
    "gemma": Family(
        "Gemma",
        used=frozenset({"attention_bias"}),
        only={"use_bidirectional_attention": (None, False)},
        wide_scales=True,
        scaled_embedding=True,
    ),
    "gemma3_text": Family(
        "Gemma 3",
        used=_WINDOW
        | {"attention_bias", "final_logit_softcapping", "hidden_activation", "query_pre_attn_scalar"},
        only={
            **_TYPES,
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        head_norms="each",
        logits_cap="final_logit_softcapping",
        wide_scales=True,
        scaled_embedding=True,
        windows=True,
    ),
    "glm4": Family(
        "GLM-4",
        used=frozenset({"attention_bias"}),
        mlp_projections=("gate_up_proj", "down_proj"),
        norms=(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        interleaved=True,
        joined_heads=True,
        output_biases=False,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        used=_WINDOW | {"attention_bias", "swiglu_alpha", "swiglu_limit"},
        harmless=_BALANCE,
        only={**_TYPES, **_BALANCED},
        half_tables=True,
        joined_heads=True,
        wide_scales=True,
        windows=True,
        sinks=True,
        expert_width="intermediate_size",
        clamped_experts=True,
        counts=("num_local_experts", "num_experts_per_tok"),
    ),
    "granite": Family(
        "Granite",
        used=_BIASES
        | {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"},
        scaled_residual=True,
        logits_divisor="logits_scaling",
    ),
    "llama": Family("Llama", used=_BIASES, only={"pretraining_tp": (1,)}),
    "ministral": Family("Ministral", used=_WINDOW, only=_TYPES, windows=True),
    "mistral": Family("Mistral", used=_WINDOW, windows=True),
    "mixtral": Family(
        "Mixtral",
        used=_WINDOW,
        harmless=_BALANCE,
        only={**_BALANCED, "router_jitter_noise": (0.0,)},
        windows=True,
        expert_width="intermediate_size",
        counts=("num_local_experts", "num_experts_per_tok"),
    ),
    "olmo": Family("OLMo", used=frozenset({"attention_bias", "clip_qkv"}), bare_norms=True, clip="clip_qkv"),
    "olmo2": Family(
        "OLMo 2",
        used=frozenset({"attention_bias"}),
        norms=_NORMS_AFTER,
        head_norms="all",
        wide_scales=True,
    ),
    "olmo3": Family(
        "OLMo 3",
        used=_WINDOW | {"attention_bias"},
        only=_TYPES,
        norms=_NORMS_AFTER,
        head_norms="all",
        wide_scales=True,
        windows=True,
    ),
    "phi3": Family(
        "Phi-3",
        used=_WINDOW,
        harmless=frozenset({"original_max_position_embeddings"}),
        only={"embd_pdrop": (0.0,), "resid_pdrop": (0.0,)},
        mlp_projections=("gate_up_proj", "down_proj"),
        fused_attention=True,
        joined_heads=True,
        windows=True,
    ),
    "qwen2": Family("Qwen2", used=_WINDOW, harmless=_WINDOWS, only=_TYPES, qkv_biases=True, windows=True),
    "qwen3": Family(
        "Qwen3",
        used=_WINDOW | {"attention_bias"},
        harmless=_WINDOWS,
        only=_TYPES,
        head_norms="each",
        windows=True,
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        used=_WINDOW | {"attention_bias", "norm_topk_prob", "mlp_only_layers"},
        harmless=_BALANCE | {"use_sliding_window"},
        only=_BALANCED,
        head_norms="each",
        windows=True,
        expert_width="moe_intermediate_size",
        counts=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    ),
    "seed_oss": Family(
        "Seed-OSS",
        used=_BIASES | {"attention_out_bias"},
        only={"pretraining_tp": (1,), "residual_dropout": (0.0,)},
    ),
    "smollm3": Family(
        "SmolLM3",
        used=_BIASES | _WINDOW | {"no_rope_layers"},
        harmless=frozenset({"no_rope_layer_interval", "use_sliding_window"}),
        only=_TYPES,
        windows=True,
    ),
    "starcoder2": Family(
        "Starcoder2",
        used=_WINDOW | {"norm_epsilon", "use_bias"},
        only={"embedding_dropout": (0.0,), "residual_dropout": (0.0,)},
        mlp_projections=("c_fc", "c_proj"),
        layer_norms=True,
        windows=True,
    ),
}
"""The supported families by their ``model_type``."""


def check_config(config: PretrainedConfig) -> Family:
    """Check every field of a config, and return its family.

    Raises:
        ModelError: The family is not supported; a field has a value that the lab would compute wrongly; a
            size is not 1 or more; or a field of ``PER_LAYER`` has another number of values than layers.
    """
    kind = config.model_type
    # A class outside transformers may use the name of a family.
    foreign = kind not in CONFIG_MAPPING or type(config) is not CONFIG_MAPPING[kind]
    family = check_family(f"{kind or 'a model'} by {type(config).__name__}" if foreign else kind)
    if config.is_heterogeneous:
        # Before any size is read: transformers raises an error for those that differ.
        raise ModelError(
            "per_layer_config: the lab computes models whose layers have the same sizes; a config without it "
            "would work, if all layers of the model are alike"
        )
    sizes: dict[str, Any] = {name: getattr(config, name, None) for name in (*SIZES, *family.counts)}
    check_counts(sizes, ModelError)
    check_counts({"head_dim": getattr(config, "head_dim", None)}, ModelError, or_none=True)
    sizes["head_dim"] = head_dim_of(config)
    for name, size in sizes.items():
        if size > LARGEST_SIZE:
            raise ModelError(f"{name}={size}: the lab takes sizes up to {LARGEST_SIZE}")
    if sizes["head_dim"] % 2:
        raise ModelError(f"head_dim={sizes['head_dim']}: rotary positions turn pairs; give an even number")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}: give each key/value head as many query heads"
        )
    if family.expert_width is not None and config.num_experts_per_tok > config.num_experts:
        raise ModelError(
            f"num_experts_per_tok={config.num_experts_per_tok} of {config.num_experts} experts: give at most "
            "as many experts per token as there are experts"
        )
    for name, default in config_fields(type(config)):
        # A field in no group is new in this release of transformers.
        works = family.rules(name, default)
        if works is not None:
            _check_value(family, name, getattr(config, name, default), works)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f"a checkpoint with quantized weights ({method or shorten(repr(quantization), 60)}): the lab "
            "trains plain weights; give a checkpoint that was dequantized to bf16"
        )
    for name, works in _UNDECLARED.items():
        _check_value(family, name, getattr(config, name, None), works)
    for name in filter(family.knows, PER_LAYER):
        values, layers = getattr(config, name, None), config.num_hidden_layers
        if values is not None and len(values) != layers:
            raise ModelError(f"{name} has {len(values)} values for {layers} layers: give one for each layer")
    for scale in (family.logits_divisor, family.logits_multiplier):
        if scale is not None and not (getattr(config, scale) and isfinite(getattr(config, scale))):
            raise ModelError(
                f"{scale}={getattr(config, scale)}: it scales the logits; give the number with which the "
                "model was trained"
            )
    cap = _logits_cap(config)
    if cap is not None and not (cap and isfinite(cap)):
        raise ModelError(
            f"{family.logits_cap}={cap}: it caps the logits; give the number with which the model was "
            "trained, or None if it was trained without a cap"
        )
    for name in ("attention_multiplier", "query_pre_attn_scalar"):
        value = _own(config, name, 1.0)
        # Fused kernels on CPUs compute a scale that is not above 0 wrongly, without an error.
        if not 0 < value < inf:
            raise ModelError(
                f"{name}={value}: it scales the scores of attention; give a number above 0, with which the "
                "model was trained"
            )
    for name in ("embedding_multiplier", "residual_multiplier"):
        if not isfinite(_own(config, name, 1.0)):
            raise ModelError(f"{name}={getattr(config, name)}: give a finite number")
    clip = _clip(config)
    if clip is not None and not clip > 0:
        raise ModelError(
            f"{family.clip}={clip}: it is the largest absolute value of q, k and v; give a number above 0, "
            "or None if the model was trained without it"
        )
    if (family.sinks or family.rotates_windows) and config.sliding_window is None:
        raise ModelError(
            f"sliding_window=None in the config of a {family.name} model: transformers' class needs a number "
            "of keys, also where no layer has a window; give one"
        )
    for window in windows_of(config):
        check_counts({"sliding_window": window}, ModelError, or_none=True)
    return family


def windows_of(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the window of each layer, the number of keys that a query sees; None if it sees all.

    Raises:
        ModelError: A layer has a window, and the config has no number of keys.
    """
    layers: int = config.num_hidden_layers
    if not FAMILIES[config.model_type].windows:
        return (None,) * layers
    window: int | None = config.sliding_window
    types: list[str] | None = _own(config, "layer_types")
    if types is None:
        return (window,) * layers
    if window is None and "sliding_attention" in types:
        raise ModelError(
            "layer_types has 'sliding_attention', and sliding_window is None: set sliding_window to the "
            "number of keys that a query of these layers sees"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def rotated_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions."""
    if FAMILIES[config.model_type].rotates_windows:
        return tuple(window is not None for window in windows_of(config))
    return tuple(map(bool, _own(config, "no_rope_layers") or (True,) * config.num_hidden_layers))


def sparse_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Return whether the MLP of each layer is a mixture of experts."""
    layers = range(config.num_hidden_layers)
    if FAMILIES[config.model_type].expert_width is None:
        return (False,) * len(layers)
    step: int = _own(config, "decoder_sparse_step", 1)
    dense: list[int] = _own(config, "mlp_only_layers") or []
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in layers)


def _own(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    """Return a field of the config's family. A config may have fields of others, which its model ignores."""
    return getattr(config, name, default) if FAMILIES[config.model_type].knows(name) else default


def check_family(kind: str) -> Family:
    """Return the family with this ``model_type``.

    Raises:
        ModelError: It is none of ``FAMILIES``.
    """
    if kind not in FAMILIES:
        names = [family.name for family in FAMILIES.values()]
        raise ModelError(
            f"{kind} is not a family that the lab computes right: {', '.join(names[:-1])} and {names[-1]} are"
        )
    return FAMILIES[kind]


def config_fields(config_class: type[PretrainedConfig]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a config class and its bases declare, each with its default."""
    for one in fields(config_class):
        yield one.name, one.default if one.default_factory is MISSING else one.default_factory()


def _check_value(family: Family, name: str, value: object, works: tuple[object, ...]) -> None:
    """Refuse a value that is not among ``works``; of a list with a value for each layer, any such value."""
    if value in works:
        return
    for one in value if isinstance(value, list) else [value]:
        if one not in works:
            raise ModelError(
                f"{name}={shorten(repr(one), 60)} in the config of a {family.name} model: the lab computes "
                f"it right only with {name}={works[0]!r}; set it, if the model was trained with that value"
            )


def shape_of(config: PretrainedConfig) -> Shape:
    """Return the sizes of a config that ``check_config`` accepts."""
    c, family = config, FAMILIES[config.model_type]
    E, H, K, D = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c)
    # The field of Starcoder2 stands for all biases.
    everywhere = _own(c, "use_bias", False)
    attention_bias = bool(_own(c, "attention_bias", everywhere))
    output_bias = bool(_own(c, "attention_out_bias", attention_bias and family.output_biases))
    mlp_bias = bool(_own(c, "mlp_bias", everywhere))
    sparse = sparse_layers(c)
    return Shape(
        L=c.num_hidden_layers,
        E=E,
        H=H,
        K=K,
        D=D,
        I=c.intermediate_size,
        V=c.vocab_size,
        mlp_projections=family.mlp_projections,
        head_norms=_head_norms(c),
        fused_attention=family.fused_attention,
        rotated=_rotated(c),
        joined_heads=family.joined_heads,
        wide_scales=family.wide_scales,
        scaled_embedding=family.scaled_embedding,
        norms=sum(name is not None for name in family.norms),
        norms_after=family.norms[1] is not None,
        layer_norms=family.layer_norms,
        bare_norms=family.bare_norms,
        centered_norms=family.centered_norms,
        parallel=family.parallel,
        wide_rotation=family.wide_rotation,
        rotates=rotated_layers(c),
        attention_biases=(attention_bias or family.qkv_biases) * (H + 2 * K) * D + output_bias * E,
        mlp_biases=mlp_bias * ((len(family.mlp_projections) - 1) * c.intermediate_size + E),
        clipped=_clip(c) is not None,
        relu_squared=getattr(c, "hidden_act", None) == "relu2",
        scaled_residual=family.scaled_residual,
        scaled_logits=_logits_multiplier(c) != 1,
        capped_logits=_logits_cap(c) is not None,
        tied=c.tie_word_embeddings,
        windows=windows_of(c),
        sparse=sparse,
        experts=c.num_experts if any(sparse) else 0,
        experts_per_token=c.num_experts_per_tok if any(sparse) else 0,
        clamped_experts=family.clamped_experts,
        sinks=family.sinks * H,
        expert_width=getattr(c, family.expert_width) if family.expert_width and any(sparse) else 0,
    )


def _logits_multiplier(config: PretrainedConfig) -> float:
    """Return the number that multiplies the output of the head."""
    family = FAMILIES[config.model_type]
    if family.logits_multiplier is not None:
        return float(getattr(config, family.logits_multiplier))
    return 1.0 if family.logits_divisor is None else 1 / getattr(config, family.logits_divisor)


def _logits_cap(config: PretrainedConfig) -> float | None:
    """Return the cap of the logits; None if they have none."""
    return _number(config, FAMILIES[config.model_type].logits_cap)


def _head_norms(config: PretrainedConfig) -> HeadNorms:
    """Return which norms q and k have; see ``Family.head_norms``."""
    family = FAMILIES[config.model_type]
    optional = family.optional_head_norms
    return family.head_norms if optional is None or getattr(config, optional) else "none"


def _clip(config: PretrainedConfig) -> float | None:
    """Return the largest absolute value of q, k and v; None if they are not clipped."""
    return _number(config, FAMILIES[config.model_type].clip)


def _number(config: PretrainedConfig, name: str | None) -> float | None:
    """Return the number in a field, which may be None, as the field's name."""
    value = None if name is None else getattr(config, name)
    return None if value is None else float(value)


def _rotated(config: PretrainedConfig) -> int:
    """Return the rotated dimensions of a head, summed over the kinds of layers with tables of their own."""
    parameters = config.rope_parameters
    kinds = [parameters[kind] for kind in set(_own(config, "layer_types") or ()) & parameters.keys()]
    parts = [kind.get("partial_rotary_factor", 1.0) for kind in kinds or [parameters]]
    tables = sum(int(head_dim_of(config) * part) for part in parts)
    return tables // 2 if FAMILIES[config.model_type].half_tables else tables


def keep_layers(config: PretrainedConfig, layers: int) -> None:
    """Cut a config to its first ``layers`` layers."""
    config.num_hidden_layers = min(config.num_hidden_layers, layers)
    for name in PER_LAYER:
        if _own(config, name):
            setattr(config, name, getattr(config, name)[: config.num_hidden_layers])


def head_dim_of(config: PretrainedConfig) -> int:
    """Return head_dim; where the config has none, it is the hidden size over the number of query heads."""
    own: int | None = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


# ---- the parts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer, [b, s, E] -> [b, s, E], and its parts.

    ``head`` and ``tail`` compute each token alone, so they may also be called with a tile of a sequence.
    Between them is attention, with its rotary positions.

    Attributes:
        module: The layer.
        attention: The attention.
        mlp: The MLP.
        norms: The norms before and after the attention, and before and after the MLP, [b, s, E] ->
            [b, s, E]; None if there is no such norm.
        residual_multiplier: Multiplies what attention and MLP return, before it is added.
        window: The number of keys that a query sees, itself included; None if it sees all before it.
        rotation: The pairs of dimensions of q and k that are rotated by their positions.
        norm_kind: Which norms q and k have before they are rotated; see ``Family.head_norms``.
        clip: The largest absolute value of q, k and v, to which larger ones are clipped after their
            projections; None if they are not clipped.
        fused: The rows of q, of k and of v in the weight of ``qkv_proj``; None if each has a projection.
        returns_weights: Whether the MLP returns a pair, of its output and the weights of its router.
        parallel: Whether the MLP takes the output of the first norm, as the attention does.
    """

    module: nn.Module
    attention: nn.Module
    mlp: nn.Module
    norms: tuple[nn.Module | None, ...]
    residual_multiplier: float = 1.0
    window: int | None = None
    rotation: Rotation = "halves"
    norm_kind: HeadNorms = "none"
    clip: float | None = None
    fused: tuple[int, int, int] | None = None
    returns_weights: bool = False
    parallel: bool = False

    @property
    def sinks(self) -> nn.Parameter | None:
        """The sinks of the query heads, [H]; None if attention has none."""
        return getattr(self.attention, "sinks", None)

    @property
    def experts(self) -> nn.Module | None:
        """The experts of the MLP, whose weights are [N, ...]; None if the MLP is dense."""
        return getattr(self.mlp, "experts", None)

    @property
    def head_norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The norms of q and of k, before they are rotated; None if there is none."""
        return getattr(self.attention, "q_norm", None), getattr(self.attention, "k_norm", None)

    @property
    def inputs(self) -> list[nn.Module]:
        """The projections of q, k and v, or the one that computes all of them."""
        a: Any = self.attention
        return [a.q_proj, a.k_proj, a.v_proj] if self.fused is None else [a.qkv_proj]

    @property
    def head_modules(self) -> list[nn.Module]:
        """The modules that ``head`` calls."""
        return [m for m in (self.norms[0], *self.inputs, *self.head_norms) if m is not None]

    def input_weights(self, technique: str) -> list[tuple[Tensor, Tensor | None]]:
        """Return the weight and the bias of q, of k and of v; see ``effective_weight``."""
        weights = [effective_weight(projection, technique) for projection in self.inputs]
        if self.fused is None:
            return weights
        ((weight, bias),) = weights
        biases = (None,) * 3 if bias is None else bias.split(self.fused)
        return list(zip(weight.split(self.fused), biases, strict=True))

    def head(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [b, s, H*D], k and v [b, s, K*D] of the input [b, s, E], before rotary positions."""
        a: Any = self.attention
        hidden = self.normalize(0, x)
        projected = [projection(hidden) for projection in self.inputs]
        q, k, v = projected if self.fused is None else projected[0].split(self.fused, -1)
        if self.clip is not None:
            q, k, v = (heads.clamp(-self.clip, self.clip) for heads in (q, k, v))
        q_norm, k_norm = self.head_norms
        if q_norm is None or k_norm is None:
            return q, k, v
        if self.norm_kind == "all":
            return q_norm(q), k_norm(k), v
        q, k = (heads.unflatten(-1, (-1, a.head_dim)) for heads in (q, k))
        return q_norm(q).flatten(-2), k_norm(k).flatten(-2), v

    def tail(self, x: Tensor, heads: Tensor) -> Tensor:
        """Return the output [b, s, E] of the input [b, s, E] and the outputs of all heads [b, s, H*D]."""
        a: Any = self.attention
        hidden = x + self._scaled(self.normalize(1, a.o_proj(heads)))
        result = self.mlp(self.normalize(0, x) if self.parallel else self.normalize(2, hidden))
        return hidden + self._scaled(self.normalize(3, result[0] if self.returns_weights else result))

    def normalize(self, which: int, x: Tensor) -> Tensor:
        """Return the output of one of ``norms``; ``x`` itself if there is no such norm."""
        norm = self.norms[which]
        return x if norm is None else norm(x)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_multiplier == 1 else x * self.residual_multiplier


@dataclass(frozen=True, eq=False)
class Decoder:
    """The parts of a model to which techniques are applied.

    Attributes:
        model: The model.
        shape: The sizes of the model.
        layers: The layers, in order.
        norm: The norm before the head.
        head: The head, [..., E] -> [..., V].
        rotary: The rotary embedding; takes x, position_ids [b, s], and where the layers of each type have
            frequencies of their own, a type of layer; returns cos and sin.
        logits_multiplier: The number that multiplies the output of the head.
        logits_cap: The cap of the logits, which become cap * tanh(logits / cap); None if they have none.
    """

    model: PreTrainedModel
    shape: Shape
    layers: tuple[Layer, ...]
    norm: nn.Module
    head: nn.Module
    rotary: nn.Module
    logits_multiplier: float
    logits_cap: float | None

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention modules of all layers, in order."""
        return [layer.attention for layer in self.layers]

    @property
    def norms(self) -> list[nn.Module]:
        """The norms over the hidden size: those of each layer, and the norm before the head."""
        of_layers = [norm for layer in self.layers for norm in layer.norms if norm is not None]
        return [*of_layers, self.norm]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., E], before they are capped."""
        logits: Tensor = self.head(hidden)
        return logits if self.logits_multiplier == 1 else logits * self.logits_multiplier


def decoder_of(model: nn.Module) -> Decoder:
    """Return the parts of a transformers model of one of ``FAMILIES``, with or without techniques.

    Raises:
        ModelError: See ``check_config`` and ``check_modules``; or the model is not its family's causal
            language model.
    """
    if type(model).__module__.startswith("peft."):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ModelError("prompt and prefix tuning are not supported: use LoRA")
        raise ModelError(
            f"a {type(model).__name__} of PEFT around a model: give the model inside it, which has the "
            "adapters, by model.get_base_model()"
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
    # The forward of Cohere reads the attribute that the model has made of the field.
    name = family.logits_multiplier
    if name is not None and getattr(model, name) != getattr(config, name):
        raise ModelError(
            f"{name}={getattr(model, name)} of the model, and {getattr(config, name)} of its config: set the "
            "config before the model is made"
        )
    return Decoder(
        model=model,
        shape=shape_of(config),
        layers=tuple(_layer(layer, family, config) for layer in model.model.layers),
        norm=model.model.norm,
        head=model.lm_head,
        rotary=model.model.rotary_emb,
        logits_multiplier=_logits_multiplier(config),
        logits_cap=_logits_cap(config),
    )


def _layer(module: Any, family: Family, config: PretrainedConfig) -> Layer:
    shape, attention = shape_of(config), module.self_attn
    queries, keys = shape.H * shape.D, shape.K * shape.D
    return Layer(
        module=module,
        attention=attention,
        mlp=module.mlp,
        norms=tuple(None if name is None else getattr(module, name) for name in family.norms),
        residual_multiplier=getattr(module, "residual_multiplier", 1.0),
        window=shape.windows[attention.layer_idx],
        rotation=_rotation(family) if shape.rotates[attention.layer_idx] else "none",
        norm_kind=shape.head_norms,
        clip=_clip(config),
        fused=(queries, keys, keys) if family.fused_attention else None,
        returns_weights=family.clamped_experts,
        parallel=family.parallel,
    )


def _rotation(family: Family) -> Rotation:
    if family.half_tables:
        return "half_tables"
    if family.interleaved:
        return "interleaved_tables" if family.interleaved_tables else "interleaved"
    return "halves"


def kinds_of(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """Return the kind of each layer of a supported model.

    Layers of one kind whose parameters have the same shapes differ in the values of their weights alone.
    """
    config = model.config
    types = _own(config, "layer_types") or [None] * config.num_hidden_layers
    layers = decoder_of(model).layers
    return [(layer.window, layer.rotation, kind) for layer, kind in zip(layers, types, strict=True)]


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


# ---- modules that do not belong to a family ----------------------------------------------------------------

_PLAIN = (
    nn.Dropout, nn.Embedding, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleDict, nn.ModuleList,
    nn.ParameterDict,
)  # fmt: skip
_ADAPTERS = {
    "peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding",
    "peft.utils.other.ModulesToSaveWrapper",
}  # fmt: skip
"""Modules of PEFT that replace a family's module and compute with plain operators. They are known by name,
because PEFT need not be installed."""


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
            places and is not a tied embedding; or a weight changes each time that it is used.
    """
    _check_shared(model)
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
        kind = _class_of(module)
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


def _class_of(module: nn.Module) -> type:
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
        or where in ("torch.nn.modules.activation", "transformers.activations")
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


class Patch:
    """A forward that replaces the forward of one module.

    It refers to the module for which it was made. In a copy of the module it would compute with the weights
    of the original. So a module with a Patch cannot be copied or pickled.

    Attributes:
        checkpointed: Whether it belongs to a decoder layer that keeps its input alone and is recomputed in
            backward.
        sequence: The Ulysses and ring degree of the model's batches; None if this is not the forward of a
            model with a recipe.
    """

    checkpointed = False
    sequence: tuple[int, int] | None = None

    def __init__(self, forward: Callable[..., Any], replaced: Callable[..., Any]) -> None:
        # transformers reads the signature of a forward.
        update_wrapper(self, replaced, updated=())
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the new forward."""
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to be copied."""
        refuse_copy(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled."""
        refuse_pickle(protocol)


def refuse_copy(_: Any) -> NoReturn:
    """Refuse ``copy.deepcopy`` of a model with techniques.

    Raises:
        RecipeError: Always.
    """
    raise RecipeError(
        "a model with techniques applied cannot be copied: the copy would compute with the original's "
        "weights; copy the model first, then apply the recipe to each"
    )


def refuse_pickle(_: Any) -> NoReturn:
    """Refuse to pickle a model with techniques.

    Raises:
        RecipeError: Always.
    """
    raise RecipeError(
        "a model with techniques applied cannot be pickled: save its state_dict (with "
        "torch.distributed.checkpoint if it is sharded), and apply the recipe after loading"
    )
