"""One rank's part of a global batch: labels shifted before anything is sharded, positions global."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lab.recipe import Recipe
from lab.techniques.tiled_loss import IGNORED


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank feeds its model.

    ``input_ids`` and ``labels`` [b, s] int64; ``labels[i]`` is the token after ``input_ids[i]`` in the
    global sequence, or ``IGNORED``. ``position_ids`` [1, s] are positions in the global sequence.
    ``label_count`` counts the labels of all ranks together; ``group`` is all ranks.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    label_count: int
    group: dist.ProcessGroup


def shard_batch(input_ids: Tensor, recipe: Recipe, mesh: DeviceMesh) -> Batch:
    """This rank's part of ``input_ids`` [b, S], which is the same on every rank.

    Rows are split over the data-parallel ranks. Where they do not divide, rows are repeated with all their
    labels ignored: every rank does the same work and the sum over ranks stays the sum over the b rows.
    """
    rows, tokens = input_ids.shape
    labels = torch.full_like(input_ids, IGNORED)
    labels[:, :-1] = input_ids[:, 1:]
    position_ids = torch.arange(tokens, device=input_ids.device)[None]

    data_ranks, data_rank = mesh.size(), mesh.get_local_rank()
    each = -(-rows // data_ranks)
    mine = torch.arange(data_rank * each, (data_rank + 1) * each)
    labels = labels[mine % rows]
    labels[mine >= rows] = IGNORED
    return Batch(
        input_ids=input_ids[mine % rows],
        labels=labels,
        position_ids=position_ids,
        label_count=rows * (tokens - 1),
        group=mesh.get_group(),
    )
