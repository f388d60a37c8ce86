"""The model everything is held against: transformers' own, with sdpa, its rotary tables in fp64.

transformers' eager attention takes its softmax in fp32 and its rotary tables are fp32, so two right fp64
models differ by 1e-7 there; against this one a right model agrees to 1e-15. Its norms go through fp32 and
stay as they are: the techniques call the very same ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from lab.decoder import Patch

VOCABULARY, HEAD_DIM = 101, 10
FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "arcee": ArceeConfig,
    "granite": GraniteConfig,
    "starcoder2": Starcoder2Config,
}

OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "arcee": {"mlp_bias": True},
    "granite": {
        "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.21, "embedding_multiplier": 3.0,
        "logits_scaling": 1.7, "residual_multiplier": 0.6,
    },
}  # fmt: skip
"""What a family's config says beside its sizes, so that each of its own fields matters."""


def config(
    family: str = "llama", heads: int = 24, kv_heads: int = 6, layers: int = 2, **more: Any
) -> PretrainedConfig:
    """A small config in which no two sizes coincide: E=2H, D=10 (so H*D != E), V=101."""
    sizes: dict[str, Any] = {
        "hidden_size": 2 * heads,
        "intermediate_size": 72,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_dropout": 0.0,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return FAMILIES[family](**{**sizes, **OWN.get(family, {}), **more})


def build(cfg: PretrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Transformers' model with sdpa, every parameter random: a bug hides behind biases of 0, norms of 1."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(cfg, attn_implementation="sdpa", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
            if parameter.ndim == 1:
                parameter.add_(1.0)
    # Fake tensors, which a plan is made of, cannot be moved.
    built: PreTrainedModel = model if dtype == torch.float64 else model.to(dtype)
    return built


def exact_rotary(model: nn.Module) -> nn.Module:
    """Patch the rotary embedding of the default type to fp64 from rope_theta, independently of the lab's."""
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    theta, dim = rotary.config.rope_parameters["rope_theta"], rotary.config.head_dim

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        half = position_ids.double()[..., None] * torch.exp(-powers * math.log(theta))
        angles = torch.cat((half, half), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = Patch(forward, rotary.forward)
    return model


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over b*s labels in the dtype of the logits but at least fp32; transformers' rounds fp64 to fp32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient by name; it is an error if one has none."""
    held = {name: p.grad for name, p in model.named_parameters()}
    missing = [name for name, gradient in held.items() if gradient is None]
    assert not missing, f"no gradient: {missing}"
    return {name: gradient for name, gradient in held.items() if gradient is not None}


def error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The worst relative Frobenius error of any parameter's gradient."""
    assert found.keys() == right.keys()
    assert all(found[n].isfinite().all() and right[n].norm() > 0 for n in right)
    return max(
        float((found[n].double() - right[n].double()).norm() / right[n].double().norm()) for n in right
    )
