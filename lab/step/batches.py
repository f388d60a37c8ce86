"""One rank's part of a global batch: labels shifted before anything is sharded, positions global."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from lab.errors import RecipeError
from lab.recipe.recipe import Recipe
from lab.techniques.agreement import check_same_batch
from lab.techniques.inputs import boolean_mask, check_right_padding
from lab.techniques.loss import IGNORED
from lab.techniques.ring import local_positions, token_multiple
from lab.torch_private import FakeTensor


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank feeds its model.

    ``input_ids`` and ``labels`` [b, s] int64; ``labels[i]`` is the token after ``input_ids[i]`` in the
    global sequence, or ``IGNORED``. ``position_ids`` [1, s] are positions in the global sequence.
    ``label_count`` counts the labels of all ranks together; ``group`` is all ranks; ``ulysses`` and ``ring``
    are the degrees that the sequence is sharded by; ``highest_token`` is the largest of the global batch.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    label_count: int
    group: dist.ProcessGroup
    ulysses: int
    ring: int
    highest_token: int


def shard_batch(
    input_ids: Tensor, recipe: Recipe, mesh: DeviceMesh, *, attention_mask: Tensor | None = None
) -> Batch:
    """This rank's part of ``input_ids`` [b, S], which is the same on every rank.

    A row's tokens are split over the C*R ranks of a sequence, padded at the end with ignored labels where S
    does not divide. Rows are split over the data-parallel ranks; where they do not divide, rows are repeated
    with all their labels ignored: every rank does the same work, and the sum over ranks stays the sum over
    the b rows.

    ``attention_mask`` [b, S] is 1 for tokens and 0 for padding at the end of rows. Padding is excluded from
    the loss. It comes after all tokens of its row, so causal attention keeps it from affecting them.

    Raises:
        RecipeError: not [b, S]: packed sequences are not supported; a single token; padding elsewhere; no
            token to predict.
        LabError: the tokens or the mask differ between ranks.
    """
    if not isinstance(input_ids, Tensor) or not isinstance(attention_mask, Tensor | None):
        raise RecipeError("input_ids and attention_mask are tensors: give what a tokenizer makes with 'pt'")
    # Before any refusal of values: with equal batches every rank refuses alike, and none waits for another.
    check_same_batch(input_ids, attention_mask, mesh.get_group())
    if input_ids.dim() != 2:
        raise RecipeError(
            f"input_ids of shape {list(input_ids.shape)}: give [rows, tokens], each row one sequence; "
            "packed sequences would attend across their borders"
        )
    rows, tokens = input_ids.shape
    if rows < 1 or input_ids.dtype != torch.int64:
        raise RecipeError(
            f"input_ids of {rows} rows in {input_ids.dtype}: give 1 row or more, in torch.int64"
        )
    if tokens < 2:
        raise RecipeError(f"rows of {tokens} tokens: there is no next token to predict; give 2 or more")
    highest = 0 if isinstance(input_ids, FakeTensor) else int(input_ids.max())
    if not isinstance(input_ids, FakeTensor) and int(input_ids.min()) < 0:
        raise RecipeError(f"input_ids with token {int(input_ids.min())}: tokens are numbered from 0")
    labels = torch.full_like(input_ids, IGNORED)
    labels[:, :-1] = input_ids[:, 1:]
    label_count = rows * (tokens - 1)
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

    of_data, of_sequence = divmod(mesh.get_local_rank(), recipe.ulysses * recipe.ring)
    each = -(-rows * recipe.ulysses * recipe.ring // mesh.size())
    mine = torch.arange(of_data * each, (of_data + 1) * each)
    padding = -tokens % token_multiple(recipe.ulysses, recipe.ring)
    positions = local_positions(
        tokens + padding, ulysses=recipe.ulysses, ring=recipe.ring, index=of_sequence
    ).to(input_ids.device)

    labels = pad(labels[mine % rows], (0, padding), value=IGNORED)[:, positions]
    labels[mine >= rows] = IGNORED
    return Batch(
        input_ids=pad(input_ids[mine % rows], (0, padding))[:, positions],
        labels=labels,
        position_ids=positions[None],
        label_count=label_count,
        group=mesh.get_group(),
        ulysses=recipe.ulysses,
        ring=recipe.ring,
        highest_token=highest,
    )
