"""Documents in one row: attention within each document alone, by any kernel of causal attention.

Letters: b rows, h query heads, G query heads per key/value head, S tokens, D head_dim, w bytes per element,
f = 4 bytes per element of a sum (8 in fp64). The LSE (log-sum-exp) of a query is the logarithm of its
softmax's denominator. dq, dk and dv are the gradients of q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

import torch
from torch import Tensor

from lab.errors import RecipeError
from lab.techniques.attention.kernel import Gradients, Kernel, check_causal
from lab.techniques.document_lengths import Lengths
from lab.techniques.precision import accumulation_dtype


class Documents:
    """The documents of one forward pass, which reach every attention as the keyword ``lab_documents``.

    A recomputed layer gets the keywords of its own forward pass, and so do the layers of micro-batches whose
    backward runs later.

    Args:
        lengths: The documents of this rank's rows. Those of a row have all of its S tokens.

    Attributes:
        uses: How many attentions have asked for a kernel.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.uses = 0

    def parts(self, shape: torch.Size) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and the tokens of each document; rows of equal documents are together.

        Raises:
            ValueError: A tensor of this shape, [b, h, S, ...], has other rows or tokens.
        """
        if [sum(lengths) for lengths in self.lengths] != [shape[2]] * shape[0]:
            raise ValueError(f"documents of {self.lengths} tokens in {shape[0]} rows of {shape[2]} tokens")
        row = 0
        for lengths, group in groupby(self.lengths):
            rows = slice(row, row + len(list(group)))
            row, start = rows.stop, 0
            for length in lengths:
                yield rows, slice(start, start + length)
                start += length


def documents_kernel(kernel: Kernel, documents: Documents) -> Kernel:
    """Return a kernel whose queries attend to the keys of their own document alone.

    A document is a slice of the sequence, and ``kernel`` runs on one after the other: on rows of equal
    documents together, and else on each row alone.

    Args:
        kernel: Computes causal attention to all keys before a query, or to those of a window.
        documents: The documents of the rows.

    Saves:
        Attention to other documents: of n equal documents, 1 - 1/n of its floating-point operations. In
        backward, the kernel's dq, dk and dv of all tokens.
    Costs:
        One call of the kernel for each document, with what the kernel allocates for the longest one:
        an output and an LSE forward; dq, dk and dv backward. In backward also the sums of dk and dv,
        2*b*S*h*D*f/G bytes. Short documents do not keep a GPU busy.
    Source:
        Llama 3 (arXiv 2407.21783), section 3.2, for a mask that separates the documents of a sequence.
    Composes with:
        Every kernel, windows, sinks, Ulysses, UPipe and streamed layers, where a rank has the whole sequence
        of some heads. A ring that sends has not; ``gathered_kernel`` divides documents by itself.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        check_causal("documents", causal)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        for rows, tokens in documents.parts(q.shape):
            own = [t[rows, :, tokens] for t in (q, k, v)]
            part, part_lse = kernel.forward(*own, scale=scale)
            out[rows, :, tokens].copy_(part)
            lse[rows, :, tokens].copy_(part_lse)
            del part, part_lse
        return out, lse

    def backward(*tensors: Tensor, causal: bool = True, scale: float | None = None) -> Gradients:
        check_causal("documents", causal)
        dq, dk, dv = (torch.empty_like(t) for t in tensors[1:4])
        for rows, tokens in documents.parts(tensors[0].shape):
            parts = list(kernel.backward(*(t[rows, :, tokens] for t in tensors), scale=scale))
            for whole in (dq, dk, dv):
                whole[rows, :, tokens].copy_(parts.pop(0))
        return dq, dk, dv

    def accumulate(*tensors: Tensor, causal: bool = True, scale: float | None = None) -> None:
        check_causal("documents", causal)
        for rows, tokens in documents.parts(tensors[0].shape):
            *own, dk, dv = (t[rows, :, tokens] for t in tensors)
            if kernel.accumulate is not None:
                kernel.accumulate(*own, dk, dv, scale=scale)
                continue
            dq, *parts = kernel.backward(*own, scale=scale)
            own[1].copy_(dq)
            del dq
            for total in (dk, dv):
                total.add_(parts.pop(0))

    return Kernel(forward, backward, accumulate)


# ---- the documents of a batch ------------------------------------------------------------------------------


def documents_of(position_ids: Tensor, is_token: Tensor | None = None) -> Lengths:
    """Return the documents of rows whose positions begin at 0 in each document.

    Args:
        position_ids: [b, S], integers.
        is_token: [b, S], False for padding at the end of a row, whose positions are not read: it belongs to
            the last document. None for no padding.

    Raises:
        RecipeError: A row does not begin at 0, or a position is neither 0 nor the one before it and 1.
    """
    before = torch.cat((position_ids.new_full((len(position_ids), 1), -1), position_ids[:, :-1]), 1)
    starts, wrong = position_ids == 0, (position_ids != 0) & (position_ids != before + 1)
    if is_token is not None:
        starts, wrong = starts & is_token, wrong & is_token
        starts[:, 0] = True
    if bool(wrong.any()):
        row, place = (int(n) for n in wrong.nonzero()[0])
        raise RecipeError(
            f"position_ids of row {row} have {int(position_ids[row, place])} at token {place}: give "
            "positions that count from 0 in each document of a row"
        )
    tokens, lengths = position_ids.shape[1], []
    for of_row in starts:
        places = [*of_row.nonzero().flatten().tolist(), tokens]
        lengths.append(tuple(end - start for start, end in pairwise(places)))
    return tuple(lengths)


def document_positions(lengths: Lengths, device: torch.device | str = "cpu") -> Tensor:
    """Return the positions of all tokens, which begin at 0 in each document.

    Returns:
        [b, S], or [1, S] if all rows have the same documents; int64.
    """
    different = lengths[:1] if len(set(lengths)) == 1 else lengths
    rows = [torch.cat([torch.arange(length, device=device) for length in of_row]) for of_row in different]
    return torch.stack(rows)
