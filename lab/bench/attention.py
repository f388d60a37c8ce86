"""Attention kernels compared with a large matrix product, and checked on slices of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lab.bench.slice_check import slice_errors
from lab.bench.software import device_and_versions
from lab.bench.table import Row, Say
from lab.bench.timing import rounds, seconds
from lab.memory.cuda import AllocatedPeak, use_expandable_segments
from lab.planning.costs import BACKWARD_FLOPS
from lab.techniques.attention.flash import cuda_forward, flash_backward
from lab.techniques.attention.kernel import Kernel
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
    if cuda:
        use_expandable_segments()
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
    head_dim: int = HEAD_DIM,
    heads_first: bool = False,
    repeats: int = REPEATS,
) -> dict[str, float | None]:
    """Return the figures of a kernel, by the names of ``FIGURES``.

    The first run gives the errors, and the most bytes that forward and backward allocate (None on CPU).
    ``repeats`` more runs give the seconds, as medians. With ``repeats=0`` the first run gives the seconds
    too, and there is no "/ matmul": one call after a pause is no measure of products.

    With ``heads_first``, the first call has the whole length, and a gradient of the output with tokens first
    in memory; in all later calls heads come first. A kernel that keeps what it built for the strides of q, k
    and v must not use it then.
    """
    q, k, v, dout = attention_inputs(device, 1, (heads, kv_heads), head_dim, tokens, tokens)
    # At its first call a kernel makes plans and handles, which no figure should include.
    length = tokens if heads_first else FIRST_TOKENS
    first_dout, first_q, first_k, first_v = (x[:, :, :length] for x in (dout, q, k, v))
    kernel.backward(first_dout, first_q, first_k, first_v, *kernel.forward(first_q, first_k, first_v))
    if heads_first:
        dout = dout.contiguous()
    (out, lse), forward_once, forward_bytes = _measure_once(lambda: kernel.forward(q, k, v), device)
    gradients, backward_once, backward_bytes = _measure_once(
        lambda: kernel.backward(dout, q, k, v, out, lse), device
    )
    worst = torch.tensor([*slice_errors(q, k, v, out, lse, (dout, *gradients)).values()]).max()
    del gradients
    size = 8192 if device.type == "cuda" else 512
    random = random_tensors(device)
    a, b = random(size, size), random(size, size)

    def products() -> None:
        for _ in range(10):
            a @ b

    products()
    turns = rounds(
        repeats,
        lambda: kernel.forward(q, k, v),
        lambda: kernel.backward(dout, q, k, v, out, lse),
        products,
    ) or [[forward_once, backward_once, seconds(products)]]
    flops = (1 + BACKWARD_FLOPS) * forward_flops(heads, tokens, head_dim)
    rates = [flops / (forward + backward) for forward, backward, _ in turns]
    products_flops = 10 * 2 * size**3
    shares = [rate * turn[-1] / products_flops for rate, turn in zip(rates, turns, strict=True)]
    forward, backward, _ = map(median, zip(*turns, strict=True))
    figures = (
        forward, backward, median(rates) / 1e12, median(shares) if repeats else None, float(worst),
        forward_bytes, backward_bytes,
    )  # fmt: skip
    return dict(zip(FIGURES, figures, strict=True))


def forward_flops(heads: int, tokens: int, head_dim: int) -> int:
    """Return the operations of forward: two products over the half of the scores that is causal."""
    return 2 * heads * tokens**2 * head_dim


def random_tensors(device: torch.device) -> Callable[..., Tensor]:
    """Return a function of a shape that makes random tensors, in bf16 on CUDA and in fp32 on CPU.

    The tensors are the same in each process.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    return partial(torch.randn, generator=generator, dtype=dtype, device=device)


def attention_inputs(
    device: torch.device, rows: int, heads: tuple[int, int], head_dim: int, tokens: int, keys: int
) -> list[Tensor]:
    """Return random q, k, v and gradient of the output, [rows, heads, length, D] with tokens first in memory.

    Args:
        device: Where they are.
        rows: The rows of the batch.
        heads: The query heads and the key/value heads.
        head_dim: D.
        tokens: The length of q and of the gradient.
        keys: The length of k and v.
    """
    random, (query_heads, kv_heads) = random_tensors(device), heads
    sizes = ((tokens, query_heads), (keys, kv_heads), (keys, kv_heads), (tokens, query_heads))
    return [random(rows, length, count, head_dim).transpose(1, 2) for length, count in sizes]


def _measure_once(work: Callable[[], Any], device: torch.device) -> tuple[Any, float, int | None]:
    """Return the result of ``work``, its seconds, and the most bytes that it allocated, with its result."""
    peak, results = AllocatedPeak(device), list[Any]()
    before = peak.bytes()
    once = seconds(lambda: results.append(work()))
    after = peak.bytes()
    return results.pop(), once, None if before is None or after is None else after - before
