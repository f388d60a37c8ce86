"""Collectives with gradients: sequence <-> heads all-to-all, the global sum, one step round a ring."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.errors import RecipeError
from lab.torch_private import use_count


def size_of(group: dist.ProcessGroup | None) -> int:
    """The ranks of a group; no group is a group of one."""
    return 1 if group is None else dist.get_world_size(group)


# ---- when a collective is over -----------------------------------------------------------------------


def holders(*tensors: Tensor) -> list[int]:
    """How many hold each tensor, in C++ and in Python: a thread lets go of the one before the other."""
    counts = ((use_count(x), sys.getrefcount(x)) for x in tensors)
    return [count for both in counts for count in both]


def settle(tensors: tuple[Tensor, ...], before: list[int]) -> None:
    """Wait until no more hold the tensors than did ``before``.

    Gloo's worker threads let go of a collective's tensors some moments after it is done, and what is freed by
    chance cannot be counted to the byte. Who else took hold meanwhile, a debugger of a frame, is not waited
    for: a second ends it.
    """
    if not tensors[0].is_cpu:
        return
    end = time.monotonic() + 1
    while any(map(int.__gt__, holders(*tensors), before)) and time.monotonic() < end:
        time.sleep(0)


@contextmanager
def settled(*tensors: Tensor) -> Iterator[None]:
    """Leave the block, one collective that waits, when nothing of it holds its tensors any more."""
    before = holders(*tensors)
    yield
    settle(tensors, before)


# ---- which degrees go with which heads ---------------------------------------------------------------


def degrees(heads: int, kv_heads: int) -> list[int]:
    """Every Ulysses degree C that H query and K key/value heads allow: C | H, and C | K or K | C."""
    return [
        c
        for c in range(1, heads + 1)
        if heads % c == 0 and (kv_heads % c == 0 or c % kv_heads == 0) and heads % kv_heads == 0
    ]


def check_degree(heads: int, kv_heads: int, degree: int) -> None:
    """Refuse a Ulysses degree that the heads do not allow.

    Raises:
        RecipeError: names the rule and the degrees that work.
    """
    if degree in degrees(heads, kv_heads):
        return
    rule = (
        f"it does not divide the {heads} query heads"
        if degree < 1 or heads % degree
        else f"of it and the {kv_heads} key/value heads neither divides the other"
    )
    works = ", ".join(map(str, degrees(heads, kv_heads)))
    raise RecipeError(f"ulysses={degree}: {rule}; these work: {works}")


# ---- sequence <-> heads ------------------------------------------------------------------------------


def all_to_all(send: Tensor, group: dist.ProcessGroup | None, *, out: Tensor | None = None) -> Tensor:
    """Slice c of ``send`` [C, ...] goes to rank c; slice c of the result [C, ...] came from rank c.

    Both lie contiguously in memory: a buffer made like a permuted view keeps the view's strides, and an
    all-to-all would scatter its payload over it. Nothing is copied or allocated for a group of one: the
    result is ``send``, whatever ``out``.
    """
    if size_of(group) == 1:
        return send
    if out is None:
        out = torch.empty_like(send, memory_format=torch.contiguous_format)
    send = send.contiguous()
    with settled(send, out):
        dist.all_to_all_single(out, send, group=group)
    return out


@torch.library.custom_op("lab::landed", mutates_args=())
def landed(x: Tensor) -> None:
    """Does nothing. Waiting for a collective is no operator of torch's, and a plan's clock is to see it."""


@landed.register_fake
def _(x: Tensor) -> None:  # noqa: ARG001 (the name is the operator's)
    return None


class AllToAll:
    """An all-to-all under way: equal shares, or as many elements ``of`` and ``to`` each rank as is said.

    Nothing may write to ``send`` or read ``out`` until ``wait``, which lets go of both. On CUDA it travels on
    the collectives' own stream, which waits for what was queued before it, and ``wait`` has the computing
    stream wait for it: what is queued between the two runs beside it.
    """

    def __init__(
        self,
        send: Tensor,
        out: Tensor,
        group: dist.ProcessGroup,
        of: list[int] | None = None,
        to: list[int] | None = None,
    ) -> None:
        self._tensors: tuple[Tensor, ...] = (send, out)
        self._before = holders(*self._tensors)
        self._work = dist.all_to_all_single(out, send, of, to, group=group, async_op=True)

    def wait(self) -> Tensor:
        """``out``, once it is there."""
        if self._work is not None:
            self._work.wait()
        self._work = None
        settle(self._tensors, self._before)
        out = self._tensors[1]
        self._tensors = ()
        torch.ops.lab.landed(out)
        return out


def _to_heads(x: Tensor, group: dist.ProcessGroup, copies: int) -> Tensor:
    ranks, (batch, local, _, head_dim) = size_of(group), x.shape
    # [b, s, heads, D] -> [b, s, C/copies, h, D] -> [C/copies, copies, b, s, h, D]: rank-major, replicated
    parts = x.reshape(batch, local, ranks // copies, -1, head_dim).permute(2, 0, 1, 3, 4)
    send = parts[:, None].expand(-1, copies, *parts.shape[1:]).contiguous()
    received = all_to_all(send.view(ranks, *parts.shape[1:]), group)
    # [C, b, s, h, D] -> [b, C, s, h, D] -> [b, S, h, D]: rank c holds the c-th piece of the sequence
    return received.transpose(0, 1).reshape(batch, ranks * local, -1, head_dim)


def _to_sequence(x: Tensor, group: dist.ProcessGroup, copies: int) -> Tensor:
    ranks, (batch, tokens, heads, head_dim) = size_of(group), x.shape
    # [b, S, h, D] -> [b, C, s, h, D] -> [C, b, s, h, D]: piece c of the sequence goes home to rank c
    send = x.reshape(batch, ranks, tokens // ranks, heads, head_dim).transpose(0, 1).contiguous()
    received = all_to_all(send, group)
    parts = received if copies == 1 else received.unflatten(0, (-1, copies)).sum(1)
    # [C/copies, b, s, h, D] -> [b, s, C/copies, h, D] -> [b, s, heads, D]: rank c had the c-th of the heads
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
    """This rank's tokens of all heads -> all tokens of this rank's heads: [b, s, H, D] -> [b, S, H/C, D].

    S = C*s, the group's pieces in rank order; rank c gets heads c*H/C to (c+1)*H/C. Fewer heads than ranks
    (the keys and values of GQA) are given to C/H ranks each: [b, s, K, D] -> [b, S, 1, D], and backward sums
    the gradients of the copies.

    Costs: one all-to-all of w*b*s*H*D bytes ((C-1)/C of it leaves the rank), one copy to send, and one to
    receive where b > 1. Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3.1.
    """
    ranks = size_of(group)
    if group is None or ranks == 1:
        return x
    copies = max(ranks // x.shape[2], 1)
    return _HeadsFromSequence.apply(x, group, copies)  # type: ignore[no-any-return, no-untyped-call]


def sequence_from_heads(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The way back: all tokens of this rank's heads -> its tokens of all, [b, S, h, D] -> [b, s, C*h, D]."""
    if group is None or size_of(group) == 1:
        return x
    return _SequenceFromHeads.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


