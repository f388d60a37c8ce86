"""Gathered attention: keys and values of all ranks meet the queries of each rank's two pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from lab.decoder import decoder_of
from lab.techniques.attention.documents import Documents
from lab.techniques.attention.flash import FLASH
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.attention.kernel import Gradients, Kernel, check_causal
from lab.techniques.attention.merging import merge
from lab.techniques.attention.window import windowed_kernel
from lab.techniques.exchange import all_gather, rank_in, reduce_scatter, size_of
from lab.techniques.precision import accumulation_dtype
from lab.techniques.slices import slices


def apply_gathered(model: nn.Module, *, group: dist.ProcessGroup | None, kernel: Kernel = FLASH) -> None:
    """Compute attention of a sequence that is sharded over ``group``, by gathering all keys and values.

    The sequence is sharded as by ``apply_ring``: of 2R pieces, rank i has pieces i and 2R-1-i. A rank has all
    keys and values during attention, so a layer may have a window, and a row may have several documents.

    Letters: R ranks in the group, b rows, s tokens of one rank, H query heads, K key/value heads, D head_dim,
    w bytes per element, f = 4 bytes per element of a sum (8 in fp64). Bytes of tensors: Q = w*b*s*H*D for
    queries, k = w*b*s*K*D for keys, l = f*b*s*H for an LSE (log-sum-exp).

    Args:
        model: The model.
        group: The R ranks. None is a group of one rank.
        kernel: Computes attention of some queries to some keys.

    Saves:
        Activations of s instead of S tokens, as with Ulysses. The heads do not limit R.
    Costs:
        In forward, one all-gather of k and v, which sends (R-1)*2k bytes; in backward the same all-gather,
        and one reduce-scatter each of the gradients of k and v in fp32 (fp64 for fp64), which send
        (R-1)*2k*f/w bytes together. A rank waits for each of them, and computes nothing meanwhile. UPipe
        gathers in each of its stages.

        Memory grows with the whole sequence: without windows and documents, the peak of attention, without
        its inputs, is max(4Rk, 2Rk + Q*(3/2 + f/(2w)) + 3l) bytes in forward, and
        max(2Rk*(1 + f/w) + Q*(3/2 + f/(2w)) + k, (3R + 1)*k*f/w + Q) bytes in backward, where the kernel runs
        on the keys of one piece at a time.
    Source:
        Llama 3 (arXiv 2407.21783), section 3.3.2, which gathers k and v because masks of documents are then
        simple. Gradients from the LSE over all keys: FlashAttention (arXiv 2205.14135), appendix B.4.
    Composes with:
        Windows, documents, sinks, and Ulysses or UPipe on the same model, applied before or after; each
        Ulysses group then has the tokens of one rank of ``group``. Checkpointing, tiling, FSDP2.

    Raises:
        ModelError: See ``decoder_of``.
        RecipeError: See ``apply_attention``.
    """
    apply_attention(model)
    for module in decoder_of(model).attentions:
        module.lab_kernel = kernel  # type: ignore[assignment]
        if group is not None and size_of(group) > 1:
            module.lab_gathered = partial(gathered_kernel, group=group)  # type: ignore[assignment]


Windows = tuple[int | None, ...]
"""The windows of layers; None for a layer without one."""


class Part(NamedTuple):
    """The queries of one document in one piece of a rank.

    Attributes:
        rows: The rows that have the document.
        own: The queries, among the tokens of the rank.
        begin: The first key in the sequence that one of them may attend to.
        start: The place of the first query in the sequence.
        stop: The place after the last query.
        padding: The keys from ``begin`` to ``start``, if the queries have a window that leaves out some key;
            else None.
    """

    rows: slice
    own: slice
    begin: int
    start: int
    stop: int
    padding: int | None


def parts_of(
    documents: Iterable[tuple[slice, slice]], piece: int, ranks: int, rank: int, window: int | None
) -> Iterator[Part]:
    """Yield the parts of a rank.

    Args:
        documents: The rows and the tokens of each document, in the sequence.
        piece: The tokens of each of the 2R pieces.
        ranks: R.
        rank: The rank, whose pieces are ``rank`` and 2R-1-``rank``.
        window: The keys that a query sees at most; None for all before it.
    """
    for rows, tokens in documents:
        for place, number in enumerate((rank, 2 * ranks - 1 - rank)):
            start, stop = max(tokens.start, number * piece), min(tokens.stop, (number + 1) * piece)
            if start >= stop:
                continue
            begin, padding, moved = tokens.start, None, (place - number) * piece
            if window is not None and window < stop - begin:
                begin = max(begin, start - window + 1)
                padding = start - begin
            yield Part(rows, slice(start + moved, stop + moved), begin, start, stop, padding)


def fullest_ranks(documents: tuple[int, ...], ranks: int, windows: Windows) -> list[int]:
    """Return the ranks of which one holds the most in attention.

    A call of a kernel holds more with more queries or more keys, and a window's padding counts as both. A
    rank is left out if another one has, for each of its calls, one with no fewer queries and no fewer keys.

    Args:
        documents: The tokens of the documents of a row, which add up to a multiple of 2R.
        ranks: R.
        windows: The window of each layer, or None.
    """
    ends = [*accumulate(documents)]
    tokens = [(slice(None), slice(end - n, end)) for n, end in zip(documents, ends, strict=True)]
    calls = [
        {
            (window, part.padding is not None, part.stop - part.start, part.stop - part.begin)
            for window in set(windows) or {None}
            for part in parts_of(tokens, ends[-1] // (2 * ranks), ranks, rank, window)
        }
        for rank in range(ranks)
    ]

    def holds_as_much(one: int, other: int) -> bool:
        return all(
            any(own[:2] == its[:2] and own[2] >= its[2] and own[3] >= its[3] for own in calls[one])
            for its in calls[other]
        )

    left = [*range(ranks)]
    for rank in range(ranks):
        if any(holds_as_much(other, rank) for other in left if other != rank):
            left.remove(rank)
    return left


def gathered_kernel(
    kernel: Kernel, *, group: dist.ProcessGroup, window: int | None = None, documents: Documents | None = None
) -> Kernel:
    """Return a kernel that attends to the keys of all ranks of ``group``, and runs ``kernel`` on parts.

    A part has the queries of one document in one piece. ``kernel`` attends to the keys of the same tokens,
    with a causal mask, and to the earlier ones of the document, without a mask; the results are merged by
    their LSE. In backward the earlier keys have the length of a piece in each call, which bounds what the
    kernel holds. With a window, zeros are put before the queries, in the place of the earlier tokens that the
    window reaches, and ``windowed_kernel`` attends to all of these keys. The gradients of zeros are zero.

    Args:
        kernel: Computes attention of some queries to some keys.
        group: The R ranks.
        window: The keys that a query sees at most; None for all before it.
        documents: The documents of the rows; None if each row is one.
    """
    windows = None if window is None else windowed_kernel(kernel, window)

    def parts(q: Tensor) -> Iterator[Part]:
        ranks, (rows, heads, tokens, _) = size_of(group), q.shape
        whole = torch.Size((rows, heads, ranks * tokens))
        of_rows = [(slice(None), slice(0, ranks * tokens))] if documents is None else documents.parts(whole)
        return parts_of(of_rows, tokens // 2, ranks, rank_in(group), window)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        check_causal("gathered attention", causal)
        sum_dtype = accumulation_dtype(q.dtype)
        keys_values = _in_order(k, v, group)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=sum_dtype)
        for part in parts(q):
            own = q[part.rows, :, part.own]
            if windows is not None and part.padding is not None:
                keys = _keys(keys_values, part, part.begin, part.stop)
                result, result_lse = windows.forward(_padded(own, part.padding), *keys, scale=scale)
                result, result_lse = (t[:, :, part.padding :] for t in (result, result_lse))
            else:
                keys = _keys(keys_values, part, part.start, part.stop)
                result, result_lse = kernel.forward(own, *keys, scale=scale)
                if part.begin < part.start:
                    result, keys = result.to(sum_dtype), _keys(keys_values, part, part.begin, part.start)
                    merge(result, result_lse, *kernel.forward(own, *keys, causal=False, scale=scale))
            out[part.rows, :, part.own].copy_(result)
            lse[part.rows, :, part.own].copy_(result_lse)
            # A variable would keep tensors alive while the next part is computed.
            del result, result_lse, keys
        return out, lse

    def backward(*tensors: Tensor, causal: bool = True, scale: float | None = None) -> Gradients:
        check_causal("gathered attention", causal)
        _, q, k, v, *_ = tensors
        keys_values = _in_order(k, v, group)
        sum_dtype = accumulation_dtype(q.dtype)
        sums = [torch.zeros_like(t, dtype=sum_dtype) for t in keys_values]
        dq, piece = torch.empty_like(q), q.shape[2] // 2
        for part in parts(q):
            dout, own, *results = (t[part.rows, :, part.own] for t in tensors if t is not k and t is not v)
            if windows is not None and part.padding is not None and windows.accumulate is not None:
                keys, totals = (_keys(t, part, part.begin, part.stop) for t in (keys_values, sums))
                dout, own, *results = (_padded(t, part.padding) for t in (dout, own, *results))
                # ``own`` is overwritten with its gradient.
                windows.accumulate(dout, own, *keys, *results, *totals, scale=scale)
                total = own[:, :, part.padding :]
            else:
                keys, totals = (_keys(t, part, part.start, part.stop) for t in (keys_values, sums))
                total = _add(kernel, (dout, own, *keys, *results), totals, True, scale).to(sum_dtype)
                for start, length in slices(part.start - part.begin, piece, different=0):
                    first = part.begin + start
                    keys, totals = (_keys(t, part, first, first + length) for t in (keys_values, sums))
                    total.add_(_add(kernel, (dout, own, *keys, *results), totals, False, scale))
            dq[part.rows, :, part.own].copy_(total)
            del total, dout, own, results, keys, totals
        del keys_values
        # Each sum is freed before the other one is reduced.
        dk = _reduced(sums.pop(0), group).to(k.dtype)
        return dq, dk, _reduced(sums.pop(), group).to(v.dtype)

    return Kernel(forward, backward)


def _in_order(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Gather k and v, [b, h, s, D] each, in the order of the sequence, [b, h, S, D]."""
    pieces = all_gather(torch.stack(torch.stack((k, v)).chunk(2, 3)), group)
    # Of each rank there are two pieces: the first ones ascend with the ranks, and the second ones descend.
    return torch.cat((*pieces[::2], *reversed(pieces[1::2].unbind())), 3).unbind()


