"""Sliding windows: attention to the last keys alone, by any kernel of causal attention.

Letters: b rows, h query heads, G query heads per key/value head, S tokens, D head_dim, W keys of a window,
w bytes per element, f = 4 bytes per element of a sum (8 in fp64). The LSE (log-sum-exp) of a query is the
logarithm of its softmax's denominator. dq, dk and dv are the gradients of q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH, Kernel
from lab.techniques.attention.merging import merge
from lab.techniques.precision import accumulation_dtype
from lab.techniques.window_pieces import PIECE


def kernel_of(module: nn.Module) -> Kernel:
    """Return the kernel of an attention module, with the module's window.

    ``apply_attention`` notes the window on the module. ``lab_kernel`` is the kernel, which may be a ring;
    without it, the kernel is ``FLASH``.
    """
    kernel: Kernel = getattr(module, "lab_kernel", FLASH)
    window = module.lab_window
    return kernel if window is None else windowed_kernel(kernel, window)  # type: ignore[arg-type]


def windowed_kernel(kernel: Kernel, window: int, *, piece: int = PIECE) -> Kernel:
    """Return a kernel whose queries attend to the last ``window`` keys: query i to keys i - W + 1 to i.

    The sequence is divided into blocks of W tokens. A query sees the keys of its own block that are not after
    it, which is causal attention. Of the block before it, it sees the keys whose place in their block is
    after its own. In the reversed order of tokens this is causal attention too: query r of a block sees key
    c, if W - 1 - c is at most W - 2 - r. So two calls of ``kernel`` compute all blocks, which are rows of a
    batch there, and ``merge`` joins their results. The output and the LSE are those of attention to all keys
    of a window, so the gradients of both calls are exact parts of the whole gradients.

    Args:
        kernel: Computes causal attention, forward and backward.
        window: W, at least 1.
        piece: The most tokens in one call, if W is not larger.

    Saves:
        Attention to W keys a query in place of S/2, in both passes: 4*b*h*S*W*D floating-point operations
        forward. In backward, the kernel's dq, dk and dv of all tokens, as ``tiled_kernel``.
    Costs:
        Forward, tensors of the p = min(S, max(W, ``piece``)) tokens of a call: the outputs of two calls, a
        sum of them, and q, k and v in reversed order: b = 1, p*h*D*(3*w + f + 2*w/G) bytes at most. Backward,
        the same of dout, out, and of the gradients; and sums of dk and dv, 2*b*S*h*D*f/G bytes. If W does not
        divide S, the last block is computed with padding.
    Source:
        Longformer (arXiv 2004.05150), section 3.1, for windows; FlashAttention (arXiv 2205.14135), appendix
        B.4, for gradients from the LSE over all keys.
    Composes with:
        Every kernel, Ulysses, UPipe and streamed layers, where a rank has the whole sequence of some heads.
        A ring has not.

    Raises:
        RecipeError: ``window`` is less than 1.
    """
    if window < 1:
        raise RecipeError(f"a window of {window} keys: a query sees at least itself; give 1 or more")

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        _check_causal(causal)
        if window >= q.shape[2]:
            return kernel.forward(q, k, v, scale=scale)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for blocks in _pieces(q.shape, window, piece):
            part, part_lse = kernel.forward(*(blocks.of(t) for t in (q, k, v)), scale=scale)
            part = part.to(lse.dtype)
            if blocks.have_earlier_keys and window > 1:
                earlier, earlier_lse = kernel.forward(
                    *(blocks.of_queries(q), blocks.of_earlier_keys(k), blocks.of_earlier_keys(v)), scale=scale
                )
                rows = blocks.queries_with_earlier_keys
                merge(part[rows], part_lse[rows], earlier.flip(2), earlier_lse.flip(2))
                del earlier, earlier_lse
            blocks.write(out, part)
            blocks.write(lse, part_lse)
            del part, part_lse
        return out, lse

    def backward(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if window >= q.shape[2]:
            return kernel.backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)
        dq = torch.empty_like(q)
        sums = [torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in (k, v)]
        add_blocks(grad_out, q, k, v, out, lse, dq, *sums, causal=causal, scale=scale)
        dk = sums.pop(0).to(k.dtype)
        return dq, dk, sums.pop().to(v.dtype)

    def accumulate(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> None:
        add_blocks(grad_out, q, k, v, out, lse, q, dk, dv, causal=causal, scale=scale)

    def add_blocks(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        causal: bool,
        scale: float | None,
    ) -> None:
        """Write dq, which may be ``q`` itself, and add dk and dv to their sums."""
        _check_causal(causal)
        for blocks in _pieces(q.shape, min(window, q.shape[2]), piece):
            arguments = [blocks.of(t) for t in (grad_out, q, k, v, out, lse)]
            part, *parts = kernel.backward(*arguments, scale=scale)
            for total, gradient in zip((dk, dv), parts, strict=True):
                blocks.add(total, gradient)
            part = part.to(dk.dtype)
            del arguments, parts
            if blocks.have_earlier_keys and window > 1:
                dout_, q_, out_, lse_ = (blocks.of_queries(t) for t in (grad_out, q, out, lse))
                k_, v_ = (blocks.of_earlier_keys(t) for t in (k, v))
                earlier, *parts = kernel.backward(dout_, q_, k_, v_, out_, lse_, scale=scale)
                part[blocks.queries_with_earlier_keys].add_(earlier.flip(2))
                for total, gradient in zip((dk, dv), parts, strict=True):
                    blocks.add_to_earlier_keys(total, gradient)
                del dout_, q_, out_, lse_, k_, v_, earlier, parts
            blocks.write(dq, part)
            del part

    return Kernel(forward, backward, accumulate)


def _check_causal(causal: bool) -> None:
    if not causal:
        raise ValueError("a window with causal=False is not supported: pass causal=True")


class _Blocks:
    """Some blocks of W tokens of one row, as rows of a batch: [b, h, S, ...] -> [blocks, h, W, ...].

    Args:
        row: The row.
        start: The first token.
        count: The number of blocks.
        window: W.
        tokens: S. If the last block ends after the last token, it is padded with zeros, whose gradients are
            zero.
    """

    def __init__(self, row: int, start: int, count: int, window: int, tokens: int) -> None:
        self.row, self.start, self.count, self.window = row, start, count, window
        self.length = min(count * window, tokens - start)
        # The first block of a sequence has no block before it.
        self.first = int(start == 0)
        self.have_earlier_keys = count > self.first
        self.queries_with_earlier_keys = (slice(self.first, None), slice(None), slice(None, window - 1))
        """The places of ``of_queries`` in the blocks."""

    def of(self, x: Tensor) -> Tensor:
        """Return the blocks of ``x``, a view if nothing is padded."""
        part = x[self.row, :, self.start : self.start + self.length]
        missing = self.count * self.window - self.length
        if missing:
            part = pad(part, (*(0, 0) * (part.dim() - 2), 0, missing))
        return _divide(part, self.count)

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the tokens that see keys of the block before theirs, in reversed order."""
        return self.of(x)[self.queries_with_earlier_keys].flip(2)

    def _earlier(self, x: Tensor) -> Tensor:
        """View the keys before those blocks that these see, [blocks, h, W - 1, ...]."""
        count = self.count - self.first
        start = self.start - self.window * (1 - self.first)
        return _divide(x[self.row, :, start : start + count * self.window], count)[:, :, 1:]

    def of_earlier_keys(self, x: Tensor) -> Tensor:
        """Return the keys that ``of_queries`` see, in reversed order."""
        return self._earlier(x).flip(2)

    def write(self, target: Tensor, blocks: Tensor) -> None:
        """Copy ``blocks`` to their places in ``target``; padding is dropped."""
        self._whole(target).copy_(self._unpadded(blocks))

    def add(self, target: Tensor, blocks: Tensor) -> None:
        """Add ``blocks`` to ``target``; padding is dropped."""
        self._whole(target).add_(self._unpadded(blocks))

    def add_to_earlier_keys(self, target: Tensor, gradient: Tensor) -> None:
        """Add the gradients of ``of_earlier_keys`` to ``target``."""
        self._earlier(target).add_(gradient.flip(2))

    def _whole(self, target: Tensor) -> Tensor:
        part = target[self.row, :, self.start : self.start + self.length]
        padded = self.length < self.window
        return part[None] if padded else _divide(part, self.count)

    def _unpadded(self, blocks: Tensor) -> Tensor:
        return blocks[:, :, : self.length]


def _divide(x: Tensor, count: int) -> Tensor:
    """View [h, count*W, ...] as [count, h, W, ...]."""
    divided: Tensor = x.unflatten(1, (count, -1))
    return divided.transpose(0, 1)


def _pieces(shape: torch.Size, window: int, piece: int) -> Iterator[_Blocks]:
    """Yield the blocks of each row of [b, h, S, D], as many at once as ``piece`` tokens have."""
    rows, _, tokens, _ = shape
    whole, together = tokens // window, max(1, piece // window)
    for row in range(rows):
        for first in range(0, whole, together):
            yield _Blocks(row, first * window, min(together, whole - first), window, tokens)
        if tokens % window:
            yield _Blocks(row, whole * window, 1, window, tokens)
