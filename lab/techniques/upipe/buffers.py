"""The buffers of a UPipe layer, and the all-to-alls that fill and empty them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lab.techniques.exchange import AllToAll, all_to_all
from lab.techniques.upipe.schedule import Stage
from lab.techniques.upipe.settings import LayerSettings

QUERIES, KEYS_AND_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)
"""Which of q, k and v one all-to-all carries, as a slice of (q, k, v)."""

Arrival = Callable[[], Tensor]
"""A function that waits for an all-to-all, sorts the received heads into a buffer, and returns the buffer."""


class Transfer(NamedTuple):
    """The memory of one all-to-all of some of q, k and v.

    Attributes:
        parts: Which of q, k and v it carries.
        ahead: Whether it runs while an earlier stage still uses the q/k/v buffer.
        send: Flat memory in which the parts are computed.
        received: Flat memory in which they arrive.
        temporary: The tensors to release after the arrival. None of them is the q/k/v buffer.
    """

    parts: slice
    ahead: bool
    send: Tensor
    received: Tensor
    temporary: tuple[Tensor, ...]


class StageBuffers:
    """The memory that all stages of one pass of a layer share, and its all-to-alls.

    Heads are stored in one of two orders:

    - by sequence, [C, b, s, heads, D]: the tokens of this rank, with the heads of each of the C ranks;
    - by heads, [b, S, heads, D]: all tokens, with the heads of this rank.

    An all-to-all changes one order into the other. ``q``, ``k`` and ``v`` are the stage's queries, keys and
    values, by heads. They are parts of one ``qkv_buffer`` of n + 2m heads. If several of them travel
    together, one all-to-all carries all parts of a token, then those of the next token. The parts are
    computed in the q/k/v buffer, and after their arrival they are sorted into it. Queries alone arrive in
    order if b = 1, and are not sorted. A transfer *ahead* runs during an earlier stage, which still uses the
    q/k/v buffer. Its parts are computed and received in temporary memory.

    ``acquire`` and ``release`` manage further buffers of the size of ``q``, so that all stages use the same
    few buffers.

    Letters: C ranks in the Ulysses group, b rows, s tokens of one rank, S = C*s, D head_dim, n query heads of
    a rank in a stage, m slots in memory (a slot is one of the key/value heads that a rank attends to).

    Args:
        settings: The settings of the layer.
        shape: b and s.
        like: A tensor of the dtype and on the device of the buffers.
    """

    def __init__(self, settings: LayerSettings, shape: tuple[int, int], like: Tensor) -> None:
        self.schedule, self.group, self.head_dim = settings.schedule, settings.group, settings.head_dim
        self.batch, self.local = shape
        self._free: list[Tensor] = []
        head = self.batch * self.local * self.schedule.ranks * self.head_dim
        slots = self.schedule.slots_in_flight
        self._sizes: tuple[int, ...] = (self.schedule.heads_per_rank, slots, slots)
        self.qkv_buffer = like.new_empty(head * sum(self._sizes))
        self.q, self.k, self.v = self.qkv_buffer.split([head * heads for heads in self._sizes])

    # ---- memory ----------------------------------------------------------------------------------------

    def acquire(self) -> Tensor:
        """Return a flat buffer of the size of ``q``, with undefined contents."""
        return self._free.pop() if self._free else torch.empty_like(self.q)

    def release(self, *buffers: Tensor) -> None:
        """Give buffers back, so that ``acquire`` can return them again."""
        self._free.extend(buffers)

    def free(self) -> None:
        """Free the memory of all released buffers, before a kernel allocates tensors of that size."""
        while self._free:
            # A local variable of a caller may still refer to the buffer, so its storage is freed explicitly.
            self._free.pop().untyped_storage().resize_(0)

    def close(self) -> None:
        """Free all memory. Every acquired buffer must have been released."""
        self.release(self.qkv_buffer)
        self.free()

    def by_sequence(self, flat: Tensor) -> Tensor:
        """View flat memory as [C, b, s, heads, D]."""
        return flat.view(self.schedule.ranks, self.batch, self.local, -1, self.head_dim)

    def by_heads(self, flat: Tensor) -> Tensor:
        """View flat memory as [b, S, heads, D]."""
        return flat.view(self.batch, self.schedule.ranks * self.local, -1, self.head_dim)

    @property
    def keys(self) -> Tensor:
        """The stage's keys in the layout of the kernel, [b, m, S, D]."""
        return self.by_heads(self.k).transpose(1, 2)

    @property
    def values(self) -> Tensor:
        """The stage's values in the layout of the kernel, [b, m, S, D]."""
        return self.by_heads(self.v).transpose(1, 2)

    def split_by_range(self, buffer: Tensor, stage: Stage) -> list[Tensor]:
        """Split a buffer of query heads at the stage's head ranges: views [b, heads, S, D]."""
        sizes = [len(heads.slots) * len(heads.queries) for heads in stage]
        return list(self.by_heads(buffer).transpose(1, 2).split(sizes, 1))

    # ---- all-to-alls -----------------------------------------------------------------------------------

    def prepare(self, parts: slice, *, ahead: bool) -> Transfer:
        """Return the memory for an all-to-all of ``parts``.

        The caller computes the parts in ``targets``, and may use ``received`` as scratch memory until then.

        Args:
            parts: Which of q, k and v are sent.
            ahead: Whether an earlier stage still uses the q/k/v buffer.
        """
        packed, other = self._packed(parts), self._allocate_like(parts)
        if ahead:
            received = self._allocate_like(parts)
            return Transfer(parts, ahead, other, received, (other, received))
        # In a group of one rank, all_to_all returns the memory to send. It is then sorted into the q/k/v
        # buffer.
        if self._needs_no_reorder(parts) or self.schedule.ranks == 1:
            return Transfer(parts, ahead, other, packed, (other,))
        return Transfer(parts, ahead, packed, other, (other,))

    def targets(self, transfer: Transfer) -> list[Tensor]:
        """Return the views of the memory to send in which q, k and v are computed, by sequence."""
        return list(self.by_sequence(transfer.send).split(self._sizes[transfer.parts], 3))

    def send(self, transfer: Transfer) -> Arrival:
        """Start one all-to-all. After its arrival the parts are in ``q``, ``k`` and ``v``, by heads."""
        wait = self._exchange(transfer.send, transfer.received, transfer.ahead)

        def arrive() -> Tensor:
            arrived = wait()
            if transfer.ahead or not self._needs_no_reorder(transfer.parts):
                parts = self.by_sequence(arrived).split(self._sizes[transfer.parts], 3)
                for target, part in zip((self.q, self.k, self.v)[transfer.parts], parts, strict=True):
                    self.by_heads(target).unflatten(1, (self.schedule.ranks, -1)).copy_(part.transpose(0, 1))
            self._release(*transfer.temporary)
            return self.qkv_buffer

        return arrive

    def to_heads(self, send: Tensor, *, ahead: bool) -> Arrival:
        """Send query heads by sequence, [C, b, s, n, D]; they arrive by heads, [b, S, n, D].

        Args:
            send: An acquired buffer, which the caller must not use or release any more.
            ahead: Whether the all-to-all runs in the background.

        Returns:
            The arrival, whose result is an acquired buffer.
        """
        if self.schedule.ranks == 1:
            return lambda: send
        received = self.acquire()
        wait = self._exchange(send, received, ahead)

        def arrive() -> Tensor:
            wait()
            if self.batch == 1:
                self.release(send)
                return received
            parts = self.by_sequence(received).transpose(0, 1)
            self.by_heads(send).unflatten(1, (self.schedule.ranks, -1)).copy_(parts)
            self.release(received)
            return send

        return arrive

    def _exchange(self, send: Tensor, received: Tensor, ahead: bool) -> Arrival:
        """Run an all-to-all between two flat tensors: at once, or in the background if ``ahead``."""
        source, target = (t.view(self.schedule.ranks, -1) for t in (send, received))
        if ahead:
            assert self.group is not None
            return AllToAll(source, target, self.group).wait
        arrived = all_to_all(source, self.group, out=target)
        return lambda: arrived

    @contextmanager
    def send_back(self, parts: slice, *grads: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Send heads back to the ranks that have their tokens, in one all-to-all.

        Args:
            parts: Which parts are sent: the buffer ``q``, the gradients of k and v, or all three.
            *grads: The gradients of k and v, [b, m, S, D], of any dtype.

        Yields:
            The received parts, by sequence, and scratch memory of their size.
        """
        packed, other = self._packed(parts), self._allocate_like(parts)
        in_order, heads = self._needs_no_reorder(parts), self._sizes[parts]
        send, received = (packed, other) if in_order else (other, packed)
        if not in_order:
            sources = [self.by_heads(self.q)] * (parts.start == 0) + [g.transpose(1, 2) for g in grads]
            for part, full in zip(self.by_sequence(send).split(heads, 3), sources, strict=True):
                part.copy_(full.unflatten(1, (self.schedule.ranks, -1)).transpose(0, 1))
            del full, sources
        del grads
        arrived = all_to_all(self.by_sequence(send), self.group, out=self.by_sequence(received))
        yield list(arrived.split(heads, 3)), received if self.schedule.ranks == 1 else send
        self._release(other)

    def _needs_no_reorder(self, parts: slice) -> bool:
        """Return whether the parts by heads, [1, S, n, D], are in memory in the order of an all-to-all."""
        return parts == QUERIES and self.batch == 1 and self.schedule.ranks > 1

    def _packed(self, parts: slice) -> Tensor:
        """View the memory of these parts in the q/k/v buffer, flat."""
        token = self.qkv_buffer.numel() // sum(self._sizes)
        first = token * sum(self._sizes[: parts.start])
        return self.qkv_buffer[first : first + token * sum(self._sizes[parts])]

    def _allocate_like(self, parts: slice) -> Tensor:
        """Return flat temporary memory of the size of these parts."""
        packed = self._packed(parts)
        if packed.numel() == self.q.numel():
            return self.acquire()
        self.free()
        return torch.empty_like(packed)

    def _release(self, *temporary: Tensor) -> None:
        """Release or free tensors from ``_allocate_like``."""
        for flat in temporary:
            if flat.numel() == self.q.numel():
                self.release(flat)
            else:
                flat.untyped_storage().resize_(0)
