"""What every rank of a group must hold alike: one number a rank, compared before anything is computed."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from lab.errors import LabError
from lab.techniques.exchange import size_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_weights(model: nn.Module, recipe: str, group: dist.ProcessGroup | None) -> None:
    """Refuse a model whose weights, frozen or trained, or whose recipe differ between the ranks of ``group``.

    Replicas that begin apart stay apart, and FSDP would put shards of several models together.

    Costs: one pass over the parameters, and 16 bytes from each rank. Under fake tensors nothing is compared.

    Raises:
        LabError: the ranks that differ.
    """
    parameters = list(model.named_parameters())
    if size_of(group) == 1 or any(isinstance(p, FakeTensor) for _, p in parameters):
        return
    device = parameters[0][1].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, parameter in parameters:
        # Two parameters with each other's weights differ, and so does one that a rank has frozen.
        said = f"{name} {list(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        total = total * 31 + crc32(said.encode()) + checksum(parameter.detach())
    _check_same("another recipe", crc32(recipe.encode()), group, device, "apply one recipe on every rank")
    _check_same(
        "other weights, or trains others of them,",
        int(total),
        group,
        device,
        "build the model from one seed or checkpoint on every rank",
    )


def check_same_tokens(input_ids: Tensor, group: dist.ProcessGroup | None) -> None:
    """Refuse a batch that is not the same on every rank of ``group``.

    Costs: one pass over the tokens, and 8 bytes from each rank. Under fake tensors nothing is compared.

    Raises:
        LabError: the ranks that differ.
    """
    if size_of(group) == 1 or isinstance(input_ids, FakeTensor):
        return
    shape = crc32(str(list(input_ids.shape)).encode())
    found = int(checksum(input_ids.flatten())) + shape
    works = "give every rank the whole batch, and shard_batch takes its part"
    _check_same("other tokens", found, group, input_ids.device, works)


def checksum(x: Tensor) -> Tensor:
    """A number made of the bits of ``x`` [n, ...], int64; other bits, or rows in another order, change it."""
    bits = x.contiguous().view(_INTEGERS[x.element_size()])
    rows = bits.flatten(1).sum(1, dtype=torch.int64) if bits.dim() > 1 else bits.long()
    return (rows * torch.arange(1, len(rows) + 1, device=x.device)).sum()


def _check_same(
    what: str, value: int, group: dist.ProcessGroup | None, device: torch.device, works: str
) -> None:
    own = torch.tensor([value], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(size_of(group))]
    dist.all_gather(gathered, own, group=group)
    values = [int(one) for one in gathered]
    common = Counter(values).most_common(1)[0][0]
    others = [str(rank) for rank, one in enumerate(values) if one != common]
    if others:
        ranks = f"ranks {', '.join(others)} hold" if len(others) > 1 else f"rank {others[0]} holds"
        raise LabError(f"{ranks} {what} than the others: {works}")
