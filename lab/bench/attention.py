"""The attention kernels of this machine against its matrix product, each checked on slices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor

from lab.bench.slice_check import slice_errors
from lab.bench.software import measured_on
from lab.bench.table import Row, Say
from lab.costs import BACKWARD_FLOPS
from lab.techniques.attention import Kernel
from lab.techniques.kernels import FASTEST_FIRST, KERNELS, lacks, machine_of
from lab.units import Ki, Mi, format_tokens

REPEATS = 5
HEADS, KV_HEADS, HEAD_DIM = 4, 1, 128
"""What a rank of 8 has of Llama3-8B inside Ulysses' exchange."""


def measure_attention(lengths: Sequence[int], say: Say) -> Iterator[Row]:
    """Yield a row a length and kernel that is here: median seconds forward and backward of causal attention.

    Of H/C = 4 heads, K/C = 1, D = 128, in bf16 (fp32 on CPU). The operations of forward and backward a second
    stand over those of a large matrix product in the same dtype, timed in turn with them. ``worst error`` is
    that of ``slice_errors``. A kernel that fails has its error instead of figures. Without lengths: 64K to 1M
    tokens on CUDA, 256 and 512 on CPU.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    machine = machine_of(device)
    where = measured_on(device.type)
    for tokens in lengths or ((64 * Ki, 256 * Ki, Mi) if cuda else (256, 512)):
        for name in FASTEST_FIRST:
            if lacks(name, machine, HEAD_DIM) is None:
                say(f"{name}, {format_tokens(tokens)} tokens")
                figures = _figures(name, tokens, device)
                yield {"kernel": name, "tokens": tokens, **figures, "machine": where}


def _figures(name: str, tokens: int, device: torch.device) -> Row:
    measured = ("forward s", "backward s", "TFLOP/s", "/ matmul", "worst error")
    try:
        return {**dict(zip(measured, _measured(KERNELS[name], tokens, device), strict=True)), "failed": None}
    except RuntimeError as error:
        return {**dict.fromkeys(measured), "failed": str(error).partition("\n")[0]}


def _measured(kernel: Kernel, tokens: int, device: torch.device) -> tuple[float, ...]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=dtype, device=device)

    q, k, v, dout = (
        random(1, tokens, heads, HEAD_DIM).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    out, lse = kernel.forward(q, k, v)
    gradients = (dout, *kernel.backward(dout, q, k, v, out, lse))
    worst = torch.tensor([*slice_errors(q, k, v, out, lse, gradients).values()]).max()
    del gradients
    size = 8192 if device.type == "cuda" else 512
    a, b = random(size, size), random(size, size)
    work: tuple[Callable[[], object], ...] = (
        lambda: kernel.forward(q, k, v),
        lambda: kernel.backward(dout, q, k, v, out, lse),
        lambda: [a @ b for _ in range(10)],
    )
    turns = [[_seconds(each, device) for each in work] for _ in range(REPEATS)]
    # Half of the square of scores, and two products over it in forward.
    flops = (1 + BACKWARD_FLOPS) * 2 * HEADS * tokens**2 * HEAD_DIM
    rates = [flops / (forward + backward) for forward, backward, _ in turns]
    products = [10 * 2 * size**3 / seconds for *_, seconds in turns]
    forward, backward, _ = (median(seconds) for seconds in zip(*turns, strict=True))
    shares = (rate / product for rate, product in zip(rates, products, strict=True))
    return forward, backward, median(rates) / 1e12, median(shares), float(worst)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