# ---- the rest ----------------------------------------------------------------------------------------


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        with settled(total):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of every rank's ``x``, the same on each; backward passes the gradient on as it is.

    For a loss: each rank's share enters the sum once, so each rank differentiates its own share, and the
    ranks' gradients of a shared parameter add up to the gradient of the sum. Summing the gradient as well
    would count every rank's loss once a rank.
    """
    if group is None or size_of(group) == 1:
        return x
    return _SumOverRanks.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class Shift:
    """One step round a ring, under way: ``send`` goes to the next rank, ``wait`` gives the previous rank's.

    A ring's step is an all-to-all in which all but one of the pieces are empty. So it cannot deadlock by the
    order of sends, and whatever stands in for a group in a plan or a rehearsal has one operation to know.
    Nothing may write to ``send`` until ``wait``, which lets go of it.
    """

    def __init__(self, send: Tensor, group: dist.ProcessGroup) -> None:
        ranks, rank = size_of(group), dist.get_rank(group)
        to = [send.numel() if r == (rank + 1) % ranks else 0 for r in range(ranks)]
        of = [send.numel() if r == (rank - 1) % ranks else 0 for r in range(ranks)]
        self._shape = send.shape
        self._exchange = AllToAll(send.contiguous().view(-1), send.new_empty(send.numel()), group, of, to)

    def wait(self) -> Tensor:
        """What the previous rank sent, of the shape of what this one sent."""
        return self._exchange.wait().view(self._shape)
