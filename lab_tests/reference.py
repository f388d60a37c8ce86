"""The model everything is held against: transformers' own, with sdpa, its rotary tables in fp64."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCABULARY, HEAD_DIM = 101, 10
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}


def config(
    family: str = "llama", heads: int = 24, kv_heads: int = 6, layers: int = 2, **more: Any
) -> LlamaConfig:
    """A small config in which no two sizes coincide: E=2H, D=10 (so H*D != E), V=101."""
    if family == "mistral":
        more.setdefault("sliding_window", None)
    sizes = {
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
    }
    return FAMILIES[family](**{**sizes, **more})


def build(cfg: LlamaConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Transformers' model with sdpa, every parameter random: a bug hides behind biases of 0, norms of 1."""
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
    """Sum over b*s labels in the dtype of the logits but at least fp32; transformers' rounds fp64 to fp32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")


def truth(
    cfg: LlamaConfig, ids: Tensor, dtype: torch.dtype = torch.float64, rounded: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain model in one process; the labels are ``ids`` turned by one.

    ``rounded``: the weights are those of a model of this dtype, whatever the arithmetic.
    """
    model = exact_rotary(build(cfg, rounded or dtype).to(dtype))
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


def worst_errors(
    cfg: LlamaConfig,
    ids: Tensor,
    model: nn.Module,
    positions: Tensor,
    group: dist.ProcessGroup,
    right: tuple[Tensor, dict[str, Tensor]] | None = None,
) -> tuple[float, float]:
    """Relative error of the loss and of the worst gradient, in fp64 unless ``right`` is given."""
    found_loss, found = sharded(model, ids, positions, group)
    right_loss, grads = right or truth(cfg, ids)
    return abs(float(found_loss / right_loss) - 1), error(found, grads)


def subgroup(size: int) -> dist.ProcessGroup:
    """This rank's group of consecutive ranks; every rank must call it."""
    groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)
    ]
    return groups[dist.get_rank() // size]


class Calls(TorchDispatchMode):
    """Counts the operators that are called: ``with Calls() as calls: ...; calls["all_to_all"]``."""

    NAMES: ClassVar[dict[str, str]] = {
        "c10d::alltoall_base_": "all_to_all",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention forward",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention backward",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __getitem__(self, name: str) -> int:
        assert name in self.NAMES.values()
        return self.counts[name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self.NAMES.get(func._schema.name, "")] += 1
        return func(*args, **(kwargs or {}))
