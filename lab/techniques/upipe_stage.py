"""What a UPipe stage works with: its buffers, its projections, its exchanges."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lab.techniques.exchange import all_to_all
from lab.techniques.upipe_schedule import Run, Schedule


class Bench:
    """The buffers of one layer's pass over its stages, and what is done in them.

    Letters: b rows, s local tokens, S = C*s, n query heads a rank and stage, m slots in flight. A *buffer*
    holds the b*s*U*D elements of a stage's query heads, in one of two orders:

    - by sequence, [C, b, s, n, D]: this rank's tokens, heads grouped by the rank they go to;
    - by heads, [b, S, n, D]: all tokens, this rank's heads.

    An all-to-all leads from one to the other, without a copy where b = 1. Projections write straight into the
    order that is sent. Buffers are taken and given back by hand and serve all stages.
    """

    def __init__(self, plan: Schedule, group: dist.ProcessGroup | None, x: Tensor, head_dim: int) -> None:
        self.plan, self.group = plan, group
        self.batch, self.local = x.shape[:2]
        self.head_dim = head_dim
        self.x = x.reshape(-1, x.shape[-1])
        self._free: list[Tensor] = []
        kv = self.batch * self.local * plan.ranks * plan.slots_in_flight * head_dim
        self.k, self.v = x.new_empty(kv), x.new_empty(kv)

    # ---- buffers ---------------------------------------------------------------------------------------

    def take(self) -> Tensor:
        """A buffer, flat; what is in it is of no use."""
        if self._free:
            return self._free.pop()
        return self.x.new_empty(self.batch * self.local * self.plan.chunk * self.head_dim)

    def give(self, *buffers: Tensor) -> None:
        """Hand buffers back for the next ``take``."""
        self._free.extend(buffers)

    def clear(self) -> None:
        """Let go of buffers nobody holds: the attention is about to make a tensor of this size itself."""
        while self._free:
            # Callers' names may still hold it.
            self._free.pop().untyped_storage().resize_(0)

    def close(self) -> None:
        """Let go of everything; what was taken must have been given back."""
        self.give(self.k, self.v)
        self.clear()

    def by_sequence(self, buffer: Tensor, heads: int | None = None) -> Tensor:
        """The buffer's first b*s*C*heads*D elements as [C, b, s, heads, D]; heads is n unless given."""
        shape = (self.plan.ranks, self.batch, self.local, heads or self.plan.heads_per_rank, self.head_dim)
        return buffer[: torch.Size(shape).numel()].view(shape)

    def by_heads(self, buffer: Tensor, heads: int | None = None) -> Tensor:
        """The same elements as [b, S, heads, D]."""
        return self.by_sequence(buffer, heads).view(
            self.batch, self.plan.ranks * self.local, -1, self.head_dim
        )

    @property
    def keys(self) -> Tensor:
        """[b, m, S, D], as the kernel wants them."""
        return self.by_heads(self.k, self.plan.slots_in_flight).transpose(1, 2)

    @property
    def values(self) -> Tensor:
        """The same of the values."""
        return self.by_heads(self.v, self.plan.slots_in_flight).transpose(1, 2)

    def runs(self, buffer: Tensor, stage: tuple[Run, ...]) -> list[Tensor]:
        """A buffer by heads, cut into its stage's runs: views [b, heads, S, D]."""
        sizes = [len(run.slots) * len(run.queries) for run in stage]
        return list(self.by_heads(buffer).transpose(1, 2).split(sizes, 1))

    # ---- exchanges -------------------------------------------------------------------------------------

    def to_heads(self, send: Tensor) -> Tensor:
        """[C, b, s, n, D] -> [b, S, n, D]. Takes ``send``, returns the buffer with the result."""
        if self.plan.ranks == 1:
            return send
        received = self.take()
        all_to_all(self.by_sequence(send), self.group, out=self.by_sequence(received))
        if self.batch == 1:
            self.give(send)
            return received
        self._turn(received, send)
        self.give(received)
        return send

    def to_sequence(self, send: Tensor) -> Tensor:
        """[b, S, n, D] -> [C, b, s, n, D]. Takes ``send``, returns the buffer with the result."""
        if self.plan.ranks == 1:
            return send
        received = self.take()
        if self.batch > 1:
            self._turn(send, received, back=True)
            send, received = received, send
        all_to_all(self.by_sequence(send), self.group, out=self.by_sequence(received))
        self.give(send)
        return received

    def _turn(self, source: Tensor, target: Tensor, heads: int | None = None, back: bool = False) -> None:
        """Copy [C, b, ...] to [b, C, ...], or back."""
        shape = self.by_sequence(source, heads).shape
        first = (shape[1], shape[0]) if back else (shape[0], shape[1])
        turned = source[: shape.numel()].view(*first, *shape[2:]).transpose(0, 1)
        target[: shape.numel()].view(turned.shape).copy_(turned)

    def kv_to_heads(self, send: Tensor, target: Tensor) -> None:
        """Keys or values, [C, b, s, m, D] in ``send`` -> [b, S, m, D] in ``target``; ``send`` is spoilt."""
        slots = self.plan.slots_in_flight
        if self.plan.ranks == 1:
            target.copy_(send[: target.numel()])
            return
        all_to_all(self.by_sequence(send, slots), self.group, out=self.by_sequence(target, slots))
        if self.batch > 1:
            self._turn(target, send, slots)
            target.copy_(send[: target.numel()])

    def kv_to_sequence(self, grad: Tensor, target: Tensor, slots: int) -> Tensor:
        """Their gradient, [b, m, S, D] of any width -> [C, b, s, m, D] in ``target``, in its dtype.

        Replicas are summed, and only the first of each is returned: [C/replicas, b, s, m, D].
        """
        send = self.take()
        parts = grad.transpose(1, 2).unflatten(1, (self.plan.ranks, self.local)).transpose(0, 1)
        shaped, received = self.by_sequence(send, slots), self.by_sequence(target, slots)
        if self.plan.ranks == 1:
            received.copy_(parts)
        else:
            all_to_all(shaped.copy_(parts), self.group, out=received)
        self.give(send)
        first = self.first_replicas(received)
        if self.plan.replicas > 1:
            first.copy_(received.unflatten(0, (-1, self.plan.replicas)).sum(1))
        return first

    def first_replicas(self, x: Tensor) -> Tensor:
        """[C, ...] -> the view [C/replicas, ...]."""
        first: Tensor = x.unflatten(0, (-1, self.plan.replicas))[:, 0]
        return first

    # ---- projections -----------------------------------------------------------------------------------

    def project_queries(
        self, stage: tuple[Run, ...], weight: Tensor, bias: Tensor | None, buffer: Tensor
    ) -> Tensor:
        """x [b, s, E] times the stage's rows of W [H*D, E], into ``buffer`` as [C, b, s, n, D]."""
        rows = self._by_slot(weight, 0)
        biases = None if bias is None else self._by_slot(bias, 0)
        for slot, queries, columns in self._pieces(stage, buffer):
            part = rows[slot, :, queries].flatten(1, 2).transpose(1, 2)
            _multiply(
                self.x, part, None if biases is None else biases[slot, :, queries].flatten(1, 2), columns
            )
        return self.by_sequence(buffer)

    def project_grad(self, stage: tuple[Run, ...], grad: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        """dy [b, s, E] times the stage's columns of Wo [E, H*D], into ``buffer`` as [C, b, s, n, D]."""
        columns_of = self._by_slot(weight, 1)
        for slot, queries, columns in self._pieces(stage, buffer):
            _multiply(
                grad.flatten(0, 1),
                columns_of[:, slot, :, queries].flatten(2, 3).transpose(0, 1),
                None,
                columns,
            )
        return self.by_sequence(buffer)

    def project_slots(self, slots: range, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
        """x times the slots' rows of W [K*D, E], into ``buffer`` as [C, b, s, m, D], replicas alike."""
        plan = self.plan
        shaped = self.by_sequence(buffer, len(slots))
        # [C/replicas, replicas, b*s, m, D]: project once for the first replica, then copy
        shared = shaped.view(-1, plan.replicas, *self.x.shape[:1], *shaped.shape[3:])
        rows = weight.view(plan.slots, -1, self.head_dim, weight.shape[1])
        for i, slot in enumerate(slots):
            part = None if bias is None else bias.view(plan.slots, -1, self.head_dim)[slot]
            _multiply(self.x, rows[slot].transpose(1, 2), part, shared[:, 0, :, i])
        if plan.replicas > 1:
            shared[:, 1:].copy_(shared[:, :1])
        return shaped

    # ---- between a buffer and the whole [b, s, H*D] in model order ----------------------------------------

    def write_columns(self, full: Tensor, stage: tuple[Run, ...], buffer: Tensor) -> None:
        """Copy a stage's heads, by sequence in ``buffer``, to where the model has them in ``full``."""
        for theirs, ours in self._columns(full, stage, buffer):
            theirs.copy_(ours)

    def read_columns(self, full: Tensor, stage: tuple[Run, ...], buffer: Tensor) -> None:
        """Copy them from there to ``buffer``."""
        for theirs, ours in self._columns(full, stage, buffer):
            ours.copy_(theirs)

    def write_slots(self, full: Tensor, slots: range, grad: Tensor) -> None:
        """Copy [C/replicas, b, s, m, D] to where the model has these heads in ``full`` [b, s, K*D]."""
        by_slot = full.unflatten(-1, (self.plan.slots, -1, self.head_dim))
        by_slot[:, :, slots.start : slots.stop].copy_(grad.permute(1, 2, 3, 0, 4))

    def _columns(self, full: Tensor, stage: tuple[Run, ...], buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        by_slot, ours = self._by_slot(full, 2), self.by_sequence(buffer)
        found, first = [], 0
        for run in stage:
            for slot in run.slots:
                theirs = by_slot[:, :, slot, :, run.queries.start : run.queries.stop].permute(2, 0, 1, 3, 4)
                found.append((theirs, ours[..., first : first + len(run.queries), :]))
                first += len(run.queries)
        return found

    def _sizes(self) -> tuple[int, int, int, int]:
        """A model's H heads as [slots, C, G, D]: rank r's part of slot g are heads (g*C + r)*G to +G."""
        return self.plan.slots, self.plan.ranks, self.plan.group, self.head_dim

    def _by_slot(self, weight: Tensor, dim: int) -> Tensor:
        by_slot: Tensor = weight.unflatten(dim, self._sizes())
        return by_slot

    def _pieces(self, stage: tuple[Run, ...], buffer: Tensor) -> list[tuple[int, slice, Tensor]]:
        """For each slot of the stage: its number, queries, and columns [C, b*s, heads*D] in ``buffer``."""
        rows = buffer.view(self.plan.ranks, self.x.shape[0], -1)
        found, first = [], 0
        for run in stage:
            width = len(run.queries) * self.head_dim
            for slot in run.slots:
                found.append(
                    (slot, slice(run.queries.start, run.queries.stop), rows[..., first : first + width])
                )
                first += width
        return found


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out`` [C, t, d] = x [t, E] times weight [C, E, d], plus bias [C, d]; x is not copied C times."""
    everywhere = x.expand(weight.shape[0], *x.shape)
    if bias is None:
        torch.bmm(everywhere, weight, out=out)
    else:
        torch.baddbmm(bias[:, None], everywhere, weight, out=out)
