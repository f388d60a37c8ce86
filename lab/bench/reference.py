"""The plain model with which all results are compared: transformers' own, with sdpa and fp64 rotary tables.

In transformers, the softmax of eager attention and the rotary tables are computed in fp32, so two right fp64
models can differ by 1e-7. gpt-oss has no sdpa, and its own eager attention computes in the model's dtype. The
gradients of a right model differ from those of this model by about 1e-15. The norms compute in fp32 here too,
because the techniques call the same norms; but see ``exact_modules``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from lab.decoder import PER_LAYER, Patch

VOCABULARY, HEAD_DIM = 101, 10
FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "gpt_oss": GptOssConfig,
    "ministral": MinistralConfig,
    "arcee": ArceeConfig,
    "granite": GraniteConfig,
    "starcoder2": Starcoder2Config,
    "seed_oss": SeedOssConfig,
    "smollm3": SmolLM3Config,
    "phi3": Phi3Config,
    "cohere": CohereConfig,
    "cohere2": Cohere2Config,
    "gemma": GemmaConfig,
    "gemma3_text": Gemma3TextConfig,
    "glm4": Glm4Config,
    "olmo": OlmoConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
}

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 13},
    "ministral": {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    # With these limits, many numbers are clamped.
    "gpt_oss": {
        "num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_alpha": 1.3, "swiglu_limit": 1.1,
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 11,
    },
    # The second layer is dense.
    "qwen3_moe": {
        "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 23, "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "arcee": {"mlp_bias": True},
    "seed_oss": {"attention_out_bias": True, "residual_dropout": 0.0},
    # Without rotation, a bias of k adds the same to all scores of a query, and its gradient is zero.
    "smollm3": {
        "mlp_bias": True, "no_rope_layers": [0, 1], "sliding_window": 11, "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "phi3": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.6}},
    "cohere": {"attention_bias": True, "logit_scale": 0.7, "use_qk_norm": True},
    "cohere2": {
        "logit_scale": 1.3, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11,
    },
    "gemma3_text": {
        "rope_parameters": {
            "full_attention": {**_ROPE, "rope_theta": 300_000.0}, "sliding_attention": _ROPE,
        },
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 11,
        "query_pre_attn_scalar": 17, "attention_bias": True, "final_logit_softcapping": 1.5,
    },
    # With this limit, many numbers are clipped.
    "olmo": {"attention_bias": True, "clip_qkv": 0.9},
    "olmo2": {"attention_bias": True},
    "olmo3": {
        "rope_parameters": {
            "full_attention": {**_ROPE, "rope_theta": 300_000.0}, "sliding_attention": _ROPE,
        },
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 11,
    },
    "glm4": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.4}},
    "granite": {
        "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.21, "embedding_multiplier": 3.0,
        "logits_scaling": 1.7, "residual_multiplier": 0.6,
    },
}  # fmt: skip
"""The fields of each family's config other than its sizes, with values that change the result.

Those of ``PER_LAYER`` are repeated for all layers.
"""


def config(
    family: str = "llama", heads: int = 24, kv_heads: int = 6, layers: int = 2, **more: Any
) -> PretrainedConfig:
    """Return a small config in which no two sizes are equal.

    With H query heads, the hidden size is 2*H, the head_dim 10 (so H*head_dim is another number), and the
    vocabulary has 101 tokens. A part of each head that is rotated is rounded to an even number of dimensions.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 2 * heads,
        "intermediate_size": 72,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_parameters": _ROPE,
        "attention_dropout": 0.0,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    fields = {**sizes, **OWN.get(family, {}), **more}
    # An even number of dimensions can be rotated.
    rope, dim = fields["rope_parameters"], fields["head_dim"]
    if "partial_rotary_factor" in rope:
        rotated = 2 * max(round(rope["partial_rotary_factor"] * dim / 2), 1)
        fields["rope_parameters"] = {**rope, "partial_rotary_factor": rotated / dim}
    for name in fields.keys() & set(PER_LAYER):
        fields[name] = (fields[name] * layers)[:layers]
    return FAMILIES[family](**fields)


