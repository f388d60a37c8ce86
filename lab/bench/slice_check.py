"""Attention of any length, checked where it can be: a few rows and keys of it computed again in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BORDERS = (2**31, 2**32)
"""Where 32-bit indices, with a sign and without, begin anew."""

LONG = 2**22
"""A context past which some releases of kernels went wrong."""

BLOCK = 2**16
"""Keys or queries held in fp64 at a time."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of out, q, k and v."""


def slice_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: Gradients | None = None,
    *,
    rows: list[int] | None = None,
    scale: float | None = None,
    block: int = BLOCK,
) -> dict[str, float]:
    """The worst relative error of causal attention at some positions, of all batches and heads there.

    ``q, out`` [b, h, S, D], ``k, v`` [b, h/G, S, D], ``lse`` [b, h, S], ``gradients`` of out, q, k and v. At
    each of ``rows`` (``positions(q)`` unless given), out, LSE and dq are computed from that query and all
    keys before it, and dk and dv from that key and all queries after it. The latter need the LSE and the out
    of all those queries: those that are given, which are checked at some rows themselves.

    An error is the norm of the difference over the norm of what is right, over D; of the LSE it is the
    difference itself, which is the relative error of the softmax's denominator. NaN if anything is.

    In bounded memory: for n rows, 8*b*h*n*``block`` bytes and a few times as many.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    at = torch.tensor(positions(q) if rows is None else rows, device=q.device)
    dout = torch.zeros_like(out[:, :, :1]).expand_as(out) if gradients is None else gradients[0]
    right_out, right_lse, right_dq = _rows(q, k, v, dout, at, scale, block)
    errors = {
        "out": _worst(out[:, :, at], right_out),
        "lse": float((lse[:, :, at].double() - right_lse).abs().max()),
    }
    if gradients is not None:
        _, dq, dk, dv = gradients
        right_dk, right_dv = _keys(q, k, v, out, lse, dout, at, scale, block)
        errors |= {
            "dq": _worst(dq[:, :, at], right_dq),
            "dk": _worst(dk[:, :, at], right_dk),
            "dv": _worst(dv[:, :, at], right_dv),
        }
    return errors


def positions(x: Tensor) -> list[int]:
    """Where to look at ``x`` [b, h, S, D]: evenly from the second position to the last, and on both sides of
    every place where the index of an element or a byte, as x lies in memory, passes one of ``BORDERS``.

    The first query has one key, and no gradient.
    """
    length, step = x.shape[2], x.stride(2)
    found = {1 + (length - 2) * part // 4 for part in range(5)} | {LONG - 1, LONG}
    starts = [b * x.stride(0) + h * x.stride(1) for b in range(x.shape[0]) for h in range(x.shape[1])]
    for border in (border // size for border in BORDERS for size in (1, x.itemsize)):
        for start in starts:
            crossed = -((start - border) // step)
            found |= {crossed - 1, crossed}
    return sorted(at for at in found if 0 < at < length)


# ---- the reference, in fp64: n positions, B of a block, K heads of k, G query heads to each ----------------


def _rows(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, at: Tensor, scale: float, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Out [b, h, n, D], LSE [b, h, n] and dq [b, h, n, D] of the queries at [n]."""
    rows, grads = (_grouped(t[:, :, at], k) for t in (q, dout))
    top = rows.new_full(rows.shape[:-1], -torch.inf)
    total, summed, dq = torch.zeros_like(top), torch.zeros_like(rows), torch.zeros_like(rows)
    for _, values, scores in _blocks(rows, k, v, at, scale, block):
        higher = torch.maximum(top, scores.amax(-1))
        shrunk, weights = (top - higher).exp(), (scores - higher[..., None]).exp()
        total = total * shrunk + weights.sum(-1)
        summed = summed * shrunk[..., None] + weights @ values
        top = higher
    out, lse = summed / total[..., None], top + total.log()
    delta = (grads * out).sum(-1, keepdim=True)
    for keys, values, scores in _blocks(rows, k, v, at, scale, block):
        dscores = (scores - lse[..., None]).exp() * (grads @ values.mT - delta)
        dq += dscores @ keys * scale
    return out.flatten(1, 2), lse.flatten(1, 2), dq.flatten(1, 2)


def _blocks(
    rows: Tensor, k: Tensor, v: Tensor, at: Tensor, scale: float, block: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Keys and values [b, K, 1, B, D] up to the last of the rows, and the scores [b, K, G, n, B]."""
    for start in range(0, int(at.max()) + 1, block):
        keys, values = (t[:, :, None, start : start + block].double() for t in (k, v))
        later = torch.arange(start, start + keys.shape[3], device=k.device) > at[:, None]
        yield keys, values, (rows @ keys.mT * scale).masked_fill(later, -torch.inf)


def _keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    at: Tensor,
    scale: float,
    block: int,
) -> tuple[Tensor, Tensor]:
    """dk and dv [b, K, n, D] of the keys at [n]."""
    keys, values = (t[:, :, None, at].double() for t in (k, v))
    dk, dv = torch.zeros_like(keys[:, :, 0]), torch.zeros_like(values[:, :, 0])
    for start in range(int(at.min()), q.shape[2], block):
        part = slice(start, start + block)
        queries, outs, grads = (_grouped(t[:, :, part], k) for t in (q, out, dout))
        earlier = torch.arange(start, start + queries.shape[3], device=q.device)[:, None] < at
        scores = (queries @ keys.mT * scale).masked_fill(earlier, -torch.inf)
        weights = (scores - _grouped(lse[:, :, part, None], k)).exp()
        dscores = weights * (grads @ values.mT - (grads * outs).sum(-1, keepdim=True))
        dk += (dscores.mT @ queries).sum(2) * scale
        dv += (weights.mT @ grads).sum(2)
    return dk, dv


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[b, h, n, D] as [b, K, G, n, D] in fp64: query head i goes with key/value head i // G."""
    grouped: Tensor = x.unflatten(1, (k.shape[1], -1)).double()
    return grouped


def _worst(found: Tensor, right: Tensor) -> float:
    return float(((found.double() - right).norm(dim=-1) / right.norm(dim=-1)).max())