def _reduced(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [b, h, S, D] over all ranks, and return the tokens of this rank, [b, h, s, D]."""
    pieces = sums.chunk(2 * size_of(group), 2)
    of_ranks = zip(pieces, reversed(pieces), strict=True)
    in_ranks = [piece for _, both in zip(range(size_of(group)), of_ranks, strict=False) for piece in both]
    return torch.cat(reduce_scatter(torch.stack(in_ranks), group).unbind(), 2)


def _keys(tensors: Iterable[Tensor], part: Part, start: int, stop: int) -> tuple[Tensor, ...]:
    """View some tokens, of the rows of a part, of k and v or of their sums, [b, h, S, D] each."""
    return tuple(tensor[part.rows, :, start:stop] for tensor in tensors)


def _padded(x: Tensor, padding: int) -> Tensor:
    """Return a copy of [b, h, n, ...] with so many zeros before the n tokens."""
    return pad(x, (*(0, 0) * (x.dim() - 3), padding, 0))


def _add(
    kernel: Kernel,
    tensors: tuple[Tensor, ...],
    sums: tuple[Tensor, ...],
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Run a backward of ``kernel``: add dk and dv to their sums, and return dq."""
    if kernel.accumulate is not None:
        dout, q, *others = tensors
        dq = q.clone()
        kernel.accumulate(dout, dq, *others, *sums, causal=causal, scale=scale)
        return dq
    dq, *parts = kernel.backward(*tensors, causal=causal, scale=scale)
    for total in sums:
        total.add_(parts.pop(0))
    return dq
