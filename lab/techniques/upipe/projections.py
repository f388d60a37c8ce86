"""A stage's heads in the weights and in the model's order: projecting, reading, writing and summing them."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.techniques.upipe.schedule import Schedule, Stage


class HeadProjections:
    """The heads of a layer's x [b, s, E] in the order of ``plan``, by sequence: [C, b, s, heads, D].

    Letters: b rows, s local tokens, n query heads a rank and stage, m slots in flight.
    """

    def __init__(self, plan: Schedule, x: Tensor, head_dim: int) -> None:
        self.plan, self.head_dim = plan, head_dim
        self.x = x.reshape(-1, x.shape[-1])

    # ---- replicas of key/value heads, where there are fewer than ranks -----------------------------------

    def sum_replicas(self, x: Tensor) -> Tensor:
        """Replicas of heads, [C, ...], summed into the first of each: the view [C/replicas, ...]."""
        first = self.first_replicas(x)
        if self.plan.replicas > 1:
            first.copy_(x.unflatten(0, (-1, self.plan.replicas)).sum(1))
        return first

    def first_replicas(self, x: Tensor) -> Tensor:
        """[C, ...] -> the view [C/replicas, ...]."""
        first: Tensor = x.unflatten(0, (-1, self.plan.replicas))[:, 0]
        return first

    # ---- projections -----------------------------------------------------------------------------------

    def project_queries(self, stage: Stage, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
        """x [b, s, E] times the stage's rows of W [H*D, E], into ``target`` [C, b, s, n, D]."""
        rows = self._by_slot(weight, 0)
        biases = None if bias is None else self._by_slot(bias, 0)
        for slot, queries, part in self._pieces(stage, target):
            matrix = rows[slot, :, queries].flatten(1, 2).transpose(1, 2)
            _multiply(
                self.x, matrix, None if biases is None else biases[slot, :, queries].flatten(1, 2), part
            )

    def project_grad(self, stage: Stage, grad: Tensor, weight: Tensor, target: Tensor) -> None:
        """dy [b, s, E] times the stage's columns of Wo [E, H*D], into ``target`` [C, b, s, n, D]."""
        columns = self._by_slot(weight, 1)
        for slot, queries, part in self._pieces(stage, target):
            matrix = columns[:, slot, :, queries].flatten(2, 3).transpose(0, 1)
            _multiply(grad.flatten(0, 1), matrix, None, part)

    def project_slots(self, slots: range, weight: Tensor, bias: Tensor | None, target: Tensor) -> None:
        """x times the slots' rows of W [K*D, E], into ``target`` [C, b, s, m, D], replicas alike."""
        plan = self.plan
        # [C/replicas, replicas, b*s, m, D]: project once for the first replica, then copy
        shared = target.flatten(1, 2).unflatten(0, (-1, plan.replicas))
        rows = weight.view(plan.slots, -1, self.head_dim, weight.shape[1])
        for i, slot in enumerate(slots):
            part = None if bias is None else bias.view(plan.slots, -1, self.head_dim)[slot]
            _multiply(self.x, rows[slot].transpose(1, 2), part, shared[:, 0, :, i])
        if plan.replicas > 1:
            shared[:, 1:].copy_(shared[:, :1])

    # ---- between heads by sequence and the whole [b, s, H*D] in model order -------------------------------

    def write_columns(self, full: Tensor, stage: Stage, heads: Tensor) -> None:
        """Copy a stage's ``heads`` [C, b, s, n, D] to where the model has them in ``full``."""
        for in_model, in_stage in self._columns(full, stage, heads):
            in_model.copy_(in_stage)

    def read_columns(self, full: Tensor, stage: Stage, heads: Tensor) -> None:
        """Copy them from there to ``heads``."""
        for in_model, in_stage in self._columns(full, stage, heads):
            in_stage.copy_(in_model)

    def _columns(self, full: Tensor, stage: Stage, heads: Tensor) -> list[tuple[Tensor, Tensor]]:
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
        """A model's H heads as [slots, C, G, D]: rank r's part of slot g are heads (g*C + r)*G to +G."""
        return self.plan.slots, self.plan.ranks, self.plan.group, self.head_dim

    def _by_slot(self, weight: Tensor, dim: int) -> Tensor:
        by_slot: Tensor = weight.unflatten(dim, self._sizes())
        return by_slot

    def _pieces(self, stage: Stage, target: Tensor) -> list[tuple[int, slice, Tensor]]:
        """For each slot of the stage: its number, queries, and part of ``target`` as [C, b*s, heads*D]."""
        rows = target.view(self.plan.ranks, self.x.shape[0], -1)
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
    """``out`` [C, t, d] = x [t, E] times weight [C, E, d], plus bias [C, d]; x is not copied C times."""
    everywhere = x.expand(weight.shape[0], *x.shape)
    if bias is None:
        torch.bmm(everywhere, weight, out=out)
    else:
        torch.baddbmm(bias[:, None], everywhere, weight, out=out)
