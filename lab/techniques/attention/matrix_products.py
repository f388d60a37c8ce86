"""Attention by matrix products, a block of queries at a time, in any dtype and on any device.

CUDA's flash kernels take bf16 and fp16, and heads of at most 256 numbers. What they do not take runs here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.techniques.precision import accumulation_dtype

BLOCK = 256
"""Queries whose scores are held at once."""


def exact_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and its LSE: ``q`` [b, h, S, D], ``k, v`` [b, h/G, S', D] -> out like q, LSE [b, h, S].

    Costs: two matrices of scores [b, h, BLOCK, S'], in fp32 or fp64. Its matrix products make it several
    times slower than a flash kernel.
    """
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    for rows, keys in _blocks(q, k, causal):
        scores = _scores(q, k, rows, keys, causal, scale)
        block = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(block).exp_()
        out[:, :, rows] = _apart(weights @ v[:, :, keys].to(weights.dtype), q)
        lse[:, :, rows] = _apart(block, q).squeeze(-1)
    return out, lse


def exact_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from what ``exact_forward`` gave; ``out`` and ``lse`` may be of more keys.

    Costs: three matrices of scores [b, h, BLOCK, S'], and dk and dv in fp32 or fp64 while they are summed.
    Source: FlashAttention (arXiv 2205.14135), appendix B.2.
    """
    wide = lse.dtype
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(t, dtype=wide) for t in (k, v))
    for rows, keys in _blocks(q, k, causal):
        scores = _scores(q, k, rows, keys, causal, scale)
        weights = scores.sub_(_together(lse[:, :, rows, None], k)).exp_()
        grad = _together(grad_out[:, :, rows].to(wide), k)
        dv[:, :, keys] += weights.mT @ grad
        row_sums = (grad * _together(out[:, :, rows].to(wide), k)).sum(-1, keepdim=True)
        grad_scores = (grad @ v[:, :, keys].to(wide).mT).sub_(row_sums).mul_(weights).mul_(scale)
        dq[:, :, rows] = _apart(grad_scores @ k[:, :, keys].to(wide), q)
        dk[:, :, keys] += grad_scores.mT @ _together(q[:, :, rows].to(wide), k)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Each block of queries, and the keys that it sees."""
    tokens = q.shape[2]
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        yield slice(start, stop), slice(0, stop if causal else k.shape[2])


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, causal: bool, scale: float) -> Tensor:
    """Scores of a block, [b, h/G, G*rows, keys], minus infinity where a key comes after its query."""
    wide = accumulation_dtype(q.dtype)
    scores = _together(q[:, :, rows].to(wide) * scale, k) @ k[:, :, keys].to(wide).mT
    if causal:
        size = rows.stop - rows.start
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
        # Of the keys that a block sees, those of the block itself alone may be later than a query.
        scores.unflatten(2, (-1, size))[..., rows].masked_fill_(later, float("-inf"))
    return scores


def _together(x: Tensor, k: Tensor) -> Tensor:
    """[b, h, rows, D] -> [b, h/G, G*rows, D]: the G query heads of a key/value head as more rows of it."""
    rows: Tensor = x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return rows


def _apart(x: Tensor, q: Tensor) -> Tensor:
    """[b, h/G, G*rows, D] -> [b, h, rows, D]."""
    heads: Tensor = x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)
    return heads
