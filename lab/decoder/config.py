"""What a config says about a model: whether the lab computes it right, and the sizes of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from math import inf, isfinite
from textwrap import shorten
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.activations import ACT2FN

from lab.decoder.families import (
    FAMILIES,
    LARGEST_SIZE,
    MOST_LAYERS,
    PER_LAYER,
    UNDECLARED,
    Family,
    check_family,
)
from lab.errors import ModelError
from lab.shape import Shape
from lab.units import check_counts


def check_config(config: PretrainedConfig) -> Family:
    """Check every field of a config, and return its family.

    Raises:
        ModelError: The family is not supported; a field has a value that the lab would compute wrongly; a
            size is not 1 or more; a field of ``PER_LAYER`` has another number of values than layers; or the
            weights are quantized.
    """
    kind = config.model_type
    # A class outside transformers may use the name of a family.
    text = getattr(getattr(config, "text_config", None), "model_type", None)
    if kind not in FAMILIES and text in FAMILIES:
        raise ModelError(
            f"{kind} holds a text model of {FAMILIES[text].name} and other parts, which the lab does not "
            "compute: give the text model alone, whose config is text_config"
        )
    foreign = kind not in CONFIG_MAPPING or type(config) is not CONFIG_MAPPING[kind]
    family = check_family(f"{kind or 'a model'} by {type(config).__name__}" if foreign else kind)
    for name in QUANTIZATION:
        check_not_quantized(quantization_in(getattr(config, name, None)))
    for name, values in UNDECLARED.items():
        _check_value(family, name, getattr(config, name, None), values)
    if config.is_heterogeneous:
        # Before any size is read: transformers raises an error for those that differ.
        raise ModelError(
            "per_layer_config: the lab computes models whose layers have the same sizes; a config without it "
            "would work, if all layers of the model are alike"
        )
    sizes: dict[str, Any] = {name: getattr(config, name, None) for name in family.counts}
    check_counts(sizes, ModelError)
    check_counts({"head_dim": getattr(config, "head_dim", None)}, ModelError, or_none=True)
    sizes["head_dim"] = head_dim_of(config)
    check_largest(sizes)
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
    _check_activation(config)
    _check_partial_rotation(config, family)
    for name in filter(family.knows, PER_LAYER):
        of_layers, layers = getattr(config, name, None), config.num_hidden_layers
        if of_layers is not None and len(of_layers) != layers:
            raise ModelError(
                f"{name} has {len(of_layers)} values for {layers} layers: give one for each layer"
            )
    for name in ("logit_scale", "logits_scaling"):
        scale = field_of(config, name, 1.0)
        if not (scale and isfinite(scale)):
            raise ModelError(
                f"{name}={scale}: it scales the logits; give the number with which the model was trained"
            )
    cap = number_of(config, "final_logit_softcapping")
    if cap is not None and not (cap and isfinite(cap)):
        raise ModelError(
            f"final_logit_softcapping={cap}: it caps the logits; give the number with which the model was "
            "trained, or None if it was trained without a cap"
        )
    for name in ("attention_multiplier", "query_pre_attn_scalar"):
        value = field_of(config, name, 1.0)
        # Fused kernels on CPUs compute a scale that is not above 0 wrongly, without an error.
        if not 0 < value < inf:
            raise ModelError(
                f"{name}={value}: it scales the scores of attention; give a number above 0, with which the "
                "model was trained"
            )
    for name in ("embedding_multiplier", "residual_multiplier"):
        if not isfinite(field_of(config, name, 1.0)):
            raise ModelError(f"{name}={getattr(config, name)}: give a finite number")
    clip = number_of(config, "clip_qkv")
    if clip is not None and not clip > 0:
        raise ModelError(
            f"clip_qkv={clip}: it is the largest absolute value of q, k and v; give a number above 0, "
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


def check_largest(sizes: Mapping[str, int]) -> None:
    """Refuse sizes that are larger than those of any model.

    Raises:
        ModelError: One is.
    """
    for name, size in sizes.items():
        if size > LARGEST_SIZE:
            raise ModelError(f"{name}={size}: the lab takes sizes up to {LARGEST_SIZE}")
    if sizes.get("num_hidden_layers", 0) > MOST_LAYERS:
        raise ModelError(
            f"num_hidden_layers={sizes['num_hidden_layers']}: the lab takes up to {MOST_LAYERS} layers"
        )


QUANTIZATION = {"quantization_config", "compression_config"}
"""The fields of a config that say how weights are quantized; the second is of older checkpoints."""


def quantization_in(field: object) -> str | None:
    """Return how ``quantization_config`` of a config says that weights are quantized; None if it is empty."""
    if not field:
        return None
    method = (field.get("quant_method") or field.get("quant_algo")) if isinstance(field, Mapping) else None
    return shorten(method if isinstance(method, str) else repr(field), 60)


def check_not_quantized(how: str | None) -> None:
    """Refuse quantized weights.

    Args:
        how: How they are quantized; None if they are not.

    Raises:
        ModelError: They are.
    """
    if how is not None:
        raise ModelError(
            f"a checkpoint with quantized weights ({how}): the lab trains plain weights; give a checkpoint "
            "that was dequantized to bf16"
        )


def _check_activation(config: PretrainedConfig) -> None:
    """Refuse an activation that transformers does not know, or whose parameters no technique computes."""
    for name in ("hidden_act", "hidden_activation"):
        value = getattr(config, name, None)
        if isinstance(value, str) and value not in ACT2FN:
            close = get_close_matches(value.lower(), ACT2FN, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ModelError(f"{name}={value!r} is no activation of transformers{hint}: give the model's own")
        if isinstance(value, str) and value in ACT2FN and list(ACT2FN[value].parameters()):
            raise ModelError(
                f"{name}={value!r}: this activation has parameters of its own, which the lab does not train; "
                "give one without, such as 'silu', if the model was trained with it"
            )


def _check_partial_rotation(config: PretrainedConfig, family: Family) -> None:
    """Refuse a part of each head to rotate, where the family's model ignores it."""
    parameters = config.rope_parameters
    if family.partial or not isinstance(parameters, Mapping):
        return
    for of_type in (parameters, *parameters.values()):
        part = of_type.get("partial_rotary_factor", 1.0) if isinstance(of_type, Mapping) else 1.0
        if part != 1:
            raise ModelError(
                f"partial_rotary_factor={part} in the config of a {family.name} model: transformers' model "
                "rotates whole heads; take it out, if the model was trained without it"
            )


