"""Collectives: the all-to-alls of Ulysses and a sum over ranks, with gradients; a ring's steps and gathers.

Letters: C ranks in a Ulysses group, b rows, s tokens of one rank, S = C*s tokens, H query heads, K key/value
heads, h heads of one rank during attention, D head_dim, w bytes per element.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.torch_private import disable_current_modes, reference_counts


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in ``group``; None is a group of one rank."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return this rank's place in ``group``; None is a group of one rank."""
    return 0 if group is None else dist.get_rank(group)


# ---- the end of a collective -------------------------------------------------------------------------


def _counts(tensors: tuple[Tensor, ...]) -> list[int]:
    """Return all references to the tensors. All kinds are needed: a thread drops them one after the other."""
    return [count for tensor in tensors for count in reference_counts(tensor)]


def _wait_for_counts(tensors: tuple[Tensor, ...], before: list[int]) -> None:
    """Wait until the tensors have no more references than ``before``, but for ten seconds at most.

    Gloo's worker threads drop the tensors of a collective, or the views that it made of them, some moments
    after the collective has ended. Memory that is freed at a random time cannot be measured to the byte. The
    limit is for references of others, such as a debugger that holds a frame. On a busy machine a thread has
    taken more than a second.
    """
    if not tensors[0].is_cpu:
        return
    end = time.monotonic() + 10
    while any(map(int.__gt__, _counts(tensors), before)) and time.monotonic() < end:
        time.sleep(0)


@contextmanager
def wait_for_release(*tensors: Tensor) -> Iterator[None]:
    """At the end of the block, wait until the collective in it has dropped its references to ``tensors``.

    The block runs one collective that is not asynchronous.
    """
    before = _counts(tensors)
    yield
    _wait_for_counts(tensors, before)


# ---- sequence <-> heads ------------------------------------------------------------------------------


def all_to_all(send: Tensor, group: dist.ProcessGroup | None, *, out: Tensor | None = None) -> Tensor:
    """Send slice c of ``send`` to rank c, and return a tensor whose slice c came from rank c.

    Args:
        send: [C, ...]. It is copied first unless it is contiguous in memory.
        group: The C ranks.
        out: A contiguous tensor for the result, of the shape of ``send``. By default it is allocated.

    Returns:
        ``out``, [C, ...]. In a group of one rank it is ``send``: nothing is copied or allocated.
    """
    if size_of(group) == 1:
        return send
    if out is None:
        # By default empty_like keeps the strides of a permuted view, and an all-to-all ignores strides.
        out = torch.empty_like(send, memory_format=torch.contiguous_format)
    send = send.contiguous()
    with wait_for_release(send, out):
        dist.all_to_all_single(out, send, group=group)
    return out


@torch.library.custom_op("lab::arrival", mutates_args=())
def mark_arrival(x: Tensor) -> None:
    """Do nothing: this operator marks, for the clock of a plan, where a collective into ``x`` was waited for.

    Waiting itself is not an operator of torch, so a plan would not see it.
    """


@mark_arrival.register_fake
def _(x: Tensor) -> None:  # noqa: ARG001 (the name is the operator's)
    return None


