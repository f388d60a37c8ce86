"""The attention kernels of this machine against its matrix product, each checked on slices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lab.bench.slice_check import slice_errors
from lab.bench.software import measured_on
from lab.bench.table import Row, Say
from lab.planning.costs import BACKWARD_FLOPS
from lab.techniques.attention.flash import Kernel, cuda_forward, flash_backward
from lab.techniques.attention.kernels import FASTEST_FIRST, KERNELS, kernel_support, missing_requirement
from lab.units import Ki, Mi, format_tokens

REPEATS = 5
HEADS, KV_HEADS, HEAD_DIM = 4, 1, 128
"""What a rank of 8 has of Llama3-8B inside Ulysses' exchange."""

FEW = 4096
"""Tokens of the call that comes before all others."""

FIGURES = (
    "forward s", "backward s", "TFLOP/s", "/ matmul", "worst error", "forward bytes", "backward bytes",
)  # fmt: skip
"""What is measured of a kernel at one length."""


def measure_attention(lengths: Sequence[int], say: Say) -> Iterator[Row]:
    """Yield a row a length and kernel that is here: median seconds forward and backward of causal attention.

    Of H/C = 4 heads, K/C = 1, D = 128, in bf16 (fp32 on CPU). The operations of forward and backward a second
    stand over those of a large matrix product in the same dtype, timed in turn with them. ``worst error`` is
    that of ``slice_errors``. A kernel that fails has its error instead of figures. Without lengths: 64K to 1M
    tokens on CUDA, 256 and 512 on CPU.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    machine = kernel_support(device)
    where = measured_on(device.type)
    for tokens in lengths or ((64 * Ki, 256 * Ki, Mi) if cuda else (256, 512)):
        for name in FASTEST_FIRST:
            if missing_requirement(name, machine, HEAD_DIM) is None:
                say(f"{name}, {format_tokens(tokens)} tokens")
                figures = _figures(name, tokens, device)
                yield {"kernel": name, "tokens": tokens, **figures, "machine": where}


def kernel_of(name: str, device: torch.device) -> Kernel:
    """The kernel of this name; torch's on CUDA without the refusal of counts that are to be measured here."""
    if name == "torch" and device.type == "cuda":
        return Kernel(cuda_forward, flash_backward)
    return KERNELS[name]


def _figures(name: str, tokens: int, device: torch.device) -> Row:
    try:
        return {**measured(kernel_of(name, device), tokens, device), "failed": None}
    except RuntimeError as error:
        return {**dict.fromkeys(FIGURES), "failed": str(error).partition("\n")[0]}


def measured(
    kernel: Kernel,
    tokens: int,
    device: torch.device,
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    repeats: int = REPEATS,
) -> dict[str, float | None]:
    """The figures of one kernel, by the names of ``FIGURES``: seconds are medians over ``repeats``.

    The first run gives the errors, and the bytes that forward and backward allocate at their highest (None
    on CPU); with ``repeats=0`` it gives the seconds too, for a length of which one run takes long.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=dtype, device=device)

    q, k, v, dout = (
        random(1, tokens, count, HEAD_DIM).transpose(1, 2) for count in (heads, kv_heads, kv_heads, heads)
    )
    # What a kernel makes when it is first called, a plan or a handle, is in no figure.
    few_dout, few_q, few_k, few_v = (x[:, :, :FEW] for x in (dout, q, k, v))
    kernel.backward(few_dout, few_q, few_k, few_v, *kernel.forward(few_q, few_k, few_v))
    (out, lse), forward_once, forward_bytes = _first(lambda: kernel.forward(q, k, v), device)
    gradients, backward_once, backward_bytes = _first(
        lambda: kernel.backward(dout, q, k, v, out, lse), device
    )
    worst = torch.tensor([*slice_errors(q, k, v, out, lse, (dout, *gradients)).values()]).max()
    del gradients
    size = 8192 if device.type == "cuda" else 512
    a, b = random(size, size), random(size, size)
    work: tuple[Callable[[], object], ...] = (
        lambda: kernel.forward(q, k, v),
        lambda: kernel.backward(dout, q, k, v, out, lse),
        lambda: [a @ b for _ in range(10)],
    )
    turns = [[_seconds(each, device) for each in work] for _ in range(repeats)]
    turns = turns or [[forward_once, backward_once, _seconds(work[-1], device)]]
    # Half of the square of scores, and two products over it in forward.
    flops = (1 + BACKWARD_FLOPS) * 2 * heads * tokens**2 * HEAD_DIM
    rates = [flops / (forward + backward) for forward, backward, _ in turns]
    products = [10 * 2 * size**3 / seconds for *_, seconds in turns]
    forward, backward, _ = (median(seconds) for seconds in zip(*turns, strict=True))
    shares = (rate / product for rate, product in zip(rates, products, strict=True))
    figures = (
        forward, backward, median(rates) / 1e12, median(shares), float(worst), forward_bytes,
        backward_bytes,
    )  # fmt: skip
    return dict(zip(FIGURES, figures, strict=True))


def _first(work: Callable[[], Any], device: torch.device) -> tuple[Any, float, int | None]:
    """The result, the seconds and the most bytes that it allocated, its result among them."""
    if device.type == "cpu":
        start = time.perf_counter()
        return work(), time.perf_counter() - start, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held, start = torch.cuda.memory_allocated(device), time.perf_counter()
    result = work()
    torch.cuda.synchronize(device)
    return result, time.perf_counter() - start, torch.cuda.max_memory_allocated(device) - held


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
