"""Checking attention of any length: a few of its rows and keys are computed again in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BORDERS = (2**31, 2**32)
"""The numbers at which 32-bit indices overflow, signed and unsigned."""

LONG = 2**22
"""A context above which some releases of kernels were wrong."""

BLOCK = 2**16
"""How many keys or queries are in memory in fp64 at a time."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""The gradients of out, q, k and v."""


def slice_errors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, gradients: Gradients, *, block: int = BLOCK
) -> dict[str, float]:
    """Return the largest relative errors of causal attention at some positions, over all batches and heads.

    Shapes: batch b, query heads h, G query heads for each key/value head, S tokens, head_dim D. At each
    position, out, lse and dq are computed from that query and all keys up to it, and dk and dv from that key
    and all queries from it on. For dk and dv, the lse and the out of those queries are taken from the
    arguments, which are themselves checked at some positions. The scores are multiplied by D**-0.5.

    The error of a vector of D values is the norm of its difference over its norm. The error of lse is the
    difference, which is the relative error of the softmax's denominator. An error is NaN if a value is NaN.

    For n positions, this takes a few times 8*b*h*n*``block`` bytes.

    Args:
        q: The queries [b, h, S, D].
        k: The keys [b, h/G, S, D].
        v: The values [b, h/G, S, D].
        out: The output to check [b, h, S, D].
        lse: The logarithm of the softmax's denominator, to check [b, h, S].
        gradients: The gradient of out, and the gradients of q, k and v to check.
        block: How many keys or queries are processed at a time.
    """
    at = torch.tensor(positions(q), device=q.device)
    dout, dq, dk, dv = gradients
    expected_out, expected_lse, expected_dq = _rows(q, k, v, dout, at, block)
    expected_dk, expected_dv = _keys(q, k, v, out, lse, dout, at, block)
    return {
        "out": _largest_error(out[:, :, at], expected_out),
        "lse": float((lse[:, :, at].double() - expected_lse).abs().max()),
        "dq": _largest_error(dq[:, :, at], expected_dq),
        "dk": _largest_error(dk[:, :, at], expected_dk),
        "dv": _largest_error(dv[:, :, at], expected_dv),
    }


def positions(x: Tensor) -> list[int]:
    """Return the positions at which to check ``x`` [b, h, S, D].

    They are five evenly spaced ones, two around ``LONG``, and two around each position at
    which the index of an element or of a byte of x in memory passes one of ``BORDERS``. The first position is
    left out, because the first query has one key and no gradient.
    """
    length, step = x.shape[2], x.stride(2)
    result = {1 + (length - 2) * part // 4 for part in range(5)} | {LONG - 1, LONG}
    starts = [b * x.stride(0) + h * x.stride(1) for b in range(x.shape[0]) for h in range(x.shape[1])]
    for border in (border // size for border in BORDERS for size in (1, x.itemsize)):
        for start in starts:
            crossed = -((start - border) // step)
            result |= {crossed - 1, crossed}
    return sorted(at for at in result if 0 < at < length)


# ---- the reference in fp64. Shapes: n positions, B positions of a block, K heads of k, h = K*G query heads -


def _rows(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, at: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [b, h, n, D], lse [b, h, n] and dq [b, h, n, D] of the queries at positions ``at`` [n]."""
    rows, grads = (_grouped(t[:, :, at], k) for t in (q, dout))
    rows = rows * q.shape[-1] ** -0.5
    lse = torch.stack([scores.logsumexp(-1) for _, _, scores in _blocks(rows, k, v, at, block)]).logsumexp(0)
    out, dq = torch.zeros_like(rows), torch.zeros_like(rows)
    for _, values, scores in _blocks(rows, k, v, at, block):
        out += (scores - lse[..., None]).exp() @ values
    delta = (grads * out).sum(-1, keepdim=True)
    for keys, values, scores in _blocks(rows, k, v, at, block):
        dq += (scores - lse[..., None]).exp() * (grads @ values.mT - delta) @ keys
    return out.flatten(1, 2), lse.flatten(1, 2), dq.flatten(1, 2) * q.shape[-1] ** -0.5


def _blocks(
    rows: Tensor, k: Tensor, v: Tensor, at: Tensor, block: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield blocks of keys and values [b, K, 1, B, D] up to the last position, and scores [b, K, G, n, B]."""
    for start in range(0, int(at.max()) + 1, block):
        keys, values = (t[:, :, None, start : start + block].double() for t in (k, v))
        later = torch.arange(start, start + keys.shape[3], device=k.device) > at[:, None]
        yield keys, values, (rows @ keys.mT).masked_fill(later, -torch.inf)


def _keys(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, at: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Return dk and dv [b, K, n, D] of the keys at positions ``at`` [n]."""
    keys, values = (t[:, :, None, at].double() for t in (k, v))
    dk, dv = torch.zeros_like(keys[:, :, 0]), torch.zeros_like(values[:, :, 0])
    for start in range(int(at.min()), q.shape[2], block):
        part = slice(start, start + block)
        queries, outs, grads = (_grouped(t[:, :, part], k) for t in (q, out, dout))
        queries = queries * q.shape[-1] ** -0.5
        earlier = torch.arange(start, start + queries.shape[3], device=q.device)[:, None] < at
        scores = (queries @ keys.mT).masked_fill(earlier, -torch.inf)
        weights = (scores - _grouped(lse[:, :, part, None], k)).exp()
        dscores = weights * (grads @ values.mT - (grads * outs).sum(-1, keepdim=True))
        dk += (dscores.mT @ queries).sum(2)
        dv += (weights.mT @ grads).sum(2)
    return dk, dv


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return x [b, h, n, D] as [b, K, G, n, D] in fp64: query head i belongs to key/value head i // G."""
    grouped: Tensor = x.unflatten(1, (k.shape[1], -1)).double()
    return grouped


def _largest_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
