"""The model everything is held against: transformers' own, with sdpa, its rotary tables in fp64."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCABULARY, WIDTH, HEAD_DIM = 101, 48, 10
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}


def config(
    family: str = "llama", heads: int = 24, kv_heads: int = 6, layers: int = 2, **more: Any
) -> LlamaConfig:
    """A small config in which no two sizes coincide: E=48, D=10 (so H*D != E), V=101."""
    if family == "mistral":
        more.setdefault("sliding_window", None)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 72,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_dropout": 0.0,
    }
    return FAMILIES[family](**{**sizes, **more})


def build(cfg: LlamaConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Transformers' model with sdpa, every parameter random: biases and norms too, or a bug hides in a zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(cfg, attn_implementation="sdpa", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
            if parameter.ndim == 1:
                parameter.add_(1.0)
    return model.to(dtype)


def exact_rotary(model: nn.Module) -> nn.Module:
    """Patch the rotary embedding of the default type to fp64 from rope_theta, independently of the lab's."""
    rotary = model.model.rotary_emb
    theta, dim = rotary.config.rope_parameters["rope_theta"], rotary.config.head_dim

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        half = position_ids.double()[..., None] * torch.exp(-powers * math.log(theta))
        angles = torch.cat((half, half), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = forward
    return model


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over b*S labels, one a token, in the dtype of the logits but at least fp32.

    Transformers' own loss rounds fp64 logits to fp32.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")


def truth(
    cfg: LlamaConfig, ids: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain model in one process; the labels are ``ids`` turned by one."""
    model = exact_rotary(build(cfg, dtype))
    loss = loss_of(model(input_ids=ids, use_cache=False).logits, ids.roll(-1, 1)) / ids.numel()
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: p.grad for name, p in model.named_parameters()}


def sharded(
    model: nn.Module, ids: Tensor, positions: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a model of which each rank of ``group`` holds the tokens at ``positions`` [s]."""
    logits = model(
        input_ids=ids[:, positions], position_ids=positions[None].expand(len(ids), -1), use_cache=False
    ).logits
    loss = loss_of(logits, ids.roll(-1, 1)[:, positions]) / ids.numel()
    loss.backward()
    total, grads = loss.detach().clone(), gradients(model)
    dist.all_reduce(total, group=group)
    for name, grad in grads.items():
        # bf16 is summed in fp32: what is measured is the technique, not the sum over ranks
        grads[name] = grad.to(torch.promote_types(grad.dtype, torch.float32))
        dist.all_reduce(grads[name], group=group)
    return total, grads


def error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The worst relative Frobenius error of any parameter's gradient."""
    assert found.keys() == right.keys()
    assert all(found[n].isfinite().all() and right[n].norm() > 0 for n in right)
    return max(
        float((found[n].double() - right[n].double()).norm() / right[n].double().norm()) for n in right
    )


def subgroup(size: int) -> dist.ProcessGroup:
    """This rank's group of consecutive ranks; every rank must call it."""
    groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)
    ]
    return groups[dist.get_rank() // size]
