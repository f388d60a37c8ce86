"""The families of models that the lab supports: the fields of their configs, and how they differ from Llama.

They are listed by name. For each of them a parity test compares every rung of the ladder with transformers'
own model. Other families may have modules of the same names, and still differ in rotary embeddings,
multipliers or masks. So every other family is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

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

_COUNTS = (
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
)  # fmt: skip
"""Fields of families with experts that are counts."""

_EVERYWHERE = {
    # The lab or a module reads them.
    *SIZES, "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings",
    # Notes, labels of classifiers, and plans of other libraries.
    "architectures", "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan",
    "chunk_size_feed_forward", "dtype", "extra_config_files", "extra_files", "id2label", "label2id",
    "problem_type", "sub_configs_defaults", "transformers_version",
    # Settings of generation and of random weights.
    "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id", "use_cache",
    # Of these, ``ONLY`` has the values.
    "attention_dropout", "is_encoder_decoder", "output_hidden_states", "return_dict",
}  # fmt: skip
"""The fields that all families have."""

ONLY: dict[str, tuple[object, ...]] = {
    "attention_dropout": (0.0, None),
    "attn_logit_softcapping": (None,),
    "embd_pdrop": (0.0,),
    "embedding_dropout": (0.0,),
    "is_encoder_decoder": (False,),
    "layer_types": ("full_attention", "sliding_attention"),
    "output_hidden_states": (False, None),
    # The loss that balances the experts is computed from the whole sequence, which no rank has.
    "output_router_logits": (False,),
    "pretraining_tp": (1,),
    "resid_pdrop": (0.0,),
    "residual_dropout": (0.0,),
    "return_dict": (True, None),
    "router_jitter_noise": (0.0,),
    "use_bidirectional_attention": (False, None),
}
"""Fields with the only values that the lab computes right. Other values are refused."""

UNDECLARED: dict[str, tuple[object, ...]] = {
    "auto_map": (None, {}),
    "is_causal": (True, None),
    "output_attentions": (False, None),
}
"""Fields that transformers reads from any config, although no config class declares them."""

PER_LAYER = ("layer_types", "no_rope_layers")
"""The fields of a config with a value for each layer."""

Rotation: TypeAlias = Literal["halves", "half_tables", "interleaved", "interleaved_tables", "none"]
"""The pairs of dimensions that a rotary embedding rotates, if R dimensions of each head are rotated: i and
i + R/2, or 2i and 2i+1; or it rotates nothing. The cosines and sines have R dimensions, of which both halves
are equal. With "half_tables", the pairs are those of "halves", and the tables have R/2 dimensions. With
"interleaved_tables", the pairs are those of "interleaved", and so are the equal dimensions of the tables."""


@dataclass(frozen=True)
class Family:
    """A family of models that the lab computes right.

    Attributes:
        name: The name that its authors use.
        heads: The query heads and the key/value heads of its model in the tests.
        fields: The fields of its config that other families lack, with the values that they have in the
            tests. The lab reads such a field, or a module that runs unchanged reads it, or it changes neither
            the loss nor the gradients. Where the tests need another value of a field that all families have,
            that field is here too. The values of ``PER_LAYER`` are repeated for all layers.
        mlp_projections: The names of the MLP's projections. Three are ``down(act(gate(x)) * up(x))``, and two
            are ``down(act(up(x)))``. One named ``gate_up_proj`` computes gate and up together.
        norms: The names of a layer's norms over the hidden size, in this order: before attention, after it,
            before the MLP, and after it. None if there is no such norm.
        norm_vectors: The parameters of such a norm: a scale and a bias, a scale, or none.
        head_norms: Whether q and k have a norm before the rotary embedding: "each" is a norm of each head,
            "own" is one of each head with scales of its own, and "all" is one norm of all heads together.
            A config whose ``use_qk_norm`` is false has none.
        fused_attention: Whether one projection ``qkv_proj`` computes q, k and v.
        rotation: The pairs of dimensions that the rotary embedding rotates.
        partial: Whether ``partial_rotary_factor`` in the config makes the rotary embedding rotate the first
            dimensions of each head alone. Other families ignore it.
        parallel: Whether the MLP takes what the attention takes, the output of the norm before it, and both
            results are added to the layer's input.
        rotates_windows: Whether only the layers with a window have rotary positions.
        qkv_biases: Whether the projections of q, k and v always have biases, and no field says so.
        output_biases: Whether the projection of attention's output has a bias if those of q, k and v have.
        sinks: Whether each query head has a sink: a learned logit in the softmax, which has no value.
        expert_width: The field with the inner width of an expert, in a family whose MLPs are mixtures of
            experts; None if all MLPs are dense.
        clamped_experts: Whether the experts and their router have biases, and gate and up are interleaved and
            clamped: ``down((up + 1) * gate * sigmoid(alpha * gate))``. The MLP then returns the router's
            weights too.
    """

    name: str
    heads: tuple[int, int]
    fields: Mapping[str, Any]
    mlp_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    norm_vectors: int = 1
    head_norms: HeadNorms = "none"
    fused_attention: bool = False
    rotation: Rotation = "halves"
    partial: bool = False
    parallel: bool = False
    rotates_windows: bool = False
    qkv_biases: bool = False
    output_biases: bool = True
    sinks: bool = False
    expert_width: str | None = None
    clamped_experts: bool = False

    @property
    def counts(self) -> tuple[str, ...]:
        """The fields of its config that are counts. Every model of the family has them."""
        return (*SIZES, *(name for name in self.fields if name in _COUNTS))

    @property
    def attention(self) -> str:
        """The implementation of its attention in transformers, which has no sdpa with sinks."""
        return "eager" if self.sinks else "sdpa"

    def rules(self, name: str, default: object) -> tuple[object, ...] | None:
        """Return the values of a field that the lab computes right; None stands for every value.

        For a field that the family has not, this is its default alone.
        """
        return ONLY.get(name) if self.knows(name) else (default,)

    def knows(self, name: str) -> bool:
        """Return whether the configs of the family have a field."""
        return name in _EVERYWHERE or name in self.fields


_NORMS_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ROPE_OF_TYPES = {"full_attention": {**_ROPE, "rope_theta": 300_000.0}, "sliding_attention": _ROPE}
_WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 11}

_COHERE = Family(
    "Cohere", (24, 6),
    {"attention_bias": True, "layer_norm_eps": 1e-5, "logit_scale": 0.7, "use_qk_norm": True},
    norms=("input_layernorm", None, None, None),
    head_norms="own", rotation="interleaved_tables", parallel=True,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "arcee": Family(
        "Arcee", (24, 6), {"attention_bias": False, "mlp_bias": True},
        mlp_projections=("up_proj", "down_proj"),
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, name="Cohere 2", heads=(28, 4),
        fields={
            "attention_bias": False, "layer_norm_eps": 1e-5, "logit_scale": 1.3,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11,
        },
        head_norms="none", rotates_windows=True,
    ),
    "cwm": Family(
        "CWM", (28, 4),
        {
            **_WINDOW, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gemma": Family("Gemma", (24, 1), {"attention_bias": False, "use_bidirectional_attention": None}),
    "gemma3_text": Family(
        "Gemma 3", (24, 6),
        {
            **_WINDOW, "attention_bias": True, "attn_logit_softcapping": None, "final_logit_softcapping": 1.5,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 17,
            "rope_parameters": _ROPE_OF_TYPES, "use_bidirectional_attention": False,
        },
        norms=(
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        head_norms="each",
    ),
    "glm4": Family(
        "GLM-4", (28, 4),
        {"attention_bias": True, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.4}},
        mlp_projections=("gate_up_proj", "down_proj"),
        norms=(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
        ),
        rotation="interleaved", partial=True, output_biases=False,
    ),
    "gpt_oss": Family(
        "gpt-oss", (28, 4),
        {
            "num_local_experts": 5, "num_experts_per_tok": 3, **_WINDOW, "attention_bias": True,
            # With these limits, many numbers are clamped.
            "swiglu_alpha": 1.3, "swiglu_limit": 1.1,
            "output_router_logits": False, "router_aux_loss_coef": 0.001,
        },
        rotation="half_tables", sinks=True, expert_width="intermediate_size", clamped_experts=True,
    ),
    "granite": Family(
        "Granite", (28, 4),
        {
            "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.21,
            "embedding_multiplier": 3.0, "logits_scaling": 1.7, "residual_multiplier": 0.6,
        },
    ),
    "llama": Family("Llama", (24, 6), {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}),
    "ministral": Family("Ministral", (24, 2), {**_WINDOW, "sliding_window": 9}),
    "mistral": Family("Mistral", (40, 8), {"sliding_window": 13}),
    "mixtral": Family(
        "Mixtral", (24, 6),
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
            "output_router_logits": False, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        },
        expert_width="intermediate_size",
    ),
    # With this limit, many numbers are clipped.
    "olmo": Family("OLMo", (24, 6), {"attention_bias": True, "clip_qkv": 0.9}, norm_vectors=0),
    "olmo2": Family("OLMo 2", (24, 24), {"attention_bias": True}, norms=_NORMS_AFTER, head_norms="all"),
    "olmo3": Family(
        "OLMo 3", (40, 8), {**_WINDOW, "attention_bias": False, "rope_parameters": _ROPE_OF_TYPES},
        norms=_NORMS_AFTER, head_norms="all",
    ),
    "phi3": Family(
        "Phi-3", (28, 4),
        {
            "sliding_window": None, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.6},
            "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096,
        },
        mlp_projections=("gate_up_proj", "down_proj"), fused_attention=True, partial=True,
    ),
    # ``layer_types`` decides which layers have a window, whatever the two fields after it are.
    "qwen2": Family(
        "Qwen2", (28, 4),
        {"sliding_window": None, "layer_types": None, "max_window_layers": 28, "use_sliding_window": False},
        qkv_biases=True,
    ),
    "qwen3": Family(
        "Qwen3", (24, 2),
        {
            "attention_bias": False, "sliding_window": None, "layer_types": None, "max_window_layers": 28,
            "use_sliding_window": False,
        },
        head_norms="each",
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE", (24, 4),
        {
            # The second layer is dense.
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 23, "decoder_sparse_step": 1,
            "mlp_only_layers": [1], "norm_topk_prob": True, "attention_bias": False, "sliding_window": None,
            "use_sliding_window": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        },
        head_norms="each", expert_width="moe_intermediate_size",
    ),
    "seed_oss": Family(
        "Seed-OSS", (40, 8),
        {
            "attention_bias": True, "attention_out_bias": True, "mlp_bias": False, "pretraining_tp": 1,
            "residual_dropout": 0.0,
        },
    ),
    # Without rotation, a bias of k adds the same to all scores of a query, and its gradient is zero.
    "smollm3": Family(
        "SmolLM3", (24, 2),
        {
            **_WINDOW, "attention_bias": False, "mlp_bias": True, "no_rope_layers": [0, 1],
            "no_rope_layer_interval": 4, "use_sliding_window": True,
        },
    ),
    "starcoder2": Family(
        "Starcoder2", (24, 2),
        {
            "sliding_window": None, "norm_epsilon": 1e-5, "use_bias": True, "embedding_dropout": 0.0,
            "residual_dropout": 0.0,
        },
        mlp_projections=("c_fc", "c_proj"), norm_vectors=2,
    ),
}  # fmt: skip
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
