"""What a UPipe stage works with: its buffers, its projections, its exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lab.techniques.exchange import all_to_all
from lab.techniques.upipe_schedule import Run, Schedule

QUERIES, KEYS_AND_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)
"""What travels together, of q, k and v."""


class Bench:
    """The buffers of one layer's pass over its stages, and what is done in them.

    Letters: b rows, s local tokens, S = C*s, n query heads a rank and stage, m slots in flight. Heads lie in
    one of two orders:

    - by sequence, [C, b, s, heads, D]: this rank's tokens, heads grouped by the rank they go to;
    - by heads, [b, S, heads, D]: all tokens, this rank's heads.

    An all-to-all leads from one to the other. ``q``, ``k`` and ``v`` are the stage's queries and their keys
    and values, by heads, side by side in one *room* of (n + 2m) heads. What travels together is packed token
    by token, so that one all-to-all carries it: it is made in the room, and sorted into it when it arrives
    (queries alone, with b = 1, arrive in order). A *buffer* holds as much as ``q``; buffers are taken and
    given back by hand and serve all stages.
    """

    def __init__(self, plan: Schedule, group: dist.ProcessGroup | None, x: Tensor, head_dim: int) -> None:
        self.plan, self.group = plan, group
        self.batch, self.local = x.shape[:2]
        self.head_dim = head_dim
        self.x = x.reshape(-1, x.shape[-1])
        self._free: list[Tensor] = []
        head = self.batch * self.local * plan.ranks * head_dim
        self._heads: tuple[int, ...] = (plan.heads_per_rank, plan.slots_in_flight, plan.slots_in_flight)
        self.room = x.new_empty(head * sum(self._heads))
        self.q, self.k, self.v = self.room.split([head * heads for heads in self._heads])

    # ---- buffers ---------------------------------------------------------------------------------------

    def take(self) -> Tensor:
        """A buffer, flat; what is in it is of no use."""
        return self._free.pop() if self._free else torch.empty_like(self.q)

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
        self.give(self.room)
        self.clear()

    def by_sequence(self, flat: Tensor) -> Tensor:
        """Flat memory as [C, b, s, heads, D]."""
        return flat.view(self.plan.ranks, self.batch, self.local, -1, self.head_dim)

    def by_heads(self, flat: Tensor) -> Tensor:
        """The same elements as [b, S, heads, D]."""
        return flat.view(self.batch, self.plan.ranks * self.local, -1, self.head_dim)

    @property
    def keys(self) -> Tensor:
        """[b, m, S, D], as the kernel wants them."""
        return self.by_heads(self.k).transpose(1, 2)

    @property
    def values(self) -> Tensor:
        """The same of the values."""
        return self.by_heads(self.v).transpose(1, 2)

    def runs(self, buffer: Tensor, stage: tuple[Run, ...]) -> list[Tensor]:
        """A buffer by heads, cut into its stage's runs: views [b, heads, S, D]."""
        sizes = [len(run.slots) * len(run.queries) for run in stage]
        return list(self.by_heads(buffer).transpose(1, 2).split(sizes, 1))

    # ---- exchanges -------------------------------------------------------------------------------------

    @contextmanager
    def filling(self, which: slice) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield where to write these of q, k, v, by sequence, and scratch of as much; exchange them after.

        They travel in one all-to-all, and lie by heads in their rooms when the block is left.
        """
        packed, other = self._pack(which)
        straight, heads = self._straight(which), self._heads[which]
        # A group of one gives back what is sent, and that is sorted into the room from elsewhere.
        send, received = (other, packed) if straight or self.plan.ranks == 1 else (packed, other)
        yield list(self.by_sequence(send).split(heads, 3)), received
        arrived = all_to_all(self.by_sequence(send), self.group, out=self.by_sequence(received))
        if not straight:
            for room, part in zip((self.q, self.k, self.v)[which], arrived.split(heads, 3), strict=True):
                self.by_heads(room).unflatten(1, (self.plan.ranks, -1)).copy_(part.transpose(0, 1))
        self._unpack(other)

    @contextmanager
    def home(self, which: slice, *grads: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Send ``q``, gradients in the place of k and v, or all three home; yield them, and scratch.

        The gradients are [b, m, S, D] of any width, what is yielded is by sequence. One all-to-all.
        """
        packed, other = self._pack(which)
        straight, heads = self._straight(which), self._heads[which]
        send, received = (packed, other) if straight else (other, packed)
        if not straight:
            sources = [self.by_heads(self.q)] * (which.start == 0) + [g.transpose(1, 2) for g in grads]
            for part, full in zip(self.by_sequence(send).split(heads, 3), sources, strict=True):
                part.copy_(full.unflatten(1, (self.plan.ranks, -1)).transpose(0, 1))
            del full, sources
        del grads
        arrived = all_to_all(self.by_sequence(send), self.group, out=self.by_sequence(received))
        yield list(arrived.split(heads, 3)), received if self.plan.ranks == 1 else send
        self._unpack(other)

    def _straight(self, which: slice) -> bool:
        """Whether heads travel, and in the order in which they lie in their room, [1, S, n, D]."""
        return which == QUERIES and self.batch == 1 and self.plan.ranks > 1

    def _pack(self, which: slice) -> tuple[Tensor, Tensor]:
        """The part of the room that these of q, k, v have, and as much memory elsewhere."""
        token = self.room.numel() // sum(self._heads)
        first = token * sum(self._heads[: which.start])
        packed = self.room[first : first + token * sum(self._heads[which])]
        if packed.numel() == self.q.numel():
            return packed, self.take()
        self.clear()
        return packed, torch.empty_like(packed)

    def _unpack(self, other: Tensor) -> None:
        if other.numel() == self.q.numel():
            self.give(other)
        else:
            other.untyped_storage().resize_(0)

    def to_heads(self, send: Tensor) -> Tensor:
        """[C, b, s, n, D] -> [b, S, n, D]. Takes ``send``, returns the buffer with the result."""
        if self.plan.ranks == 1:
            return send
        received = self.take()
        all_to_all(self.by_sequence(send), self.group, out=self.by_sequence(received))
        if self.batch == 1:
            self.give(send)
            return received
        self.by_heads(send).unflatten(1, (self.plan.ranks, -1)).copy_(
            self.by_sequence(received).transpose(0, 1)
        )
        self.give(received)
        return send

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

    def project_queries(
        self, stage: tuple[Run, ...], weight: Tensor, bias: Tensor | None, target: Tensor
    ) -> None:
        """x [b, s, E] times the stage's rows of W [H*D, E], into ``target`` [C, b, s, n, D]."""
        rows = self._by_slot(weight, 0)
        biases = None if bias is None else self._by_slot(bias, 0)
        for slot, queries, part in self._pieces(stage, target):
            matrix = rows[slot, :, queries].flatten(1, 2).transpose(1, 2)
            _multiply(
                self.x, matrix, None if biases is None else biases[slot, :, queries].flatten(1, 2), part
            )

    def project_grad(self, stage: tuple[Run, ...], grad: Tensor, weight: Tensor, target: Tensor) -> None:
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

    def write_columns(self, full: Tensor, stage: tuple[Run, ...], heads: Tensor) -> None:
        """Copy a stage's ``heads`` [C, b, s, n, D] to where the model has them in ``full``."""
        for theirs, ours in self._columns(full, stage, heads):
            theirs.copy_(ours)

    def read_columns(self, full: Tensor, stage: tuple[Run, ...], heads: Tensor) -> None:
        """Copy them from there to ``heads``."""
        for theirs, ours in self._columns(full, stage, heads):
            ours.copy_(theirs)

    def _columns(self, full: Tensor, stage: tuple[Run, ...], heads: Tensor) -> list[tuple[Tensor, Tensor]]:
        by_slot = self._by_slot(full, 2)
        found, first = [], 0
        for run in stage:
            for slot in run.slots:
                theirs = by_slot[:, :, slot, :, run.queries.start : run.queries.stop].permute(2, 0, 1, 3, 4)
                found.append((theirs, heads[..., first : first + len(run.queries), :]))
                first += len(run.queries)
        return found

    def _sizes(self) -> tuple[int, int, int, int]:
        """A model's H heads as [slots, C, G, D]: rank r's part of slot g are heads (g*C + r)*G to +G."""
        return self.plan.slots, self.plan.ranks, self.plan.group, self.head_dim

    def _by_slot(self, weight: Tensor, dim: int) -> Tensor:
        by_slot: Tensor = weight.unflatten(dim, self._sizes())
        return by_slot

    def _pieces(self, stage: tuple[Run, ...], target: Tensor) -> list[tuple[int, slice, Tensor]]:
        """For each slot of the stage: its number, queries, and part of ``target`` as [C, b*s, heads*D]."""
        rows = target.view(self.plan.ranks, self.x.shape[0], -1)
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
