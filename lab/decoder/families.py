"""The families of models that the lab supports: the fields of their configs, and how they differ from Llama.

They are listed by name. For each of them a parity test compares every rung of the ladder with transformers'
own model. Other families may have modules of the same names, and still differ in rotary embeddings,
multipliers or masks. So every other family is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from lab.errors import ModelError
from lab.shape import HeadNorms
from lab.units import abbreviate

SIZES = (
    "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "num_hidden_layers",
    "vocab_size",
)  # fmt: skip
"""The fields of a config that are counts. Every model has them."""

LARGEST_SIZE = 2**24
"""The largest of these fields. Products of them must fit into 64 bits."""

MOST_LAYERS = 2**12
"""The most layers. A plan has a record of each operator in every layer."""

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
UNDECLARED: dict[str, tuple[object, ...]] = {
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
        partial: Whether ``partial_rotary_factor`` in the config makes the rotary embedding rotate the first
            dimensions of each head alone. Other families ignore it.
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
    partial: bool = False
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
        partial=True,
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
        partial=True,
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


def check_family(kind: str) -> Family:
    """Return the family with this ``model_type``.

    Raises:
        ModelError: It is none of ``FAMILIES``.
    """
    if kind not in FAMILIES:
        names = [family.name for family in FAMILIES.values()]
        kind = kind if re.fullmatch(r"[\w .-]{1,80}", kind) else abbreviate(repr(kind), 80)
        raise ModelError(
            f"{kind} is not a family that the lab computes right: {', '.join(names[:-1])} and {names[-1]} are"
        )
    return FAMILIES[kind]
