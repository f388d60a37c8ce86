"""What a UPipe stage works with: its buffers, and the exchanges that fill and empty them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lab.techniques.exchange import AllToAll, all_to_all
from lab.techniques.upipe.projections import Heads
from lab.techniques.upipe.schedule import Schedule, Stage

QUERIES, KEYS_AND_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)
"""What travels together, of q, k and v."""

Landing = Callable[[], Tensor]
"""Waits for an exchange, and gives what has arrived, where it belongs."""


class Load(NamedTuple):
    """Some of q, k and v, made in ``send`` and to arrive in ``received``, flat both.

    What goes ``ahead`` has the memory of both ``beside`` the room, in which another stage still is.
    """

    which: slice
    ahead: bool
    send: Tensor
    received: Tensor
    beside: tuple[Tensor, ...]


class Bench:
    """The buffers of one layer's pass over its stages, and what is done in them.

    Letters: b rows, s local tokens, S = C*s, n query heads a rank and stage, m slots in flight. Heads lie in
    one of two orders:

    - by sequence, [C, b, s, heads, D]: this rank's tokens, heads grouped by the rank they go to;
    - by heads, [b, S, heads, D]: all tokens, this rank's heads.

    An all-to-all leads from one to the other. ``q``, ``k`` and ``v`` are the stage's queries and their keys
    and values, by heads, side by side in one *room* of (n + 2m) heads. What travels together is packed token
    by token, so that one all-to-all carries it: it is made in the room, and sorted into it when it arrives
    (queries alone, with b = 1, arrive in order). What goes *ahead*, while the stage before still needs the
    room, is made and arrives beside it. A *buffer* holds as much as ``q``; buffers are taken and given back
    by hand and serve all stages.
    """

    def __init__(self, plan: Schedule, group: dist.ProcessGroup | None, x: Tensor, head_dim: int) -> None:
        self.plan, self.group = plan, group
        self.batch, self.local = x.shape[:2]
        self.head_dim = head_dim
        self.heads = Heads(plan, x, head_dim)
        self._free: list[Tensor] = []
        head = self.batch * self.local * plan.ranks * head_dim
        self._sizes: tuple[int, ...] = (plan.heads_per_rank, plan.slots_in_flight, plan.slots_in_flight)
        self.room = x.new_empty(head * sum(self._sizes))
        self.q, self.k, self.v = self.room.split([head * heads for heads in self._sizes])

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

    def runs(self, buffer: Tensor, stage: Stage) -> list[Tensor]:
        """A buffer by heads, cut into its stage's runs: views [b, heads, S, D]."""
        sizes = [len(run.slots) * len(run.queries) for run in stage]
        return list(self.by_heads(buffer).transpose(1, 2).split(sizes, 1))

    # ---- exchanges -------------------------------------------------------------------------------------

    def load(self, which: slice, *, ahead: bool) -> Load:
        """Memory for these of q, k, v, made in ``targets``; until they are sent, ``received`` is scratch."""
        packed, other = self._packed(which), self._beside(which)
        if ahead:
            more = self._beside(which)
            return Load(which, ahead, other, more, (other, more))
        # A group of one gives back what is sent, and that is sorted into the room from elsewhere.
        if self._straight(which) or self.plan.ranks == 1:
            return Load(which, ahead, other, packed, (other,))
        return Load(which, ahead, packed, other, (other,))

    def targets(self, load: Load) -> list[Tensor]:
        """Each of the load's q, k, v, by sequence."""
        return list(self.by_sequence(load.send).split(self._sizes[load.which], 3))

    def send(self, load: Load) -> Landing:
        """One all-to-all; having landed, they lie by heads in their rooms."""
        wait = self._exchange(load.send, load.received, load.ahead)

        def land() -> Tensor:
            arrived = wait()
            if load.ahead or not self._straight(load.which):
                parts = self.by_sequence(arrived).split(self._sizes[load.which], 3)
                for room, part in zip((self.q, self.k, self.v)[load.which], parts, strict=True):
                    self.by_heads(room).unflatten(1, (self.plan.ranks, -1)).copy_(part.transpose(0, 1))
            self._leave(*load.beside)
            return self.room

        return land

    def to_heads(self, send: Tensor, *, ahead: bool) -> Landing:
        """[C, b, s, n, D] -> [b, S, n, D]. Takes the buffer ``send``; what lands is in a buffer again."""
        if self.plan.ranks == 1:
            return lambda: send
        received = self.take()
        wait = self._exchange(send, received, ahead)

        def land() -> Tensor:
            wait()
            if self.batch == 1:
                self.give(send)
                return received
            parts = self.by_sequence(received).transpose(0, 1)
            self.by_heads(send).unflatten(1, (self.plan.ranks, -1)).copy_(parts)
            self.give(received)
            return send

        return land

    def _exchange(self, send: Tensor, received: Tensor, ahead: bool) -> Landing:
        """Flat memory to flat memory: now, or ``ahead`` while something else runs."""
        source, target = (t.view(self.plan.ranks, -1) for t in (send, received))
        if ahead:
            assert self.group is not None
            return AllToAll(source, target, self.group).wait
        arrived = all_to_all(source, self.group, out=target)
        return lambda: arrived

    @contextmanager
    def home(self, which: slice, *grads: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Send ``q``, gradients in the place of k and v, or all three home; yield them, and scratch.

        The gradients are [b, m, S, D] of any width, what is yielded is by sequence. One all-to-all.
        """
        packed, other = self._packed(which), self._beside(which)
        straight, heads = self._straight(which), self._sizes[which]
        send, received = (packed, other) if straight else (other, packed)
        if not straight:
            sources = [self.by_heads(self.q)] * (which.start == 0) + [g.transpose(1, 2) for g in grads]
            for part, full in zip(self.by_sequence(send).split(heads, 3), sources, strict=True):
                part.copy_(full.unflatten(1, (self.plan.ranks, -1)).transpose(0, 1))
            del full, sources
        del grads
        arrived = all_to_all(self.by_sequence(send), self.group, out=self.by_sequence(received))
        yield list(arrived.split(heads, 3)), received if self.plan.ranks == 1 else send
        self._leave(other)

    def _straight(self, which: slice) -> bool:
        """Whether heads travel, and in the order in which they lie in their room, [1, S, n, D]."""
        return which == QUERIES and self.batch == 1 and self.plan.ranks > 1

    def _packed(self, which: slice) -> Tensor:
        """The part of the room that these of q, k, v have."""
        token = self.room.numel() // sum(self._sizes)
        first = token * sum(self._sizes[: which.start])
        return self.room[first : first + token * sum(self._sizes[which])]

    def _beside(self, which: slice) -> Tensor:
        """As much memory elsewhere."""
        packed = self._packed(which)
        if packed.numel() == self.q.numel():
            return self.take()
        self.clear()
        return torch.empty_like(packed)

    def _leave(self, *beside: Tensor) -> None:
        """Let go of what was ``_beside``."""
        for flat in beside:
            if flat.numel() == self.q.numel():
                self.give(flat)
            else:
                flat.untyped_storage().resize_(0)
