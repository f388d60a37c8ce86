"""A process group of one that stands for N: every collective is answered from this rank's own data.

Each peer does, relative to itself, what this rank does: it gathers the same shard, adds the same gradient,
and sends this rank what this rank sends to the one as far on. So sizes are those of N ranks, values are
finite wherever this rank's are, and nothing waits. The copies run on the device that holds the tensors, in
order of its current stream.
"""

# mypy: disable-error-code="override, assignment"
# What torch's stubs overload, it calls in one way only.

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from lab.torch_private import PythonProcessGroup, completed_work, disable_current_modes, process_groups

BACKEND = "loopback"


class Loopback(PythonProcessGroup):
    """The group. ``sent`` counts the bytes that would have left this rank, by collective."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.sent: Counter[str] = Counter()
        self._mail: list[Tensor] = []

    def getBackendName(self) -> str:  # torch's name
        """What torch prints."""
        return BACKEND

    # ---- answered ----------------------------------------------------------------------------------------

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> Work:
        """Every rank's tensor is this one's."""
        with _unseen():
            for parts, own in zip(outputs, inputs, strict=True):
                self._leaves("all_gather", own.nbytes, self.size() - 1)
                for part in parts:
                    part.copy_(own)
        return _finished()

    def all_gather_single(self, output: Tensor, own: Tensor, *_: Any) -> Work:
        """[N*n, ...] from [n, ...]."""
        with _unseen():
            self._leaves("all_gather", own.nbytes, self.size() - 1)
            # One by one: FSDP gathers in place, so what it sends is one of the parts that it receives.
            for part in output.view(self.size(), -1):
                part.copy_(own.view(-1))
        return _finished()

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Work:
        """Several of them."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _finished()

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], options: dist.ReduceScatterOptions
    ) -> Work:
        """This rank's part of N times the same."""
        with _unseen():
            for output, parts in zip(outputs, inputs, strict=True):
                self._leaves("reduce_scatter", output.nbytes, self.size() - 1)
                output.copy_(parts[self.rank()]).mul_(self._factor(options))
        return _finished()

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, options: dist.ReduceScatterOptions
    ) -> Work:
        """[n, ...] from [N*n, ...]."""
        with _unseen():
            self._leaves("reduce_scatter", output.nbytes, self.size() - 1)
            own = whole.view(self.size(), -1)[self.rank()]
            output.view(-1).copy_(own).mul_(self._factor(options))
        return _finished()

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], wholes: list[Tensor], options: dist.ReduceScatterOptions
    ) -> Work:
        """Several of them."""
        for output, whole in zip(outputs, wholes, strict=True):
            self.reduce_scatter_single(output, whole, options)
        return _finished()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> Work:
        """N times the same, where it is a sum."""
        with _unseen():
            for tensor in tensors:
                # A reduce-scatter and an all-gather.
                self._leaves("all_reduce", tensor.nbytes // self.size() * 2, self.size() - 1)
                tensor.mul_(self._factor(options))
        return _finished()

    def all_to_all_single(
        self, output: Tensor, send: Tensor, output_sizes: list[int], send_sizes: list[int], *_: Any
    ) -> Work:
        """Piece i of the result is what this rank sends to the one as far on as rank i is behind."""
        with _unseen():
            pieces = _split(send, send_sizes, self.size())
            each = pieces[0].nbytes
            moved = sum(p.nbytes for p in pieces) - pieces[self.rank()].nbytes
            self._leaves("all_to_all", moved if send_sizes else each * (self.size() - 1))
            for i, place in enumerate(_split(output, output_sizes, self.size())):
                place.copy_(pieces[(2 * self.rank() - i) % self.size()])
        return _finished()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Work:
        """The same with a list."""
        with _unseen():
            self._leaves("all_to_all", sum(t.nbytes for i, t in enumerate(inputs) if i != self.rank()))
            for i, output in enumerate(outputs):
                output.copy_(inputs[(2 * self.rank() - i) % self.size()])
        return _finished()

    def broadcast(self, tensors: list[Tensor], *_: Any) -> Work:
        """What this rank holds is what the root sends."""
        for tensor in tensors:
            self._leaves("broadcast", tensor.nbytes)
        return _finished()

    def send(self, tensors: list[Tensor], *_: Any) -> Work:
        """Into the mail of this rank."""
        with _unseen():
            for tensor in tensors:
                self._leaves("send", tensor.nbytes)
                self._mail.append(tensor.clone())
        return _finished()

    def recv(self, tensors: list[Tensor], *_: Any) -> Work:
        """The oldest letter of this shape; zeros where none was sent yet."""
        with _unseen():
            for tensor in tensors:
                letters = [i for i, letter in enumerate(self._mail) if letter.shape == tensor.shape]
                tensor.copy_(self._mail.pop(letters[0])) if letters else tensor.zero_()
        return _finished()

    def barrier(self, *_: Any, **__: Any) -> Work:
        """Nobody to wait for."""
        return _finished()

    # ---- how ---------------------------------------------------------------------------------------------

    def _factor(self, options: Any) -> float:
        """Of N equal tensors: a sum is N times one, a mean, the largest or the smallest is one."""
        return self.size() if options.reduceOp == dist.ReduceOp.SUM else 1

    def _leaves(self, collective: str, nbytes: int, times: int = 1) -> None:
        self.sent[collective] += nbytes * times


def register() -> None:
    """Make ``init_process_group("loopback")`` known to torch, on CPU and CUDA; again does nothing."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _created, devices=["cpu", "cuda"])


def bytes_sent() -> Counter[str]:
    """What all of this process's groups counted, added up."""
    return sum((group.sent for group in process_groups() if isinstance(group, Loopback)), Counter())


def _created(_: Any, rank: int, size: int, __: timedelta) -> Loopback:
    return Loopback(rank, size)


def _unseen() -> AbstractContextManager[object]:
    """What stands for the wire is no operator of the step: no meter sees it, and no gradient flows."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(disable_current_modes())
    return stack


def _split(x: Tensor, sizes: Sequence[int], ranks: int) -> tuple[Tensor, ...]:
    """Pieces along dim 0: of these sizes, or all alike."""
    return x.split(list(sizes)) if sizes else x.chunk(ranks)


def _finished() -> Work:
    """Nothing to wait for: on CUDA the copies are in the current stream's order, as the next operator is.

    It holds no tensor, for whoever counts who holds one waits until nobody else does.
    """
    return completed_work()
