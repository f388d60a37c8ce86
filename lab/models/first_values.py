"""The first values of parameters: each is a function of the seed, the parameter's name and the index.

There is no generator with a state. So a rank can compute its part of a parameter alone, on the device that
stores it. All arithmetic but the last product is on integers, for which CPU and CUDA give the same results.
So the values depend neither on the number of ranks nor on the device.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lab.errors import ModelError
from lab.models.lora import is_adapter, plain_name

WORDS = 3
"""Random words of 64 bits for each element. Each word is used as four whole numbers of 16 bits."""

_STEP = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LANES = 0x0000FFFF0000FFFF


def piece_elements(device_type: str) -> int:
    """Return how many elements are computed at once. Each takes 32 bytes of scratch memory.

    On a CPU these bytes fit into the cache. On a GPU there are enough elements that a kernel runs longer than
    its launch takes.
    """
    return 2**15 if device_type == "cpu" else 2**20


@torch.no_grad()
def fill(
    model: PreTrainedModel, seed: int, *, adapters_alone: bool = False, device: torch.device | None = None
) -> None:
    """Write the first values into every parameter, or into this rank's shard of it.

    The distribution is that of transformers' ``_init_weights``. Normal values, with the standard deviation
    ``config.initializer_range``, are for the weights of linear maps, embeddings and experts, the weights and
    biases of routers, and sinks; the row of ``padding_idx`` is zero. Weights of norms are one, and all other
    biases are zero. A tied parameter has the name of its first place.

    A LoRA adapter B @ A has the values of PEFT's ``init_lora_weights="gaussian"``: A [r, in] is normal with
    the standard deviation 1/r, and B is zero. The other parameters have the values that they have without
    adapters.

    Args:
        model: The model.
        seed: The seed.
        adapters_alone: Whether only the parameters of adapters are written.
        device: Where the values are computed; None for the device of each parameter. A GPU is faster than the
            host for parameters in host memory.

    Raises:
        ModelError: A parameter belongs to another kind of module.
    """
    usual = model.config.initializer_range or 0.02
    for name, parameter in model.named_parameters():
        if adapters_alone and not is_adapter(name):
            continue
        std = 1 / len(parameter) if ".lora_A." in name else usual
        local, first_row = shard_of(parameter)
        module = model.get_submodule(name.rpartition(".")[0])
        kind = type(module)
        if ".lora_B." in name:
            local.zero_()
        elif _is_normal(module, name):
            start = first_row * parameter.shape[1:].numel()
            normal_(local, seed=seed, name=plain_name(name), start=start, std=std, device=device)
            padding = module.padding_idx if isinstance(module, nn.Embedding) else None
            if padding is not None and first_row <= padding < first_row + len(local):
                local[padding - first_row].zero_()
        elif isinstance(module, nn.Linear | nn.Embedding) or kind.__name__.endswith(("Norm", "Experts")):
            local.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            raise ModelError(
                f"{name} is a parameter of a {kind.__name__}: only linear maps, embeddings, experts and "
                "norms have first values here"
            )


def _is_normal(module: nn.Module, name: str) -> bool:
    """Return whether a parameter has normal first values; see ``fill``."""
    if type(module).__name__.endswith(("Experts", "TopKRouter")) or name.endswith(".sinks"):
        return not name.endswith("_proj_bias")
    return isinstance(module, nn.Linear | nn.Embedding) and name.endswith("weight")


def shard_of(parameter: Tensor) -> tuple[Tensor, int]:
    """Return the rows of a parameter that this rank holds, and the index of the first of them.

    Without FSDP these are all rows.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    # Only the list of ranks is read from the mesh. The mesh may belong to an earlier process group that
    # compares equal, in which this process had another rank.
    mesh = parameter.device_mesh.mesh
    # Over the last axis it is sharded; over one before it, replicated.
    shards, ranks = mesh.shape[-1], mesh.flatten().tolist()
    rows = -(-len(parameter) // shards)
    return parameter.to_local(), min(ranks.index(dist.get_rank()) % shards * rows, len(parameter))


def normal_(
    out: Tensor, *, seed: int, name: str, start: int, std: float, device: torch.device | None = None
) -> None:
    """Fill ``out`` with normal numbers: the elements ``start``, ``start`` + 1, ... of a parameter.

    An element is the sum of 12 uniform whole numbers of 16 bits (Irwin-Hall), minus the mean of that sum, and
    scaled to the standard deviation ``std``. The sum's own standard deviation is 2**16, up to one part in
    2**33. No element is further than 6 standard deviations from 0, and the kurtosis is 2.9. The uniform
    numbers of element i are the words 3i, 3i + 1 and 3i + 2 of splitmix64, whose state starts at a hash of
    the seed and the name. Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators
    (OOPSLA 2014).
    """
    key = _signed(int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little"))
    device = device or out.device
    for piece in out.view(-1).split(piece_elements(device.type)):
        # The sum is exact in fp32. Only the product is rounded.
        piece.copy_(_sums(key, start, len(piece), device).to(torch.float32).mul_(std / 2**16))
        start += len(piece)


def _sums(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return the sums of 12 uniform numbers of 16 bits minus their mean, for ``count`` elements, in int64."""
    first, end = WORDS * start, WORDS * (start + count)
    counter = torch.arange(first, end, WORDS, dtype=torch.int64, device=device)
    counter.mul_(_signed(_STEP)).add_(key)
    total, word, scratch = torch.zeros_like(counter), torch.empty_like(counter), torch.empty_like(counter)
    for _ in range(WORDS):
        _mix(word.copy_(counter.add_(_signed(_STEP))), scratch)
        # Each half of the 64 bits has a sum of six numbers of 16 bits, which takes 19 bits.
        total.add_(torch.bitwise_and(word, _LANES, out=scratch))
        total.add_(word.bitwise_right_shift_(16).bitwise_and_(_LANES))
    torch.bitwise_right_shift(total, 32, out=scratch)
    return total.bitwise_and_(0xFFFFFFFF).add_(scratch).sub_(2 * WORDS * 0xFFFF)


def _mix(word: Tensor, scratch: Tensor) -> None:
    """Mix 64 bits in place, as splitmix64 does."""
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1]), (31, None)):
        # A right shift of int64 copies the sign bit, and the unsigned shift of splitmix64 adds zeros.
        torch.bitwise_right_shift(word, shift, out=scratch)
        word.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            word.mul_(_signed(factor))


def _signed(bits: int) -> int:
    """Return the int64 of these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
