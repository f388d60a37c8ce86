"""Devices and links, each figure with its source, and the bytes CUDA takes behind the dispatcher's back.

Two uses: estimates of time divide work by the rates of ``HARDWARE``, and a plan for a CUDA device adds the
workspace model to what a meter counts. No figure here is fitted to a published training run: those are kept
to compare with. A source that says *assumed*, or names another device, is a measurement of something else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lab.errors import LabError
from lab.memory.workspace import Workspace
from lab.units import GiB, MiB


@dataclass(frozen=True)
class Figure:
    """A number, its unit ("FLOP/s", "B/s", "B", or "1" for counts and shares), and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Hardware:
    """One GPU and what connects it. A share is what real software reaches of the figure above it.

    Attributes:
        memory: bytes that torch reports as the device's total, less than the name promises.
        matmul: dense bf16 peak; ``matmul_share`` of large matrices.
        attention_forward, attention_backward: flash attention in half precision, head_dim 128, long causal
            sequences, counting half of the square of scores; no share, because it is measured.
        memory_rate: of the device's own memory; ``memory_share`` of a large copy, reads and writes counted.
        link: to the other GPUs of a node, each direction; ``link_share`` of NCCL, all-reduce left aside.
        network: to other nodes, each GPU, each direction.
        host_link: to host memory, each direction; ``host_link_share`` of pinned copies, one GPU copying.
            Eight at once are also bounded by host memory, which is not modelled.
    """

    name: str
    memory: Figure
    matmul: Figure
    matmul_share: Figure
    attention_forward: Figure
    attention_backward: Figure
    memory_rate: Figure
    memory_share: Figure
    link: Figure
    link_share: Figure
    network: Figure
    network_share: Figure
    host_link: Figure
    host_link_share: Figure


_MATMULS = "ml-engineering (S. Bekman), compute/accelerator, table of maximum achievable matmul FLOPS, bf16"
_AZURE = "Azure AI-benchmarking-guide, Azure_Results"

_H100 = Hardware(
    name="NVIDIA H100 SXM 80GB",
    memory=Figure(81089 * MiB, "B", "torch device properties of an H100 80GB HBM3, total_memory=81089MB"),
    matmul=Figure(
        989e12, "FLOP/s", "datasheet: NVIDIA H100 SXM, 1979 TFLOP/s with sparsity, half when dense"
    ),
    matmul_share=Figure(794.5 / 989, "1", f"{_MATMULS}: 794.5 of 989"),
    attention_forward=Figure(616e12, "FLOP/s", "FlashAttention-3, arXiv 2407.08608, figure 5d: causal, 16k"),
    attention_backward=Figure(
        561e12,
        "FLOP/s",
        "FlashAttention-3, arXiv 2407.08608, figure 6b, 16k; assumed for causal: it plots no causal backward",
    ),
    memory_rate=Figure(3.35e12, "B/s", "datasheet: NVIDIA H100 SXM"),
    memory_share=Figure(2.90 / 3.35, "1", f"{_AZURE}, ND_H100_v5, HBM bandwidth, copy: 2.90 TB/s"),
    link=Figure(450e9, "B/s", "datasheet: NVIDIA H100 SXM, NVLink 900 GB/s, both directions together"),
    link_share=Figure(370 / 450, "1", "NVIDIA/nccl-tests issue 212, a maintainer: 370 GB/s of busbw"),
    network=Figure(50e9, "B/s", "datasheet: NVIDIA DGX H100, one 400 Gb/s NDR InfiniBand adapter a GPU"),
    network_share=Figure(48.5 / 50, "1", "NVIDIA/nccl-tests issue 267, a maintainer: 48 to 49 GB/s a NIC"),
    host_link=Figure(64e9, "B/s", "datasheet: NVIDIA H100 SXM, PCIe Gen5 128 GB/s, both directions together"),
    host_link_share=Figure(51 / 64, "1", f"{_AZURE}, ND_H100_v5, nvbandwidth: 51 GB/s to the device"),
)