def windows_of(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return the window of each layer, the number of keys that a query sees; None if it sees all.

    Raises:
        ModelError: A layer has a window, and the config has no number of keys.
    """
    layers: int = config.num_hidden_layers
    window: int | None = field_of(config, "sliding_window")
    types: list[str] | None = field_of(config, "layer_types")
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
    return tuple(map(bool, field_of(config, "no_rope_layers") or (True,) * config.num_hidden_layers))


def sparse_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Return whether the MLP of each layer is a mixture of experts."""
    layers = range(config.num_hidden_layers)
    if FAMILIES[config.model_type].expert_width is None:
        return (False,) * len(layers)
    step: int = field_of(config, "decoder_sparse_step", 1)
    dense: list[int] = field_of(config, "mlp_only_layers") or []
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in layers)


def field_of(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    """Return a field of the config's family. A config may have fields of others, which its model ignores."""
    return getattr(config, name, default) if FAMILIES[config.model_type].knows(name) else default


def config_fields(config_class: type[PretrainedConfig]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a config class and its bases declare, each with its default."""
    for one in fields(config_class):
        yield one.name, one.default if one.default_factory is MISSING else one.default_factory()


def _check_value(family: Family, name: str, value: object, works: tuple[object, ...]) -> None:
    """Refuse a value that is not among ``works``; of a list with a value for each layer, any such value."""
    if value in works:
        return
    for one in value if isinstance(value, list) else []:
        if one not in works:
            raise ModelError(
                f"{name} has {shorten(repr(one), 60)} in the config of a {family.name} model: the lab "
                f"computes it right only with {' and '.join(map(repr, works))}; set each value to one of "
                "them, if the model was trained so"
            )
    if not isinstance(value, list):
        raise ModelError(
            f"{name}={shorten(repr(value), 60)} in the config of a {family.name} model: the lab computes it "
            f"right only with {name}={works[0]!r}; set it, if the model was trained with that value"
        )


def shape_of(config: PretrainedConfig) -> Shape:
    """Return the sizes of a config that ``check_config`` accepts."""
    c, family = config, FAMILIES[config.model_type]
    E, H, K, D = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c)
    # The field of Starcoder2 stands for all biases.
    everywhere = field_of(c, "use_bias", False)
    attention_bias = bool(field_of(c, "attention_bias", everywhere))
    output_bias = bool(field_of(c, "attention_out_bias", attention_bias and family.output_biases))
    mlp_bias = bool(field_of(c, "mlp_bias", everywhere))
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
        head_norms=family.head_norms if field_of(c, "use_qk_norm", True) else "none",
        fused_attention=family.fused_attention,
        norms=sum(name is not None for name in family.norms),
        norm_vectors=family.norm_vectors,
        rotates=rotated_layers(c),
        attention_biases=(attention_bias or family.qkv_biases) * (H + 2 * K) * D + output_bias * E,
        mlp_biases=mlp_bias * ((len(family.mlp_projections) - 1) * c.intermediate_size + E),
        clipped=number_of(c, "clip_qkv") is not None,
        tied=c.tie_word_embeddings,
        windows=windows_of(c),
        sparse=sparse,
        experts=c.num_experts if any(sparse) else 0,
        experts_per_token=c.num_experts_per_tok if any(sparse) else 0,
        clamped_experts=family.clamped_experts,
        sinks=family.sinks * H,
        expert_width=getattr(c, family.expert_width) if family.expert_width and any(sparse) else 0,
    )


def logits_multiplier_of(config: PretrainedConfig) -> float:
    """Return the number that multiplies the output of the head."""
    multiplied, divided = (field_of(config, name, 1.0) for name in ("logit_scale", "logits_scaling"))
    return float(multiplied / divided)


def number_of(config: PretrainedConfig, name: str) -> float | None:
    """Return the number in a field of the config's family; None if it has none."""
    value = field_of(config, name)
    return None if value is None else float(value)


def keep_layers(config: PretrainedConfig, layers: int) -> None:
    """Cut a config to its first ``layers`` layers."""
    config.num_hidden_layers = min(config.num_hidden_layers, layers)
    for name in PER_LAYER:
        if field_of(config, name):
            setattr(config, name, getattr(config, name)[: config.num_hidden_layers])


def head_dim_of(config: PretrainedConfig) -> int:
    """Return head_dim; where the config has none, it is the hidden size over the number of query heads."""
    own: int | None = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads
