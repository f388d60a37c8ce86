"""One rank's part of a global batch: labels shifted before anything is sharded, positions global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from lab.errors import DataError, RecipeError
from lab.recipe.recipe import Recipe
from lab.step.loopback import BACKEND
from lab.step.token_source import TokenSource
from lab.techniques.agreement import check_same_batch, refuse_together
from lab.techniques.attention.documents import document_positions, documents_of
from lab.techniques.document_lengths import Lengths, check_documents, last_longer, several_or_none
from lab.techniques.inputs import boolean_mask, check_right_padding
from lab.techniques.loss import IGNORED
from lab.techniques.ring import local_positions, row_padding
from lab.torch_private import FakeTensor


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank feeds its model.

    ``input_ids`` and ``labels`` [b, s] int64; ``labels[i]`` is the token after ``input_ids[i]`` in the
    global sequence, or ``IGNORED``. ``position_ids`` [1, s] are positions in the global sequence. With
    ``documents``, the lengths of those of each row [b], they are positions in a document, and [b, s] if the
    rows have different ones; None if each row is one document.
    ``label_count`` counts the labels of all ranks together; ``group`` is all ranks; ``ulysses`` and ``ring``
    are the degrees that the sequence is sharded by; ``highest_token`` is the largest of the global batch, or
    of the vocabulary that its tokens were checked against. ``padding`` counts the tokens that were added to
    each row, so that it can be sharded.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    label_count: int
    group: dist.ProcessGroup
    ulysses: int
    ring: int
    highest_token: int
    padding: int
    documents: Lengths | None = None


def shard_batch(
    input_ids: Tensor,
    recipe: Recipe,
    mesh: DeviceMesh,
    *,
    attention_mask: Tensor | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    position_ids: Tensor | None = None,
) -> Batch:
    """This rank's part of ``input_ids`` [b, S], which is the same on every rank.

    A row's tokens are split over the C*R ranks of a sequence, padded at the end with ignored labels where S
    does not divide. Rows are split over the data-parallel ranks; where they do not divide, rows are repeated
    with all their labels ignored: every rank does the same work, and the sum over ranks stays the sum over
    the b rows.

    ``attention_mask`` [b, S] is 1 for tokens and 0 for padding at the end of rows. Padding is excluded from
    the loss. It comes after all tokens of its row, so causal attention keeps it from affecting them.

    A row may have several documents. ``documents`` are the lengths of those of each row, which add up to S:
    ``[[5, 20, 19], [44]]`` for two rows of 44 tokens. Or ``position_ids`` [b, S] begin at 0 in each document,
    as those of collators that pack rows. Attention, positions and labels then stay within a document: its
    last token predicts nothing. Padding belongs to the last document of its row.

    Raises:
        RecipeError: not [b, S]; a single token; padding elsewhere; no token to predict; documents whose
            lengths do not add up, or positions that skip; several documents in a row with a ring that sends.
        LabError: the tokens, the mask or the documents differ between ranks.
    """
    optional = (attention_mask, position_ids)
    if not isinstance(input_ids, Tensor) or not all(isinstance(one, Tensor | None) for one in optional):
        raise RecipeError(
            "input_ids, attention_mask and position_ids are tensors: give what a tokenizer makes with 'pt'"
        )
    # Before any refusal of values: with equal batches every rank refuses alike, and none waits for another.
    check_same_batch(
        input_ids, attention_mask, mesh.get_group(), documents=documents, position_ids=position_ids
    )
    labels, label_count, lengths = _labels(input_ids, attention_mask, documents, position_ids, recipe)
    rows, tokens = input_ids.shape
    mine, positions = _part(rows, tokens, recipe, mesh)
    positions = positions.to(input_ids.device)
    padding = row_padding(tokens, recipe.ulysses, recipe.ring)
    position_ids = positions[None]
    if lengths is not None:
        longer = last_longer(lengths, padding)
        lengths = tuple(longer[number % rows] for number in mine)
        position_ids = document_positions(lengths, input_ids.device)[:, positions]
    own = torch.arange(mine.start, mine.stop)
    labels = pad(labels[own % rows], (0, padding), value=IGNORED)[:, positions]
    labels[own >= rows] = IGNORED
    return Batch(
        input_ids=pad(input_ids[own % rows], (0, padding))[:, positions],
        labels=labels,
        position_ids=position_ids,
        label_count=label_count,
        group=mesh.get_group(),
        ulysses=recipe.ulysses,
        ring=recipe.ring,
        highest_token=0 if isinstance(input_ids, FakeTensor) else int(input_ids.max()),
        padding=padding,
        documents=lengths,
    )


def _labels(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    documents: Sequence[Sequence[int]] | None,
    position_ids: Tensor | None,
    recipe: Recipe,
) -> tuple[Tensor, int, Lengths | None]:
    """Return the labels of the whole batch, the number of those that count, and the documents of its rows.

    The labels are [b, S]; the documents are None if each row is one.

    Raises:
        RecipeError: see ``shard_batch``.
    """
    if input_ids.dim() != 2:
        raise RecipeError(
            f"input_ids of shape {list(input_ids.shape)}: give [rows, tokens]; documents= says which tokens "
            "of a row belong together"
        )
    rows, tokens = input_ids.shape
    if rows < 1 or input_ids.dtype != torch.int64:
        raise RecipeError(
            f"input_ids of {rows} rows in {input_ids.dtype}: give 1 row or more, in torch.int64"
        )
    if tokens < 2:
        raise RecipeError(f"rows of {tokens} tokens: there is no next token to predict; give 2 or more")
    if not isinstance(input_ids, FakeTensor) and int(input_ids.min()) < 0:
        raise RecipeError(f"input_ids with token {int(input_ids.min())}: tokens are numbered from 0")
    labels = torch.full_like(input_ids, IGNORED)
    labels[:, :-1] = input_ids[:, 1:]
    label_count, valid = rows * (tokens - 1), None
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise RecipeError(
                f"attention_mask of shape {list(attention_mask.shape)} for input_ids of shape "
                f"{list(input_ids.shape)}: give a mask of the same shape, 1 for tokens and 0 for padding"
            )
        valid = boolean_mask(attention_mask.to(input_ids.device))
        check_right_padding(valid)
        labels[:, :-1].masked_fill_(~valid[:, 1:], IGNORED)
        label_count = int(valid[:, 1:].sum())
        if label_count == 0:
            raise RecipeError(
                "attention_mask leaves no token to predict: at least one row needs 2 tokens or more"
            )
    lengths = _documents(documents, position_ids, input_ids, valid, recipe)
    if lengths is not None:
        # The token after the last one of a document begins the next document.
        ends = torch.tensor([[r, t - 1] for r, row in enumerate(lengths) for t in accumulate(row)]).T
        labels[*ends.to(labels.device)] = IGNORED
        label_count = rows * tokens - len(ends[0]) if valid is None else int((labels != IGNORED).sum())
        if label_count == 0:
            raise RecipeError(
                "documents leave no token to predict: at least one needs 2 tokens or more that are no padding"
            )
    return labels, label_count, lengths


def _documents(
    documents: Sequence[Sequence[int]] | None,
    position_ids: Tensor | None,
    input_ids: Tensor,
    is_token: Tensor | None,
    recipe: Recipe,
) -> Lengths | None:
    """Return the documents of rows, however they were given; None if each row is one.

    Raises:
        RecipeError: see ``shard_batch``.
    """
    if documents is not None and position_ids is not None:
        raise RecipeError("documents and position_ids together: give one of them, the other follows from it")
    if documents is not None:
        lengths = check_documents(documents, *input_ids.shape)
        return several_or_none(lengths, recipe.ring, recipe.ring_exchange)
    if position_ids is None:
        return None
    if position_ids.shape != input_ids.shape or position_ids.is_floating_point():
        raise RecipeError(
            f"position_ids of shape {list(position_ids.shape)} in {position_ids.dtype}: give one of shape "
            f"{list(input_ids.shape)}, in torch.int64"
        )
    lengths = documents_of(position_ids.to(input_ids.device), is_token)
    return several_or_none(lengths, recipe.ring, recipe.ring_exchange)


def read_batch(
    source: TokenSource, windows: Sequence[range], length: int, recipe: Recipe, mesh: DeviceMesh
) -> Batch:
    """This rank's part of a batch, of which it reads no other part; the same as ``shard_batch`` makes.

    Args:
        source: The tokens, the same on every rank; ``make_rank_state`` has compared them.
        windows: The places of each row's tokens in the source, at most ``length``. A shorter row is padded at
            its end with ignored labels.
        length: S, the tokens of a row.
        recipe: The recipe, by which rows and tokens are sharded.
        mesh: All ranks. The batch is on its device.

    Raises:
        DataError: See ``TokenSource.read``; every rank raises it where one does. Or a rank that is rehearsed
            has no label.
    """
    mine, positions = _part(len(windows), length, recipe, mesh)
    input_ids = torch.zeros(len(mine), len(positions), dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)

    def read() -> None:
        for row, number in enumerate(mine):
            window = windows[number % len(windows)]
            inside = positions < len(window)
            input_ids[row, inside] = source.read(window.start + positions[inside])
            if number < len(windows):
                followed = positions < len(window) - 1
                labels[row, followed] = source.read(window.start + positions[followed] + 1)

    group = mesh.get_group()
    refuse_together(read, group)
    label_count = sum(len(window) - 1 for window in windows)
    if dist.get_backend(group) == BACKEND:
        # Every rank has the labels of this one, and their sum is as many times the sum of this one.
        label_count = int((labels != IGNORED).sum()) * group.size()
        if not label_count:
            raise DataError("the rank that is rehearsed has no token with a label: give more tokens")
    return Batch(
        input_ids=input_ids.to(mesh.device_type),
        labels=labels.to(mesh.device_type),
        position_ids=positions[None].to(mesh.device_type),
        label_count=label_count,
        group=group,
        ulysses=recipe.ulysses,
        ring=recipe.ring,
        highest_token=source.vocab_size - 1,
        padding=row_padding(length, recipe.ulysses, recipe.ring),
    )


def _part(rows: int, tokens: int, recipe: Recipe, mesh: DeviceMesh) -> tuple[range, Tensor]:
    """This rank's part of a batch of rows of tokens.

    Returns:
        The numbers of its rows [b]; those from ``rows`` on are repeats, whose labels do not count. The
        positions of its tokens [s]; those from ``tokens`` on are padding.
    """
    of_data, of_sequence = divmod(mesh.get_local_rank(), recipe.ulysses * recipe.ring)
    each = -(-rows * recipe.ulysses * recipe.ring // mesh.size())
    padded = tokens + row_padding(tokens, recipe.ulysses, recipe.ring)
    positions = local_positions(padded, ulysses=recipe.ulysses, ring=recipe.ring, index=of_sequence)
    return range(of_data * each, (of_data + 1) * each), positions
