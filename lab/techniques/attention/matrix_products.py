"""Attention by matrix products, one block of queries at a time, in any dtype and on any device.

Flash kernels on CUDA support bf16 and fp16, and a head_dim up to 256. This file computes the other cases.

Letters: b rows, h query heads, G query heads per key/value head, S query tokens, S' key tokens, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.techniques.attention.kernel import Gradients
from lab.techniques.limits import QUERY_BLOCK
from lab.techniques.precision import accumulation_dtype


def exact_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention and its log-sum-exp (LSE).

    Costs: two matrices of scores [b, h, QUERY_BLOCK, S'] in the wider of fp32 and the dtype of ``q``, of
    which logsumexp makes one inside. It is several times slower than a flash kernel.

    Args:
        q: [b, h, S, D].
        k: [b, h/G, S', D].
        v: [b, h/G, S', D].
        causal: A query attends only to keys that are not after it; S' must be S.
        scale: Multiplies the scores.

    Returns:
        The output, like ``q``, and the LSE [b, h, S] in the wider of fp32 and the dtype of ``q``.
    """
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    for rows, keys in _blocks(q, k, causal):
        scores = _scores(q, k, rows, keys, causal, scale)
        block = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(block).exp_()
        out[:, :, rows] = _split_groups(weights @ v[:, :, keys].to(weights.dtype), q)
        lse[:, :, rows] = _split_groups(block, q).squeeze(-1)
        # Or else they would be in memory while the next block is computed.
        del scores, weights
    return out, lse


def exact_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> Gradients:
    """Compute the gradients of attention from the results of ``exact_forward``.

    ``out`` and ``lse`` may be the results of attention to more keys than ``k``. The gradients are then the
    exact part that these keys contribute.

    Costs: two matrices of scores [b, h, QUERY_BLOCK, S'], the sums of dk and dv, and one term of such a sum,
    in the dtype of ``lse``. See ``matrix_products_workspace`` in ``lab/planning/cuda_workspace.py``.
    Source: FlashAttention (arXiv 2205.14135), appendix B.2.

    Args:
        grad_out: The gradient of the output, [b, h, S, D].
        q: [b, h, S, D].
        k: [b, h/G, S', D].
        v: [b, h/G, S', D].
        out: [b, h, S, D].
        lse: [b, h, S].
        causal: As in ``exact_forward``.
        scale: As in ``exact_forward``.

    Returns:
        The gradients of ``q``, ``k`` and ``v``, in their shapes and dtypes.
    """
    sum_dtype = lse.dtype
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(t, dtype=sum_dtype) for t in (k, v))
    for rows, keys in _blocks(q, k, causal):
        scores = _scores(q, k, rows, keys, causal, scale)
        weights = scores.sub_(_join_groups(lse[:, :, rows, None], k)).exp_()
        grad = _join_groups(grad_out[:, :, rows].to(sum_dtype), k)
        dv[:, :, keys] += weights.mT @ grad
        row_sums = (grad * _join_groups(out[:, :, rows].to(sum_dtype), k)).sum(-1, keepdim=True)
        grad_scores = (grad @ v[:, :, keys].to(sum_dtype).mT).sub_(row_sums).mul_(weights).mul_(scale)
        dq[:, :, rows] = _split_groups(grad_scores @ k[:, :, keys].to(sum_dtype), q)
        dk[:, :, keys] += grad_scores.mT @ _join_groups(q[:, :, rows].to(sum_dtype), k)
        del scores, weights, grad_scores
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield each block of queries, and the keys that at least one of them attends to."""
    tokens = q.shape[2]
    for start in range(0, tokens, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, tokens)
        yield slice(start, stop), slice(0, stop if causal else k.shape[2])


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, causal: bool, scale: float) -> Tensor:
    """Return the scores of a block, [b, h/G, G*rows, keys]: minus infinity if a key comes after its query."""
    sum_dtype = accumulation_dtype(q.dtype)
    scores = _join_groups(q[:, :, rows].to(sum_dtype) * scale, k) @ k[:, :, keys].to(sum_dtype).mT
    if causal:
        size = rows.stop - rows.start
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
        # Only keys of the same tokens as the block can come after one of its queries.
        scores.unflatten(2, (-1, size))[..., rows].masked_fill_(later, float("-inf"))
    return scores


def _join_groups(x: Tensor, k: Tensor) -> Tensor:
    """Join the G query heads of each key/value head into one: [b, h, rows, D] -> [b, h/G, G*rows, D]."""
    rows: Tensor = x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return rows


def _split_groups(x: Tensor, q: Tensor) -> Tensor:
    """Divide the joined heads again, as the inverse of ``_join_groups``."""
    heads: Tensor = x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)
    return heads