def build(cfg: PretrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Return a model of transformers with sdpa or its own eager attention, and its own loop over experts.

    All parameters are random, because biases of 0 or norms of 1 could hide a bug.
    """
    torch.manual_seed(seed)
    attention = "eager" if cfg.model_type == "gpt_oss" else "sdpa"
    model = AutoModelForCausalLM.from_config(
        cfg, attn_implementation=attention, experts_implementation="eager", dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
            if parameter.ndim == 1:
                parameter.add_(1.0)
    # A plan has fake tensors, for which ``to`` fails.
    result: PreTrainedModel = model if dtype == torch.float64 else model.to(dtype)
    return result


def exact_rotary(model: nn.Module) -> nn.Module:
    """Let the rotary embedding compute in fp64, without code of the lab.

    The rope type is the default, or dynamic NTK scaling in a model that has computed no longer row before.
    """
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    head_dim, of_all = rotary.config.head_dim, rotary.config.rope_parameters
    kind = rotary.config.model_type

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        parameters = of_all if layer_type is None else of_all[layer_type]
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        base, length = parameters["rope_theta"], int(position_ids.max()) + 1
        if parameters["rope_type"] == "dynamic":
            ratio = max(length / rotary.config.max_position_embeddings, 1)
            base *= (1 + parameters["factor"] * (ratio - 1)) ** (dim / (dim - 2))
        half = position_ids.double()[..., None] * torch.exp(-powers * math.log(base))
        if kind.startswith("cohere"):
            angles = half.repeat_interleave(2, -1)
        else:
            angles = half if kind == "gpt_oss" else torch.cat((half, half), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = Patch(forward, rotary.forward)
    return model


@contextmanager
def exact_modules() -> Iterator[None]:
    """Let what the Gemma and Cohere families compute in fp32 be in fp64 if its input is, in this block.

    Their norms multiply by their scales in fp32, so the gradient of a scale is a sum over tokens in fp32,
    which depends on the order of the tokens by 1e-7. Other families multiply in the input's dtype. Cohere's
    own attention rotates q and k in fp32, and UPipe in the input's dtype. All models of this process are
    changed, so that a model with techniques is compared with a plain one with the same modules.
    """
    cohere: tuple[Any, ...] = (modeling_cohere, modeling_cohere2)
    changed: list[tuple[Any, str, Callable[..., Any]]] = [
        (GemmaRMSNorm, "forward", _gemma_norm),
        (Gemma3RMSNorm, "forward", _gemma_norm),
        (modeling_cohere.CohereLayerNorm, "forward", _cohere_norm),
        (modeling_cohere2.Cohere2LayerNorm, "forward", _cohere_norm),
        *((module, "apply_rotary_pos_emb", _cohere_rotation) for module in cohere),
    ]
    before = [getattr(place, name) for place, name, _ in changed]
    try:
        for place, name, exact in changed:
            setattr(place, name, exact)
        yield
    finally:
        for (place, name, _), own in zip(changed, before, strict=True):
            setattr(place, name, own)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _gemma_norm(norm: Any, x: Tensor) -> Tensor:
    wide = _wide(x)
    out: Tensor = norm._norm(wide) * (1.0 + norm.weight.to(wide.dtype))
    return out.type_as(x)


def _cohere_norm(norm: Any, x: Tensor) -> Tensor:
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    normalized = (wide - mean) * torch.rsqrt(variance + norm.variance_epsilon)
    out: Tensor = norm.weight.to(wide.dtype) * normalized
    return out.type_as(x)


def _cohere_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        wide = _wide(x)
        crossed = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
        return (wide * cos[:, None] + crossed * sin[:, None]).type_as(x)

    return rotate(q), rotate(k)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all labels, in the dtype of the logits but at least in fp32.

    The loss of transformers rounds fp64 to fp32.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter by name, and check that every parameter has one."""
    by_name = {name: p.grad for name, p in model.named_parameters()}
    missing = [name for name, gradient in by_name.items() if gradient is None]
    assert not missing, f"no gradient: {missing}"
    return {name: gradient for name, gradient in by_name.items() if gradient is not None}


def error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a gradient, in the Frobenius norm."""
    assert actual.keys() == expected.keys()
    assert all(actual[n].isfinite().all() and expected[n].norm() > 0 for n in expected)
    return max(
        float((actual[n].double() - expected[n].double()).norm() / expected[n].double().norm())
        for n in expected
    )
