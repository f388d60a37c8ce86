"""The buffers of a UPipe layer, and the all-to-alls that fill and empty them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lab.techniques.exchange import AllToAll, all_to_all
from lab.techniques.upipe.projections import HeadProjections
from lab.techniques.upipe.schedule import Schedule, Stage

QUERIES, KEYS_AND_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)
"""Which of q, k and v one all-to-all carries."""

Arrival = Callable[[], Tensor]
"""Waits for an all-to-all, sorts what arrived into its buffer, and returns that buffer."""


class Transfer(NamedTuple):
    """The memory of one all-to-all of some of q, k and v.

    Attributes:
        parts: which of q, k and v it carries.
        ahead: whether it runs while an earlier stage still uses the q/k/v buffer.
        send: flat memory in which the parts are made.
        received: flat memory in which they arrive.
        temporary: the tensors to release after the arrival; none of them is the q/k/v buffer.
    """

    parts: slice
    ahead: bool
    send: Tensor
    received: Tensor
    temporary: tuple[Tensor, ...]


class StageBuffers:
    """The memory that all stages of one layer's pass share, and the operations on it.

    Letters: C ranks, b rows, s local tokens, S = C*s, D head_dim, n query heads of a rank in a stage, m slots
    in flight (a slot is one key/value head on each rank). Heads lie in one of two orders:

    - by sequence, [C, b, s, heads, D]: this rank's tokens, heads grouped by the rank that attends with them;
    - by heads, [b, S, heads, D]: all tokens, the heads that this rank attends with.

    An all-to-all leads from one order to the other. ``q``, ``k`` and ``v`` hold the stage's queries, keys and
    values, by heads; they are parts of one ``qkv_buffer`` of (n + 2m) heads. Parts that travel together are
    packed token by token, so that one all-to-all carries them. They are made in the q/k/v buffer, and after
    the arrival they are sorted into it. Queries alone with b = 1 arrive in order and need no sorting. A
    transfer *ahead*, during an earlier stage, is made and received in temporary memory instead.

    ``acquire`` and ``release`` hand out buffers of the size of ``q`` by hand, so that all stages use the same
    few.
    """

    def __init__(self, plan: Schedule, group: dist.ProcessGroup | None, x: Tensor, head_dim: int) -> None:
        self.plan, self.group = plan, group
        self.batch, self.local = x.shape[:2]
        self.head_dim = head_dim
        self.heads = HeadProjections(plan, x, head_dim)
        self._free: list[Tensor] = []
        head = self.batch * self.local * plan.ranks * head_dim
        self._sizes: tuple[int, ...] = (plan.heads_per_rank, plan.slots_in_flight, plan.slots_in_flight)
        self.qkv_buffer = x.new_empty(head * sum(self._sizes))
        self.q, self.k, self.v = self.qkv_buffer.split([head * heads for heads in self._sizes])

    # ---- memory ----------------------------------------------------------------------------------------

    def acquire(self) -> Tensor:
        """A flat buffer of the size of ``q``, with undefined contents."""
        return self._free.pop() if self._free else torch.empty_like(self.q)

    def release(self, *buffers: Tensor) -> None:
        """Return buffers, so that ``acquire`` can hand them out again."""
        self._free.extend(buffers)

    def free(self) -> None:
        """Free the memory of all released buffers, before a kernel allocates tensors of that size."""
        while self._free:
            # A local variable of a caller may still refer to the buffer: only its storage is freed.
            self._free.pop().untyped_storage().resize_(0)

    def close(self) -> None:
        """Free all memory. Every acquired buffer must have been released."""
        self.release(self.qkv_buffer)
        self.free()

    def by_sequence(self, flat: Tensor) -> Tensor:
        """View flat memory as [C, b, s, heads, D]."""
        return flat.view(self.plan.ranks, self.batch, self.local, -1, self.head_dim)

    def by_heads(self, flat: Tensor) -> Tensor:
        """View flat memory as [b, S, heads, D]."""
        return flat.view(self.batch, self.plan.ranks * self.local, -1, self.head_dim)

    @property
    def keys(self) -> Tensor:
        """The stage's keys as the kernel takes them, [b, m, S, D]."""
        return self.by_heads(self.k).transpose(1, 2)

    @property
    def values(self) -> Tensor:
        """The stage's values as the kernel takes them, [b, m, S, D]."""
        return self.by_heads(self.v).transpose(1, 2)

    def split_by_range(self, buffer: Tensor, stage: Stage) -> list[Tensor]:
        """Split a buffer of query heads at the stage's head ranges: views [b, heads, S, D]."""
        sizes = [len(heads.slots) * len(heads.queries) for heads in stage]
        return list(self.by_heads(buffer).transpose(1, 2).split(sizes, 1))

    # ---- all-to-alls -----------------------------------------------------------------------------------

    def prepare(self, parts: slice, *, ahead: bool) -> Transfer:
        """The memory for an all-to-all of these parts.

        The caller makes the parts in ``targets``. Until they are sent, ``received`` is scratch memory.
        """
        packed, other = self._packed(parts), self._allocate_like(parts)
        if ahead:
            more = self._allocate_like(parts)
            return Transfer(parts, ahead, other, more, (other, more))
        # A group of one returns the memory that was sent, which is then sorted into the q/k/v buffer.
        if self._needs_no_reorder(parts) or self.plan.ranks == 1:
            return Transfer(parts, ahead, other, packed, (other,))
        return Transfer(parts, ahead, packed, other, (other,))

    def targets(self, transfer: Transfer) -> list[Tensor]:
        """The places of the transfer's q, k and v before they are sent, by sequence."""
        return list(self.by_sequence(transfer.send).split(self._sizes[transfer.parts], 3))

    def send(self, transfer: Transfer) -> Arrival:
        """Start one all-to-all. After its arrival the parts lie in ``q``, ``k`` and ``v``, by heads."""
        wait = self._exchange(transfer.send, transfer.received, transfer.ahead)

        def arrive() -> Tensor:
            arrived = wait()
            if transfer.ahead or not self._needs_no_reorder(transfer.parts):
                sent = self.by_sequence(arrived).split(self._sizes[transfer.parts], 3)
                for target, part in zip((self.q, self.k, self.v)[transfer.parts], sent, strict=True):
                    self.by_heads(target).unflatten(1, (self.plan.ranks, -1)).copy_(part.transpose(0, 1))
            self._release(*transfer.temporary)
            return self.qkv_buffer

        return arrive

    def to_heads(self, send: Tensor, *, ahead: bool) -> Arrival:
        """Send [C, b, s, n, D], which arrive as [b, S, n, D].

        Takes over the acquired buffer ``send``; what arrives lies in an acquired buffer again.
        """
        if self.plan.ranks == 1:
            return lambda: send
        received = self.acquire()
        wait = self._exchange(send, received, ahead)

        def arrive() -> Tensor:
            wait()
            if self.batch == 1:
                self.release(send)
                return received
            parts = self.by_sequence(received).transpose(0, 1)
            self.by_heads(send).unflatten(1, (self.plan.ranks, -1)).copy_(parts)
            self.release(received)
            return send

        return arrive

    def _exchange(self, send: Tensor, received: Tensor, ahead: bool) -> Arrival:
        """Run one all-to-all from flat memory to flat memory: now, or in the background if ``ahead``."""
        source, target = (t.view(self.plan.ranks, -1) for t in (send, received))
        if ahead:
            assert self.group is not None
            return AllToAll(source, target, self.group).wait
        arrived = all_to_all(source, self.group, out=target)
        return lambda: arrived

    @contextmanager
    def send_back(self, parts: slice, *grads: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Send heads back to the ranks that have their tokens, in one all-to-all.

        Args:
            parts: what is sent: ``q``, the gradients of k and v, or all three.
            grads: the gradients of k and v, [b, m, S, D], of any dtype.

        Yields the parts by sequence, and scratch memory of their size.
        """
        packed, other = self._packed(parts), self._allocate_like(parts)
        in_order, heads = self._needs_no_reorder(parts), self._sizes[parts]
        send, received = (packed, other) if in_order else (other, packed)
        if not in_order:
            sources = [self.by_heads(self.q)] * (parts.start == 0) + [g.transpose(1, 2) for g in grads]
            for part, full in zip(self.by_sequence(send).split(heads, 3), sources, strict=True):
                part.copy_(full.unflatten(1, (self.plan.ranks, -1)).transpose(0, 1))
            del full, sources
        del grads
        arrived = all_to_all(self.by_sequence(send), self.group, out=self.by_sequence(received))
        yield list(arrived.split(heads, 3)), received if self.plan.ranks == 1 else send
        self._release(other)

    def _needs_no_reorder(self, parts: slice) -> bool:
        """Whether the parts lie in memory in the order in which they are sent, [1, S, n, D]."""
        return parts == QUERIES and self.batch == 1 and self.plan.ranks > 1

    def _packed(self, parts: slice) -> Tensor:
        """The part of the q/k/v buffer that belongs to these of q, k and v."""
        token = self.qkv_buffer.numel() // sum(self._sizes)
        first = token * sum(self._sizes[: parts.start])
        return self.qkv_buffer[first : first + token * sum(self._sizes[parts])]

    def _allocate_like(self, parts: slice) -> Tensor:
        """Temporary memory of the size of these parts."""
        packed = self._packed(parts)
        if packed.numel() == self.q.numel():
            return self.acquire()
        self.free()
        return torch.empty_like(packed)

    def _release(self, *temporary: Tensor) -> None:
        """Release or free what ``_allocate_like`` returned."""
        for flat in temporary:
            if flat.numel() == self.q.numel():
                self.release(flat)
            else:
                flat.untyped_storage().resize_(0)
