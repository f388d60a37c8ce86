"""The CUDA workspace model: the bytes that CUDA takes and that a meter at the dispatcher cannot see.

A plan for a CUDA device adds them to what the meter counts. Each figure has its source.
"""

from __future__ import annotations

from typing import Any

from lab.memory.workspace import Workspace
from lab.planning.hardware import Figure
from lab.units import GiB, MiB

_ATEN = "PyTorch, aten/src/ATen"
_CONTEXT = "ml-engineering, training/performance: with every kernel of torch 2.1.1 loaded; 0.47 GiB with one"
# 0.5 + 4.7 + 4 MiB to receive in three protocols and a header to send, each rounded up to 2 MiB.
_CONNECTION = "NCCL 2.30, src/transport/p2p.cc and src/init.cc; the 10 + 2 MiB of NVIDIA/nccl issue 1685"

BLOCK = Figure(512, "B", "PyTorch, c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize")
CUDA_CONTEXT = Figure(0.92 * GiB, "B", _CONTEXT)
CUBLAS_WORKSPACE = Figure(32 * MiB, "B", f"{_ATEN}/cuda/CublasHandlePool.cpp, Hopper; 8.1 MiB before it")
CUBLAS_HANDLES = Figure(2, "1", f"{_ATEN}/cuda/CublasHandlePool.cpp: one a thread, autograd's is the other")
NCCL_CONNECTION = Figure(12 * MiB, "B", _CONNECTION)
NCCL_PAIR_CHANNELS = Figure(32, "1", "NVIDIA/nccl issue 1685: an all-to-all on 8 x H100, each pair")
NCCL_RING_CHANNELS = Figure(24, "1", "assumed from public logs of NCCL_DEBUG=INFO: 24 coll channels")
NODE = 8  # GPUs that NVLink joins


def rounded(nbytes: int) -> int:
    """Bytes of the block that the caching allocator hands out for a tensor; an empty one takes none.

    With expandable segments what is left of a segment goes to other tensors, and the device is asked for
    pages of 20 MiB (2 MiB for tensors up to 1 MiB). Without them a remainder of up to 1 MiB is lost.
    """
    return _up(nbytes, int(BLOCK.value))


def flash_backward_workspace(
    batch: int, heads: int, kv_heads: int, tokens_q: int, tokens_k: int, head_dim: int, *, copies: int = 0
) -> int:
    """Bytes that torch's CUDA flash backward allocates inside itself and frees before it returns.

    In half precision, of b sequences, h query heads and D rounded up to 8: an fp32 dq [b, S, h, D], S rounded
    up to 128 and D to 32 (to 64 above 128); the row sums of out * grad_out, fp32 [b, h, S]; and for grouped
    queries dk and dv of all h heads [b, S', h, D], summed over the groups at the end. ``copies`` is how many
    of out and grad_out do not lie in memory as [b, S, h, D] without gaps: each is copied first. The forward
    of a long sequence allocates its results and nothing else.

    Source: PyTorch, aten/src/ATen/native/transformers/cuda: mha_bwd in flash_attn/flash_api.cpp (not its
    deterministic mode, which keeps many dq), _flash_attention_backward in attention_backward.cu.
    """
    dim = _up(head_dim, 8)
    rows = batch * heads * _up(tokens_q, 128)
    tensors = [4 * rows * _up(dim, 32 if dim <= 128 else 64), 4 * rows]
    if heads != kv_heads:
        tensors += [2 * batch * heads * tokens_k * dim] * 2
    tensors += [2 * batch * heads * tokens_q * dim] * copies
    return sum(map(rounded, tensors))


def fixed_workspace(ranks: int) -> int:
    """Bytes a rank holds from its first step on, whatever the shapes: CUDA, cuBLAS, and NCCL's buffers.

    One communicator over all ranks, with an all-to-all (a connection to each other GPU of a node of 8) and a
    ring; each communicator more takes its own. Connections to other nodes and NVLink SHARP are left out.
    Eight ranks come to 3.9 GiB; NVIDIA/nccl issue 1685 saw 4.3 GB on 8 x H100 after its first all-to-all.
    """
    return int(CUBLAS_HANDLES.value * CUBLAS_WORKSPACE.value) + outside_workspace(ranks)


def outside_workspace(ranks: int) -> int:
    """The part of it that torch does not count as allocated: all but the cuBLAS workspaces."""
    return int(CUDA_CONTEXT.value) + nccl_workspace(ranks)


def nccl_workspace(ranks: int) -> int:
    """Bytes of NCCL's buffers on each of ``ranks`` ranks; a single rank has none."""
    if ranks == 1:
        return 0
    pairs = (min(ranks, NODE) - 1) * NCCL_PAIR_CHANNELS.value
    return int((pairs + NCCL_RING_CHANNELS.value) * NCCL_CONNECTION.value)


def cuda_workspace(ranks: int) -> Workspace:
    """What CUDA takes on each of ``ranks`` ranks, by the model above."""
    return Workspace(fixed_workspace(ranks), rounded, _inside_kernel)


def _inside_kernel(op: str, args: tuple[Any, ...]) -> int:
    if op != "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return 0
    (batch, heads, tokens, head_dim), (_, kv_heads, keys, _) = args[1].shape, args[2].shape
    copies = sum(not x.transpose(1, 2).is_contiguous() for x in (args[0], args[4]))
    return flash_backward_workspace(batch, heads, kv_heads, tokens, keys, head_dim, copies=copies)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
