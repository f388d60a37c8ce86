"""The projections of a stage's heads, and copies between the orders of heads in a stage and in the model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.techniques.upipe.schedule import HeadRange, Schedule, Stage


class HeadProjections:
    """The projections and copies of the heads of one layer.

    The heads of a stage are tensors [C, b, s, heads, D]: the heads of each of the C ranks, for this rank's
    tokens, or for a tile of them. ``StageBuffers`` calls this order "by sequence".

    Letters: b rows, s tokens of one rank, E hidden size, C ranks in the Ulysses group, n query heads of a
    rank in a stage, m slots in memory, D head_dim, H query heads and K key/value heads of the layer.
    """

    def __init__(self, schedule: Schedule, head_dim: int) -> None:
        self.schedule, self.head_dim = schedule, head_dim

    # ---- replicas of key/value heads, if there are fewer heads than ranks --------------------------------

    def sum_replicas(self, x: Tensor) -> Tensor:
        """Sum the replicas of each head, [C, ...], into the first one; return the view [C/replicas, ...]."""
        first = self.first_replicas(x)
        if self.schedule.replicas > 1:
            first.copy_(x.unflatten(0, (-1, self.schedule.replicas)).sum(1))
        return first

    def first_replicas(self, x: Tensor) -> Tensor:
        """View the first replica of each head: [C, ...] -> [C/replicas, ...]."""
        first: Tensor = x.unflatten(0, (-1, self.schedule.replicas))[:, 0]
        return first

    # ---- projections -----------------------------------------------------------------------------------

    def project_queries(
        self, x: Tensor, stage: Stage, weight: Tensor, bias: Tensor | None, target: Tensor
    ) -> None:
        """Project the stage's query heads into ``target`` [C, b, s, n, D].

        They are the product of x [b, s, E] and the stage's rows of ``weight`` [H*D, E].
        """
        rows = self._by_slot(weight, 0)
        biases = None if bias is None else self._by_slot(bias, 0)
        for slot, queries, part in self._pieces(stage, target):
            matrix = rows[slot, :, queries].flatten(1, 2).transpose(1, 2)
            _multiply(x, matrix, None if biases is None else biases[slot, :, queries].flatten(1, 2), part)

    def project_grad(self, stage: Stage, grad: Tensor, weight: Tensor, target: Tensor) -> None:
        """Compute the gradient of the stage's outputs, into ``target`` [C, b, s, n, D].

        It is the product of ``grad`` [b, s, E] and the stage's columns of ``weight`` [E, H*D], which is the
        output projection's.
        """
        columns = self._by_slot(weight, 1)
        for slot, queries, part in self._pieces(stage, target):
            matrix = columns[:, slot, :, queries].flatten(2, 3).transpose(0, 1)
            _multiply(grad, matrix, None, part)

    def project_slots(
        self, x: Tensor, slots: range, weight: Tensor, bias: Tensor | None, target: Tensor
    ) -> None:
        """Project the slots into ``target`` [C, b, s, m, D]; all replicas of a head are equal.

        They are the product of x [b, s, E] and the slots' rows of ``weight`` [K*D, E].
        """
        schedule = self.schedule
        # [C/replicas, replicas, b, s, m, D]: project once for the first replica, then copy
        shared = target.unflatten(0, (-1, schedule.replicas))
        rows = weight.view(schedule.slots, -1, self.head_dim, weight.shape[1])
        for i, slot in enumerate(slots):
            part = None if bias is None else bias.view(schedule.slots, -1, self.head_dim)[slot]
            _multiply(x, rows[slot].transpose(1, 2), part, shared[:, 0, ..., i, :])
        if schedule.replicas > 1:
            shared[:, 1:].copy_(shared[:, :1])

    def query_vector(self, stage: Stage, vector: Tensor) -> Tensor:
        """Return the elements of ``vector`` [H*D] that belong to the stage's query heads, [C, 1, 1, n, D]."""
        width = sum(len(r.slots) * len(r.queries) for r in stage)
        target = vector.new_empty(self.schedule.ranks, 1, 1, width, self.head_dim)
        self.read_columns(vector[None, None], stage, target)
        return target

    def slot_vector(self, slots: range, vector: Tensor) -> Tensor:
        """Return the elements of ``vector`` [K*D] that belong to the slots, [C, 1, 1, m, D]."""
        by_slot = vector.view(self.schedule.slots, -1, self.head_dim)[slots.start : slots.stop]
        of_ranks = by_slot.transpose(0, 1).repeat_interleave(self.schedule.replicas, 0)
        return of_ranks[:, None, None]

    def of_range(self, vector: Tensor, heads: HeadRange, rank: int) -> Tensor:
        """View the elements of ``vector`` [H] that belong to a rank's query heads of a range, [m, heads]."""
        by_slot = vector.view(self._sizes()[:3])
        queries = slice(heads.queries.start, heads.queries.stop)
        return by_slot[heads.slots.start : heads.slots.stop, rank, queries]

    # ---- copies between a stage's heads and all heads [b, s, H*D] in the order of the model ---------------

    def write_columns(self, full: Tensor, stage: Stage, heads: Tensor) -> None:
        """Copy a stage's ``heads`` [C, b, s, n, D] to their columns of ``full`` [b, s, H*D]."""
        for in_model, in_stage in self._columns(full, stage, heads):
            in_model.copy_(in_stage)

    def read_columns(self, full: Tensor, stage: Stage, heads: Tensor) -> None:
        """Copy a stage's columns of ``full`` [b, s, H*D] to ``heads`` [C, b, s, n, D]."""
        for in_model, in_stage in self._columns(full, stage, heads):
            in_stage.copy_(in_model)

    def _columns(self, full: Tensor, stage: Stage, heads: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return, for each slot of the stage, views of its query heads in ``full`` and in ``heads``."""
        by_slot = self._by_slot(full, 2)
        pieces, first = [], 0
        for heads_range in stage:
            for slot in heads_range.slots:
                in_model = by_slot[
                    :, :, slot, :, heads_range.queries.start : heads_range.queries.stop
                ].permute(2, 0, 1, 3, 4)
                pieces.append((in_model, heads[..., first : first + len(heads_range.queries), :]))
                first += len(heads_range.queries)
        return pieces

    def _sizes(self) -> tuple[int, int, int, int]:
        """Return the shape [slots, C, G, D] of the H*D features of all query heads.

        G is the number of query heads per slot; those of slot g on rank r are heads (g*C + r)*G to
        (g*C + r + 1)*G.
        """
        return self.schedule.slots, self.schedule.ranks, self.schedule.queries_per_slot, self.head_dim

    def _by_slot(self, weight: Tensor, dim: int) -> Tensor:
        by_slot: Tensor = weight.unflatten(dim, self._sizes())
        return by_slot

    def _pieces(self, stage: Stage, target: Tensor) -> list[tuple[int, slice, Tensor]]:
        """Return, for each slot of the stage: its number, its queries, and its view [C, b, s, heads*D]."""
        rows = target.flatten(3)
        pieces, first = [], 0
        for heads_range in stage:
            width = len(heads_range.queries) * self.head_dim
            for slot in heads_range.slots:
                pieces.append(
                    (
                        slot,
                        slice(heads_range.queries.start, heads_range.queries.stop),
                        rows[..., first : first + width],
                    )
                )
                first += width
        return pieces


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x [b, s, E] times weight [C, E, d], plus bias [C, d], to ``out`` [C, b, s, d]; copy nothing."""
    for rows, target in _adjacent_rows(x, out):
        expanded = rows.expand(weight.shape[0], *rows.shape)
        if bias is None:
            torch.bmm(expanded, weight, out=target)
        else:
            torch.baddbmm(bias[:, None], expanded, weight, out=target)


def _adjacent_rows(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x as [t, E] and ``out`` as [C, t, d]: all rows of the batch if they are adjacent in memory.

    Rows are not adjacent in a tile, whose tokens are a part of each row.
    """
    if x.shape[0] == 1 or out.stride(1) == out.shape[2] * out.stride(2):
        yield x.flatten(0, 1), out.flatten(1, 2)
    else:
        yield from zip(x, out.unbind(1), strict=True)
