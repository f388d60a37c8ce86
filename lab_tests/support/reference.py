"""Helpers of the parity tests around the reference model of ``lab.bench.reference``."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from lab.bench.reference import VOCABULARY, build, error, exact_rotary, gradients, loss_of


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


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
