"""Sliding windows: attention to the last keys alone, by any kernel of causal attention.

Letters: b rows, h query heads, G query heads per key/value head, S tokens, D head_dim, W keys of a window,
w bytes per element, f = 4 bytes per element of a sum (8 in fp64). The LSE (log-sum-exp) of a query is the
logarithm of its softmax's denominator. dq, dk and dv are the gradients of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lab.errors import RecipeError
from lab.techniques.attention.documents import Documents, documents_kernel
from lab.techniques.attention.flash import FLASH
from lab.techniques.attention.kernel import Gradients, Kernel, check_causal
from lab.techniques.attention.merging import merge
from lab.techniques.limits import WINDOW_PIECE
from lab.techniques.precision import accumulation_dtype
from lab.techniques.slices import slices


def kernel_of(module: nn.Module, documents: Documents | None = None) -> Kernel:
    """Return the kernel of an attention module, with the module's window and the documents of its input.

    ``apply_attention`` notes the window on the module. ``lab_kernel`` is the kernel, which may be a ring;
    without it, the kernel is ``FLASH``. ``lab_gathered`` makes of it one that gathers keys and values, which
    takes the window and the documents itself; see ``gathered_kernel``.
    """
    kernel: Kernel = getattr(module, "lab_kernel", FLASH)
    window: Any = module.lab_window
    if documents is not None:
        documents.uses += 1
    gathered: Callable[..., Kernel] | None = getattr(module, "lab_gathered", None)
    if gathered is not None:
        return gathered(kernel, window=window, documents=documents)
    if window is not None:
        kernel = windowed_kernel(kernel, window)
    return kernel if documents is None else documents_kernel(kernel, documents)


def windowed_kernel(kernel: Kernel, window: int, *, piece: int = WINDOW_PIECE) -> Kernel:
    """Return a kernel whose queries attend to the last ``window`` keys: query i to keys i - W + 1 to i.

    The sequence is divided into blocks of W tokens. A query sees the keys of its own block that are not after
    it, which is causal attention. Of the block before it, query r of a block sees each key c with c > r. If
    queries and keys are reversed, this is causal attention too: c > r means that W - 1 - c is at most
    W - 2 - r. So two calls of ``kernel`` compute all blocks of a piece, with the blocks as the rows of a
    batch, and ``merge`` joins their results. The output and the LSE are those of attention to all keys of a
    window, so the gradients of both calls are exact parts of the whole gradients.

    Args:
        kernel: Computes causal attention, forward and backward.
        window: W, at least 1.
        piece: The most tokens in one call, if W is not larger.

    Saves:
        Attention to W keys a query in place of S/2, in both passes: 4*b*h*S*W*D floating-point operations
        forward. In backward, the kernel's dq, dk and dv of all tokens, as ``tiled_kernel``.
    Costs:
        Tensors of the p = min(S, max(W, ``piece``)) tokens of a call: q, k and v in reversed order and an
        output, p*h*D*w*(2 + 2/G) bytes forward, or in half precision 6*p*h*D bytes if that is more; dout, q,
        k, v and out in reversed order, and dq, dk and dv, p*h*D*w*(4 + 4/G) bytes backward; in both, a few
        LSEs of p tokens in addition. In backward also the sums of dk and dv, 2*b*S*h*D*f/G bytes. If W does
        not divide S, the queries of the last block are padded for the second call.
    Source:
        Longformer (arXiv 2004.05150), section 3.1, for windows; FlashAttention (arXiv 2205.14135), appendix
        B.4, for gradients from the LSE over all keys.
    Composes with:
        Every kernel, Ulysses, UPipe and streamed layers, where a rank has the whole sequence of some heads.
        Not a ring that sends, where a rank has two pieces of the sequence; ``gathered_kernel`` has all keys.

    Raises:
        RecipeError: ``window`` is less than 1.
    """
    if window < 1:
        raise RecipeError(f"a window of {window} keys: a query sees at least itself; give 1 or more")

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        check_causal("a window", causal)
        if window >= q.shape[2]:
            return kernel.forward(q, k, v, scale=scale)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for blocks in _pieces(q.shape, window, piece):
            part, part_lse = kernel.forward(blocks.of(q), blocks.of(k), blocks.of(v), scale=scale)
            blocks.of(out).copy_(part)
            blocks.of(lse).copy_(part_lse)
            del part, part_lse
            if blocks.have_earlier_keys:
                part, part_lse = kernel.forward(
                    blocks.reverse_queries(q), blocks.reverse_keys(k), blocks.reverse_keys(v), scale=scale
                )
                part = blocks.in_order(part)
                part_lse = blocks.in_order(part_lse)
                # In half precision, the sum of both is rounded once.
                whole = blocks.queries(out).to(lse.dtype)
                merge(whole, blocks.queries(lse), part, part_lse)
                if whole.dtype != out.dtype:
                    blocks.queries(out).copy_(whole)
                del part, part_lse, whole
        return out, lse

    def backward(*tensors: Tensor, causal: bool = True, scale: float | None = None) -> Gradients:
        _, q, k, v, *_ = tensors
        if window >= q.shape[2]:
            return kernel.backward(*tensors, causal=causal, scale=scale)
        check_causal("a window", causal)
        dq = torch.empty_like(q)
        sums = [torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in (k, v)]
        _add_blocks(kernel, window, piece, tensors, dq, sums, scale)
        dk = sums.pop(0).to(k.dtype)
        return dq, dk, sums.pop().to(v.dtype)

    def accumulate(*tensors: Tensor, causal: bool = True, scale: float | None = None) -> None:
        q = tensors[1]
        if window >= q.shape[2] and kernel.accumulate is not None:
            kernel.accumulate(*tensors, causal=causal, scale=scale)
            return
        check_causal("a window", causal)
        _add_blocks(kernel, window, piece, tensors[:6], q, [*tensors[6:]], scale)

    return Kernel(forward, backward, accumulate)


def _add_blocks(
    kernel: Kernel,
    window: int,
    piece: int,
    tensors: tuple[Tensor, ...],
    dq: Tensor,
    sums: list[Tensor],
    scale: float | None,
) -> None:
    """Write dq, and add dk and dv to their ``sums``.

    Args:
        kernel: As in ``windowed_kernel``, like ``window`` and ``piece``.
        window: W; more than S stands for S.
        piece: The most tokens in one call, if W is not larger.
        tensors: dout, q, k, v, the output and the LSE.
        dq: Where dq is written. It may be q itself.
        sums: The sums of dk and dv.
        scale: Multiplies the scores.
    """
    grad_out, q, k, v, out, lse = tensors
    for blocks in _pieces(q.shape, min(window, q.shape[2]), piece):
        earlier = None
        if blocks.have_earlier_keys:
            dout_, q_, out_, lse_ = (blocks.reverse_queries(t) for t in (grad_out, q, out, lse))
            k_, v_ = blocks.reverse_keys(k), blocks.reverse_keys(v)
            earlier, *parts = kernel.backward(dout_, q_, k_, v_, out_, lse_, scale=scale)
            del dout_, q_, k_, v_, out_, lse_
            for total in sums:
                blocks.keys(total).add_(parts.pop(0).flip(2))
        part, *parts = kernel.backward(*map(blocks.of, tensors), scale=scale)
        for total in sums:
            blocks.of(total).add_(parts.pop(0))
        blocks.of(dq).copy_(part)
        del part
        if earlier is not None:
            blocks.queries(dq).add_(blocks.in_order(earlier))
            del earlier


class _Blocks:
    """Blocks of tokens of one row, as the rows of a batch: [b, h, S, ...] -> [blocks, h, length, ...].

    Args:
        row: The row.
        start: The first token.
        count: The number of blocks.
        length: The tokens of each block: W, or fewer in the last block of a row.
        window: W.
    """

    def __init__(self, row: int, start: int, count: int, length: int, window: int) -> None:
        self.row, self.start, self.count, self.length, self.window = row, start, count, length, window
        # The first block of a row has no block before it.
        self.first = int(start == 0)
        self.have_earlier_keys = count > self.first and window > 1
        self.missing = max(window - 1 - length, 0)
        """The queries with which those of the last block of a row are padded."""

    def of(self, x: Tensor) -> Tensor:
        """View the blocks of ``x``."""
        return _divide(x[self.row, :, self.start : self.start + self.count * self.length], self.count)

    def queries(self, x: Tensor) -> Tensor:
        """View the tokens that see keys of the block before theirs."""
        return self.of(x)[self.first :, :, : self.window - 1]

    def keys(self, x: Tensor) -> Tensor:
        """View the keys before these blocks that ``queries`` see, [blocks, h, W - 1, ...]."""
        count = self.count - self.first
        start = self.start - self.window * (1 - self.first)
        return _divide(x[self.row, :, start : start + count * self.window], count)[:, :, 1:]

    def reverse_queries(self, x: Tensor) -> Tensor:
        """Return ``queries`` in reversed order, [blocks, h, W - 1, ...].

        Zeros are put before those of a short block. Their gradients are zero.
        """
        tokens = self.queries(x).flip(2)
        return pad(tokens, (*(0, 0) * (x.dim() - 3), self.missing, 0)) if self.missing else tokens

    def reverse_keys(self, x: Tensor) -> Tensor:
        """Return ``keys`` in reversed order."""
        return self.keys(x).flip(2)

    def in_order(self, x: Tensor) -> Tensor:
        """Return a result for ``reverse_queries`` in the order of ``queries``, without that of padding."""
        return x[:, :, self.missing :].flip(2)


def _divide(x: Tensor, count: int) -> Tensor:
    """View [h, count*length, ...] as [count, h, length, ...]."""
    divided: Tensor = x.unflatten(1, (count, -1))
    return divided.transpose(0, 1)


def _pieces(shape: torch.Size, window: int, piece: int) -> Iterator[_Blocks]:
    """Yield the blocks of each row of [b, h, S, D]: ``piece`` tokens at once at most, or one longer block."""
    rows, _, tokens, _ = shape
    whole, together = tokens // window, max(1, piece // window)
    for row in range(rows):
        for first, count in slices(whole, together):
            yield _Blocks(row, first * window, count, window, window)
        if tokens % window:
            yield _Blocks(row, whole * window, 1, tokens % window, window)
