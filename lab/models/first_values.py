"""The first values of a model's parameters, each a function of the seed, the parameter's name and the index.

No generator has a state, so any part of a parameter can be made alone, by the rank that holds it and on the
device where it is stored. Everything up to one last product is integer arithmetic, in which CPU and CUDA
agree, so the values depend neither on the number of ranks nor on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lab.errors import ModelError

WORDS = 3
"""Random words of 64 bits an element, each taken as four whole numbers of 16 bits."""

_STEP = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LANES = 0x0000FFFF0000FFFF


def piece_elements(device_type: str) -> int:
    """Return how many elements are made at once, which take 32 bytes each while they are made.

    On a CPU they fit its cache. On a GPU they are so many that a kernel takes longer than its start.
    """
    return 2**15 if device_type == "cpu" else 2**20


@torch.no_grad()
def fill(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter its first values, in place; of one that is sharded, this rank's shard.

    The distribution is that of transformers' ``_init_weights``: weights of linear maps and embeddings are
    normal with ``config.initializer_range`` (the row of ``padding_idx`` zero), weights of norms one, biases
    zero. A parameter in two places has the first one's name.

    Raises:
        ModelError: a parameter of another kind of module.
    """
    std = model.config.initializer_range or 0.02
    for name, module, parameter in _owned(model):
        local, first_row = shard_of(parameter)
        kind = type(module)
        if isinstance(module, nn.Linear | nn.Embedding) and name.endswith("weight"):
            normal_(local, seed=seed, name=name, start=first_row * parameter.shape[1:].numel(), std=std)
            padding = module.padding_idx if isinstance(module, nn.Embedding) else None
            if padding is not None and first_row <= padding < first_row + len(local):
                local[padding - first_row].zero_()
        elif isinstance(module, nn.Linear | nn.Embedding) or "Norm" in kind.__name__:
            local.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            raise ModelError(f"{name} is a parameter of a {kind.__name__}: it is not known how it begins")


def shard_of(parameter: Tensor) -> tuple[Tensor, int]:
    """What this rank holds of a parameter that FSDP may have sharded, and the first row of it."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    # Of the mesh only the list of ranks is asked: DTensor may return one of an earlier group that compares
    # equal, in which this process was another rank.
    ranks: list[int] = parameter.device_mesh.mesh.tolist()
    rows = -(-len(parameter) // len(ranks))
    return parameter.to_local(), min(ranks.index(dist.get_rank()) * rows, len(parameter))


def normal_(out: Tensor, *, seed: int, name: str, start: int, std: float) -> None:
    """Fill ``out`` with the normal numbers of elements ``start``, ``start`` + 1, ... of a parameter.

    An element is the sum of 12 uniform numbers of 16 bits (Irwin-Hall), less its mean, times ``std`` over its
    standard deviation, 2**16 up to one part in 2**33: no further than 6 standard deviations from 0, with a
    kurtosis of 2.9. The uniform numbers are the words 3i, 3i + 1 and 3i + 2, for element i, of splitmix64
    that starts at a hash of seed and name. Source: Steele, Lea and Flood, Fast splittable pseudorandom number
    generators (OOPSLA 2014).
    """
    key = _signed(int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little"))
    for piece in out.view(-1).split(piece_elements(out.device.type)):
        # A sum is exact in fp32, and its product with this number is rounded once.
        piece.copy_(_sums(key, start, len(piece), out.device).to(torch.float32).mul_(std / 2**16))
        start += len(piece)


def _sums(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """The sums of 12 uniform whole numbers of 16 bits, less their mean, of ``count`` elements; int64."""
    first, end = WORDS * start, WORDS * (start + count)
    counter = torch.arange(first, end, WORDS, dtype=torch.int64, device=device)
    counter.mul_(_signed(_STEP)).add_(key)
    total, word, scratch = torch.zeros_like(counter), torch.empty_like(counter), torch.empty_like(counter)
    for _ in range(WORDS):
        _mix(word.copy_(counter.add_(_signed(_STEP))), scratch)
        # Two sums of numbers of 16 bits, each in one half of 64: six of them take 19 bits.
        total.add_(torch.bitwise_and(word, _LANES, out=scratch))
        total.add_(word.bitwise_right_shift_(16).bitwise_and_(_LANES))
    torch.bitwise_right_shift(total, 32, out=scratch)
    return total.bitwise_and_(0xFFFFFFFF).add_(scratch).sub_(2 * WORDS * 0xFFFF)


def _mix(word: Tensor, scratch: Tensor) -> None:
    """splitmix64's mixing of 64 bits, in place."""
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1]), (31, None)):
        # int64 shifts its sign in, where 64 bits without a sign shift in zeros.
        torch.bitwise_right_shift(word, shift, out=scratch)
        word.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            word.mul_(_signed(factor))


def _signed(bits: int) -> int:
    """The int64 that has these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Each parameter once, with its name and the module it stands in first."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        yield name, modules[name.rpartition(".")[0]], parameter
