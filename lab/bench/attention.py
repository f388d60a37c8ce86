"""Attention kernels compared with a large matrix product, and checked on slices of their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lab.bench.slice_check import slice_errors
from lab.bench.software import device_and_versions
from lab.bench.table import Row, Say
from lab.planning.costs import BACKWARD_FLOPS
from lab.techniques.attention.flash import Kernel, cuda_forward, flash_backward
from lab.techniques.attention.kernels import FASTEST_FIRST, KERNELS, kernel_support, missing_requirement
from lab.units import Ki, Mi, format_tokens

REPEATS = 5
HEADS, KV_HEADS, HEAD_DIM = 4, 1, 128
"""The heads that a rank of 8 has in the attention of Llama3-8B, after the exchange of Ulysses."""

FIRST_TOKENS = 4096
"""The tokens of the first call of a kernel, which is not measured."""

FIGURES = (
    "forward s", "backward s", "TFLOP/s", "/ matmul", "worst error", "forward bytes", "backward bytes",
)  # fmt: skip
"""The figures of a kernel at one length."""


def measure_attention(lengths: Sequence[int], say: Say) -> Iterator[Row]:
    """Measure causal attention with each kernel of this machine, at each length.

    A rank has 4 query heads and 1 key/value head of 128 values, in bf16, or in fp32 on CPU. The operations a
    second of forward and backward are divided by those of a large matrix product in the same dtype; the two
    take turns.

    Args:
        lengths: Numbers of tokens. Without any: 64K to 1M on CUDA, 256 and 512 on CPU.
        say: Shows what is measured now.

    Yields:
        A row for each length and kernel: median seconds, and as "worst error" the largest of
        ``slice_errors``. The row of a kernel that fails has its error in place of figures.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    machine = kernel_support(device)
    where = device_and_versions(device.type)
    for tokens in lengths or ((64 * Ki, 256 * Ki, Mi) if cuda else (256, 512)):
        for name in FASTEST_FIRST:
            if missing_requirement(name, machine, HEAD_DIM) is None:
                say(f"{name}, {format_tokens(tokens)} tokens")
                figures = _figures(name, tokens, device)
                yield {"kernel": name, "tokens": tokens, **figures, "machine": where}


def kernel_of(name: str, device: torch.device) -> Kernel:
    """Return the kernel of this name.

    On CUDA, torch's kernel comes without its check of sizes, because sizes that it refuses are measured here.
    """
    if name == "torch" and device.type == "cuda":
        return Kernel(cuda_forward, flash_backward)
    return KERNELS[name]


def _figures(name: str, tokens: int, device: torch.device) -> Row:
    try:
        return {**measure_kernel(kernel_of(name, device), tokens, device), "failed": None}
    except RuntimeError as error:
        return {**dict.fromkeys(FIGURES), "failed": str(error).partition("\n")[0]}


def measure_kernel(
    kernel: Kernel,
    tokens: int,
    device: torch.device,
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    repeats: int = REPEATS,
) -> dict[str, float | None]:
    """Return the figures of a kernel, by the names of ``FIGURES``.

    The first run gives the errors, and the most bytes that forward and backward allocate (None on CPU).
    ``repeats`` more runs give the seconds, as medians. With ``repeats=0`` the first run gives the seconds
    too.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    q, k, v, dout = (
        random(1, tokens, count, HEAD_DIM).transpose(1, 2) for count in (heads, kv_heads, kv_heads, heads)
    )
    # At its first call a kernel makes plans and handles, which no figure should include.
    first_dout, first_q, first_k, first_v = (x[:, :, :FIRST_TOKENS] for x in (dout, q, k, v))
    kernel.backward(first_dout, first_q, first_k, first_v, *kernel.forward(first_q, first_k, first_v))
    (out, lse), forward_once, forward_bytes = _measure_once(lambda: kernel.forward(q, k, v), device)
    gradients, backward_once, backward_bytes = _measure_once(
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
    work[-1]()
    turns = [[_seconds(each, device) for each in work] for _ in range(repeats)]
    turns = turns or [[forward_once, backward_once, _seconds(work[-1], device)]]
    # Causal attention computes half of the scores. Forward has two products over them.
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


def _measure_once(work: Callable[[], Any], device: torch.device) -> tuple[Any, float, int | None]:
    """Return the result of ``work``, its seconds, and the most bytes that it allocated, with its result."""
    if device.type == "cpu":
        start = time.perf_counter()
        return work(), time.perf_counter() - start, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, start = torch.cuda.memory_allocated(device), time.perf_counter()
    result = work()
    torch.cuda.synchronize(device)
    return result, time.perf_counter() - start, torch.cuda.max_memory_allocated(device) - before


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
