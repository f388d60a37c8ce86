"""Attention's backward in pairs of sequence tiles, by any kernel.

Letters: b rows, h query heads, G query heads per key/value head, S query tokens, S' key tokens, D head_dim,
t tokens of a tile, w bytes per element, f = 4 bytes per element of a sum (8 in fp64). The LSE (log-sum-exp)
of a query is the logarithm of its softmax's denominator. dq, dk and dv are the gradients of q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.errors import RecipeError
from lab.techniques.attention.flash import check_arguments
from lab.techniques.attention.kernel import Gradients, Kernel
from lab.techniques.precision import accumulation_dtype
from lab.techniques.slices import causal_slices, slices


def tiled_kernel(kernel: Kernel, tile: int) -> Kernel:
    """Return a kernel with the forward of ``kernel``, whose backward runs in pairs of tiles.

    A pair is a tile of queries and a tile of keys, of ``tile`` tokens each. Under a causal mask, a tile of
    queries is paired with the keys of the same tokens, with a mask, and with each earlier tile, without one.
    The output and the LSE are those of attention to all keys, so the gradients of a pair are exact parts of
    the whole gradients. They are summed in the accumulation dtype. dq is summed for one tile of queries at a
    time, and is rounded once.

    Args:
        kernel: Computes forward, and the backward of each pair.
        tile: t, at least 1. If it does not divide S or S', the last tile is shorter. Matrix products compute
            the pairs of a last tile of one token; see ``exact_backward`` for what they hold.

    Saves:
        At the peak of backward, the kernel's dq, dk and dv of all tokens, and what the kernel allocates
        inside for all tokens: for FlashAttention-2 an fp32 dq, and dk and dv of all h heads if G > 1. In
        their place are those of one pair and a sum of dq, with t at most S and S':
        pair = b*t*h*D*(w + f + 2*w/G) bytes.

        UPipe calls ``accumulate``, and then has sums = 2*h*U_kv*f/w in every stage. With the letters of
        ``apply_upipe`` and no overlap, h*(4U + 4*U_kv) + sums in its peak of backward becomes
        max(h*(3U + 2*U_kv) + sums + pair, h*(2U + 4*U_kv) + sums, h*(4U + 2*U_kv)), with sums in the last
        term too if a head group has several stages. All others call ``backward``, which returns dq, dk and
        dv, and has 2*b*S'*h*D*f/G bytes for the sums: in half precision the tensors that torch counts are
        then not fewer, and what is saved is what the kernel allocates inside.
    Costs:
        With n = S/t, rounded up, n*(n + 1)/2 calls of the kernel's backward in place of one, with as many
        floating-point operations. A pair reads and writes the sums of its tiles, so a tile must be long
        enough for attention to take most of the time: at 5M tokens a plan of Llama3-8B on 8 ranks has 0.5%
        more seconds with tiles of 64K tokens, and 0.1% with 256K. In half precision the kernel rounds the
        gradients of each pair before they are summed.
    Source:
        FlashAttention (arXiv 2205.14135), appendix B.4: gradients from the LSE over all keys.
    Composes with:
        Every kernel, Ulysses, DeepSpeed's exchange, UPipe, and a ring that is made of the result
        (``ring_kernel``): each step of the ring then runs in pairs of tiles.

    Raises:
        RecipeError: ``tile`` is less than 1.
    """
    if tile < 1:
        raise RecipeError(
            f"attention_tile={tile}: a tile is a number of tokens; use 1 or more, or None for no tiles"
        )

    def backward(*tensors: Tensor, causal: bool = True, scale: float | None = None) -> Gradients:
        _, q, k, v, *_ = tensors
        dq, sums = _allocate(q, q.dtype), [_allocate(t, accumulation_dtype(t.dtype)).zero_() for t in (k, v)]
        _add_pairs(kernel, tile, tensors, dq, sums, causal, scale)
        dk = sums.pop(0).to(k.dtype)
        return dq, dk, sums.pop().to(v.dtype)

    def accumulate(*tensors: Tensor, causal: bool = True, scale: float | None = None) -> None:
        _add_pairs(kernel, tile, tensors[:6], tensors[1], [*tensors[6:]], causal, scale)

    return Kernel(kernel.forward, backward, accumulate)


def _add_pairs(
    kernel: Kernel,
    tile: int,
    tensors: tuple[Tensor, ...],
    dq: Tensor,
    sums: list[Tensor],
    causal: bool,
    scale: float | None,
) -> None:
    """Run the backward of all pairs: write dq, which may be q itself, and add dk and dv to ``sums``.

    A tile of q is read for the last time before dq of this tile is written.

    Args:
        kernel: Computes the backward of a pair.
        tile: The number of tokens in a tile.
        tensors: dout, q, k, v, the output and the LSE.
        dq: [b, h, S, D].
        sums: Of dk and of dv, [b, h/G, S', D] each, in the accumulation dtype.
        causal: A query attends only to keys that are not after it; S' must be S.
        scale: Multiplies the scores.
    """
    dout, q, k, v, out, lse = tensors
    scale = check_arguments(q, k, causal, scale)
    tokens = q.shape[2]
    # Allocated before the loop: a plan runs only some passes of a loop, and each must allocate as much.
    dq_sum = _allocate(q.narrow(2, 0, min(tile, tokens)), accumulation_dtype(q.dtype))
    for (start, length), key_tiles in _pairs(tokens, k.shape[2], tile, causal):
        total = dq_sum.narrow(2, 0, length).zero_()
        dout_, q_, out_, lse_ = (t.narrow(2, start, length) for t in (dout, q, out, lse))
        for key_start, key_length in key_tiles:
            k_, v_ = (t.narrow(2, key_start, key_length) for t in (k, v))
            masked = causal and key_start == start
            parts = kernel.backward(dout_, q_, k_, v_, out_, lse_, causal=masked, scale=scale)
            totals = (total, *(t.narrow(2, key_start, key_length) for t in sums))
            for whole, part in zip(totals, parts, strict=True):
                whole.add_(part)
            # The tensors of this pair are freed before those of the next one are allocated.
            del parts, part
        dq.narrow(2, start, length).copy_(total)


def _pairs(
    queries: int, keys: int, tile: int, causal: bool
) -> Iterator[tuple[tuple[int, int], Iterator[tuple[int, int]]]]:
    """Yield (start, length) of each tile of queries, and those of the tiles of keys that it attends to."""
    if causal:
        yield from causal_slices(queries, tile)
    else:
        for rows in slices(queries, tile):
            yield rows, slices(keys, tile)


def _allocate(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the shape of ``like``, [b, h, S, D], whose memory layout is that of [b, S, h, D]."""
    rows, heads, tokens, head_dim = like.shape
    return like.new_empty((rows, tokens, heads, head_dim), dtype=dtype).transpose(1, 2)