class AllToAll:
    """An all-to-all that runs in the background until ``wait``.

    Until then, nothing may write to ``send`` or read ``out``. On CUDA the collective runs on its own stream,
    after everything that was queued before it. ``wait`` makes the computing stream wait for it, so everything
    that is queued in between runs at the same time.

    Args:
        send: The elements to send, in the order of the ranks.
        out: The memory for the received elements, in the order of the ranks.
        group: The ranks.
        receive_sizes: The number of elements to receive from each rank. By default all are equal.
        send_sizes: The number of elements to send to each rank. By default all are equal.
    """

    def __init__(
        self,
        send: Tensor,
        out: Tensor,
        group: dist.ProcessGroup,
        receive_sizes: list[int] | None = None,
        send_sizes: list[int] | None = None,
    ) -> None:
        self._tensors: tuple[Tensor, ...] = (send, out)
        self._before = _counts(self._tensors)
        self._work = dist.all_to_all_single(out, send, receive_sizes, send_sizes, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the all-to-all, drop the references to its tensors, and return ``out``."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        _wait_for_counts(self._tensors, self._before)
        out = self._tensors[1]
        self._tensors = ()
        torch.ops.lab.arrival(out)
        return out


def _to_heads(x: Tensor, group: dist.ProcessGroup, copies: int) -> Tensor:
    ranks, (batch, local, _, head_dim) = size_of(group), x.shape
    # [b, s, heads, D] -> [b, s, C/copies, h, D] -> [C/copies, copies, b, s, h, D]: by rank, with the copies
    parts = x.reshape(batch, local, ranks // copies, -1, head_dim).permute(2, 0, 1, 3, 4)
    send = parts[:, None].expand(-1, copies, *parts.shape[1:]).contiguous()
    received = all_to_all(send.view(ranks, *parts.shape[1:]), group)
    # [C, b, s, h, D] -> [b, C, s, h, D] -> [b, S, h, D]: rank c holds the c-th piece of the sequence
    return received.transpose(0, 1).reshape(batch, ranks * local, -1, head_dim)


def _to_sequence(x: Tensor, group: dist.ProcessGroup, copies: int) -> Tensor:
    ranks, (batch, tokens, heads, head_dim) = size_of(group), x.shape
    # [b, S, h, D] -> [b, C, s, h, D] -> [C, b, s, h, D]: piece c of the sequence goes back to rank c
    send = x.reshape(batch, ranks, tokens // ranks, heads, head_dim).transpose(0, 1).contiguous()
    received = all_to_all(send, group)
    parts = received if copies == 1 else received.unflatten(0, (-1, copies)).sum(1)
    # [C/copies, b, s, h, D] -> [b, s, C/copies, h, D] -> [b, s, heads, D]: rank c had the c-th part of heads
    return parts.permute(1, 2, 0, 3, 4).reshape(batch, tokens // ranks, -1, head_dim)


class _HeadsFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, copies: int) -> Tensor:
        ctx.group, ctx.copies = group, copies
        return _to_heads(x, group, copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_sequence(grads[0], ctx.group, ctx.copies), None, None


class _SequenceFromHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_sequence(x, group, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grads[0], ctx.group, 1), None


def heads_from_sequence(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Exchange this rank's tokens of all heads for all tokens of this rank's heads, with gradients.

    Rank c has tokens c*s to (c+1)*s, and gets heads c*H/C to (c+1)*H/C. If there are fewer heads than ranks
    (the K keys and values of GQA), each head goes to C/K ranks, and backward sums the gradients of its
    copies.

    Letters: b rows, H heads of ``x``, C ranks, S tokens, s = S/C tokens of one rank, D head_dim, w bytes per
    element.

    Args:
        x: [b, s, H, D].
        group: The C ranks. None is a group of one rank.

    Returns:
        [b, S, H/C, D]; [b, S, 1, D] for fewer heads than ranks.

    Costs:
        One all-to-all of w*b*s*H*D bytes, of which (C-1)/C leave the rank; one copy before it; and one copy
        after it if b > 1.
    Source:
        DeepSpeed-Ulysses (arXiv 2309.14509), section 3.1.
    """
    ranks = size_of(group)
    if group is None or ranks == 1:
        return x
    copies = max(ranks // x.shape[2], 1)
    return _HeadsFromSequence.apply(x, group, copies)  # type: ignore[no-any-return, no-untyped-call]


def sequence_from_heads(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Exchange all tokens of this rank's h heads for its tokens of all heads: the inverse exchange.

    Args:
        x: [b, S, h, D].
        group: The C ranks. None is a group of one rank.

    Returns:
        [b, s, C*h, D].
    """
    if group is None or size_of(group) == 1:
        return x
    return _SequenceFromHeads.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


# ---- the sum over ranks, and what a ring sends, gathers and reduces -----------------------------------


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        with wait_for_release(total):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of ``x`` over all ranks; the gradient of the sum is the gradient of this rank's ``x``.

    It is meant for a loss. Each rank differentiates its own part of the sum, and the gradients of a shared
    parameter on all ranks add up to the gradient of the sum. If backward summed over ranks too, the loss of
    every rank would count as many times as there are ranks.
    """
    if group is None or size_of(group) == 1:
        return x
    return _SumOverRanks.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


# Releases before 2.13 have these two under other names.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, one after the other in dimension 0. ``own`` is contiguous."""
    whole = own.new_empty((size_of(group) * own.shape[0], *own.shape[1:]))
    with wait_for_release(own, whole):
        _all_gather_single(whole, own, group=group)
    return whole


def reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's slice of dimension 0 of the sum over all ranks. ``whole`` is contiguous."""
    own = whole.new_empty((whole.shape[0] // size_of(group), *whole.shape[1:]))
    with wait_for_release(own, whole):
        wait = _reduce_scatter_single(own, whole, group=group, async_op=True).wait
        # Gloo sums in a copy of ``whole``, which the meter must not count.
        with disable_current_modes():
            wait()
        del wait
    return own


class Shift:
    """One step around a ring: send a tensor to the next rank, and receive one from the previous rank.

    The step runs in the background until ``wait``. Until then, nothing may write to ``send``.

    It is an all-to-all in which all parts but one are empty. It therefore cannot deadlock by the order of
    sends, and a simulated group (in a plan or a rehearsal) needs to know all-to-alls only.
    """

    def __init__(self, send: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = size_of(group), dist.get_rank(group)
        send_sizes = [send.numel() if r == (rank + 1) % ranks else 0 for r in range(ranks)]
        receive_sizes = [send.numel() if r == (rank - 1) % ranks else 0 for r in range(ranks)]
        self._shape = send.shape
        self._exchange = AllToAll(
            send.contiguous().view(-1), send.new_empty(send.numel()), group, receive_sizes, send_sizes
        )

    def wait(self) -> Tensor:
        """Wait for the step, and return the tensor of the previous rank, which has the shape of ``send``."""
        return self._exchange.wait().view(self._shape)