_H200 = replace(
    _H100,
    name="NVIDIA H200 SXM 141GB",
    memory=Figure(143156 * MiB, "B", "torch device properties of an H200, total_memory=143156MB"),
    memory_rate=Figure(4.8e12, "B/s", "datasheet: NVIDIA H200 SXM"),
    memory_share=Figure(4.01 / 4.8, "1", f"{_AZURE}, ND_H200_v5, HBM bandwidth, copy: 4.01 TB/s"),
    host_link_share=Figure(52 / 64, "1", f"{_AZURE}, ND_H200_v5, nvbandwidth: 52 GB/s each way"),
    **{
        name: replace(figure, source=f"as the H100, the same cores and links: {figure.source}")
        for name, figure in vars(_H100).items()
        if name.startswith(("matmul", "attention", "link", "network")) or name == "host_link"
    },
)

_FLASH_2 = "FlashAttention-2, arXiv 2307.08691, figure 4d: causal, 16k, forward and backward together"

_A100 = Hardware(
    name="NVIDIA A100 SXM 80GB",
    memory=Figure(
        81050 * MiB, "B", "ml-engineering, training/performance, mem_get_info on an A100: 79.15GiB"
    ),
    matmul=Figure(312e12, "FLOP/s", "datasheet: NVIDIA A100 80GB SXM"),
    matmul_share=Figure(271.2 / 312, "1", f"{_MATMULS}: 271.2 of 312"),
    attention_forward=Figure(189e12, "FLOP/s", _FLASH_2),
    attention_backward=Figure(189e12, "FLOP/s", _FLASH_2),
    memory_rate=Figure(2.039e12, "B/s", "datasheet: NVIDIA A100 80GB SXM"),
    memory_share=Figure(1.61 / 2.039, "1", f"{_AZURE}, ND_A100_v4, HBM bandwidth, copy: 1.61 TB/s"),
    link=Figure(300e9, "B/s", "datasheet: NVIDIA A100 80GB SXM, NVLink 600 GB/s, both directions together"),
    # No NVLink SHARP on this generation: an all-reduce tells what the wire carries.
    link_share=Figure(231.58 / 300, "1", f"{_AZURE}, ND_A100_v4, NCCL all-reduce, 8 GB: 231.58 of busbw"),
    network=Figure(25e9, "B/s", "datasheet: NVIDIA DGX A100, one 200 Gb/s HDR InfiniBand adapter a GPU"),
    network_share=replace(_H100.network_share, source=f"assumed from NDR: {_H100.network_share.source}"),
    host_link=Figure(32e9, "B/s", "datasheet: NVIDIA A100 80GB SXM, PCIe Gen4 64 GB/s, both directions"),
    host_link_share=Figure(26.28 / 32, "1", f"{_AZURE}, ND_A100_v4, nvbandwidth, to the device: 26.28 GB/s"),
)

HARDWARE = {"h100": _H100, "h200": _H200, "a100": _A100}
"""The devices by short name."""


def hardware(name: str) -> Hardware:
    """The device of this name.

    Raises:
        LabError: a name that is not in the table, and those that are.
    """
    if name not in HARDWARE:
        raise LabError(f"no device named {name!r}: the table has {', '.join(sorted(HARDWARE))}")
    return HARDWARE[name]


def nearest(torch_name: str) -> str:
    """The short name of the device that torch calls ``torch_name``; the slowest device's if it is unknown."""
    return of_name(torch_name) or min(HARDWARE, key=lambda name: HARDWARE[name].matmul.value)


def of_name(torch_name: str) -> str | None:
    """The short name of the device that torch calls ``torch_name``; None if it is not in the table."""
    return next((name for name in HARDWARE if name in torch_name.lower()), None)


# ---- the CUDA workspace model: what a meter at the dispatcher cannot see -----------------------------------

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
