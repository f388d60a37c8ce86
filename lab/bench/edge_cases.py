"""Small calls of kernels at the edges of what they take, compared with attention in fp64."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lab.techniques.attention.documents import Documents, documents_kernel
from lab.techniques.attention.flash import Kernel
from lab.techniques.attention.kernels import FASTEST_FIRST, KERNELS, kernel_support, missing_requirement
from lab.techniques.attention.window import windowed_kernel
from lab.techniques.experts import grouped_outer_product, grouped_product, grouped_sum

ROWS, HEADS, KV_HEADS = 2, 6, 2

LENGTHS = (1, 2, 3, 8, 129)
"""Numbers of tokens of a call."""

DOCUMENTS = (1, 5, 1, 2, 120)
"""The lengths of the documents of a row."""

ENDS = (0, 5, 5, 24, 40, 40)
"""The ends of the rows of six experts, of which the first, the third and the last have none."""


def measure_edges(where: str) -> dict[str, Any]:
    """Return the worst relative error of the output and the gradients of each case, by the name of the case.

    Inputs are bf16 on CUDA and fp32 on CPU, and the same inputs in fp64 give what is right. "worst" is the
    largest error, or NaN if one is NaN. A case that fails has its error as text.
    """
    errors: dict[str, float | str] = {}
    device = torch.device(where)
    support = kernel_support(device)
    for name in FASTEST_FIRST:
        for head_dim in (128, 64, 20):
            if missing_requirement(name, support, head_dim) is None:
                for case, run in _attention_cases(KERNELS[name], head_dim, device):
                    errors[f"{name} D={head_dim} {case}"] = _outcome(run)
    errors["experts without rows"] = _outcome(lambda: _experts_error(device))
    numbers = [error for error in errors.values() if isinstance(error, float)]
    failed = {case: error for case, error in errors.items() if isinstance(error, str)}
    seconds = {
        f"{name}, s a new length": _new_length_seconds(KERNELS[name], device)
        for name in FASTEST_FIRST
        if missing_requirement(name, support, 128) is None
    }
    return {"errors": errors, "worst": float(torch.tensor(numbers).max()), "failed cases": failed, **seconds}


def _outcome(run: Callable[[], Tensor]) -> float | str:
    try:
        return float(run())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _new_length_seconds(kernel: Kernel, device: torch.device) -> float:
    """Return the seconds of forward and backward for a length that was never seen: a mean of ten."""
    start = time.perf_counter()
    for tokens in range(300, 470, 17):
        q, k, v, dout = _random(device, 128, (HEADS, KV_HEADS, KV_HEADS, HEADS), (tokens,) * 4)
        sum(float(x.sum()) for x in kernel.backward(dout, q, k, v, *kernel.forward(q, k, v)))
    return (time.perf_counter() - start) / 10


def _random(
    device: torch.device, head_dim: int, heads: tuple[int, ...], lengths: tuple[int, ...]
) -> list[Tensor]:
    """Return a random tensor [b, heads, length, D] for each of ``heads``, with tokens first in memory."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [
        torch.randn(ROWS, length, of, head_dim, generator=generator, dtype=dtype, device=device).transpose(
            1, 2
        )
        for of, length in zip(heads, lengths, strict=True)
    ]


def _attention_cases(
    kernel: Kernel, head_dim: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    def case(of: Kernel, tokens: int, **more: Any) -> Callable[[], Tensor]:
        return lambda: _attention_error(of, tokens, head_dim, device, **more)

    for tokens in LENGTHS:
        yield f"{tokens} tokens", case(kernel, tokens)
    # A kernel that keeps what it built for q, k and v must not use it for other strides of the rest.
    for layout in ("tokens first", "heads first", "tokens first"):
        yield f"129 tokens, gradient with {layout}", case(kernel, 129, layout=layout)
    yield "64 queries of 129 keys", case(kernel, 64, keys=129)
    yield "1 query of 129 keys", case(kernel, 1, keys=129)
    yield "64 queries of 1 key", case(kernel, 64, keys=1)
    for window in (1, 2, 13):
        yield f"129 tokens, window of {window}", case(windowed_kernel(kernel, window), 129, window=window)
    documents = documents_kernel(kernel, Documents((DOCUMENTS,) * ROWS))
    yield f"documents of {DOCUMENTS}", case(documents, sum(DOCUMENTS), documents=DOCUMENTS)


def _attention_error(
    kernel: Kernel,
    tokens: int,
    head_dim: int,
    device: torch.device,
    *,
    keys: int | None = None,
    layout: str = "tokens first",
    window: int | None = None,
    documents: tuple[int, ...] | None = None,
) -> Tensor:
    """Return the worst relative error of out, dq, dk and dv. ``keys`` without a causal mask, if given."""
    sizes = (tokens, keys or tokens, keys or tokens, tokens)
    q, k, v, dout = _random(device, head_dim, (HEADS, KV_HEADS, KV_HEADS, HEADS), sizes)
    if layout == "heads first":
        dout = dout.contiguous()
    scale, causal = head_dim**-0.5, keys is None
    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    gradients = kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [exact[0], *(x.repeat_interleave(HEADS // KV_HEADS, 1) for x in exact[1:])]
    scores = wide[0] @ wide[1].mT * scale
    if causal:
        scores = scores.masked_fill(~_visible(tokens, window, documents, device), -torch.inf)
    right = scores.softmax(-1) @ wide[2]
    expected = (right, *torch.autograd.grad(right, exact, dout.double()))
    pairs = zip((out, *gradients), expected, strict=True)
    # dq and dk are zero where there is one key, so errors are relative to all results together.
    size = torch.stack([y.detach().norm() for y in expected]).norm()
    return torch.stack([(x.double() - y.detach()).norm() / size for x, y in pairs]).max()


def _visible(
    tokens: int, window: int | None, documents: tuple[int, ...] | None, device: torch.device
) -> Tensor:
    """Return which key each query attends to, [S, S]."""
    position = torch.arange(tokens, device=device)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < (window or tokens))
    if documents is None:
        return visible
    document = torch.repeat_interleave(torch.tensor(documents, device=device))
    return visible & (document[:, None] == document)


def _experts_error(device: torch.device) -> Tensor:
    """Return the worst relative error of the grouped products; inf where an expert without rows has a sum."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    rows, grads, weights = random(ENDS[-1], 16), random(ENDS[-1], 24), random(len(ENDS), 16, 24)
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    parts = [slice(start, end) for start, end in zip((0, *ENDS), ENDS, strict=False)]
    results = (
        grouped_product(rows, weights, ends),
        grouped_outer_product(grads, rows, ends),
        grouped_sum(grads, ends),
    )
    x, dy, w = rows.double(), grads.double(), weights.double()
    expected = (
        torch.cat([x[part] @ w[expert] for expert, part in enumerate(parts)]),
        torch.stack([dy[part].T @ x[part] for part in parts]),
        torch.stack([dy[part].sum(0) for part in parts]),
    )
    worst = torch.stack(
        [(a.double() - b).norm() / b.norm() for a, b in zip(results, expected, strict=True)]
    ).max()
    empty = [expert for expert, part in enumerate(parts) if part.start == part.stop]
    written = any(bool(sums[empty].any()) for sums in results[1:])
    return worst.new_tensor(torch.inf) if written else worst
