"""Copies between device and host memory. No other file of the lab makes any.

Every copy is one of two operators, ``lab::to_host`` and ``lab::from_host``. On CPU both sides are the same
memory, and the copies are made all the same: a meter that counts the results of ``lab::to_host`` as host
memory measures the same bytes on a CPU rank, in a plan on fake tensors, and on a GPU.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lab.techniques.host_memory import local_ranks, pinnable
from lab.techniques.host_pieces import piece_sizes
from lab.torch_private import FakeTensor


@torch.library.custom_op("lab::to_host", mutates_args=())
def to_host(x: Tensor, pins: Sequence[bool]) -> list[Tensor]:
    """Copy x's bytes to new host memory, in the pieces of ``piece_sizes``, each pinned or not.

    From CUDA: in order of the current stream; a piece that is pinned is not waited for. The bytes are in the
    order in which x lies in memory, so that no copy transposes x.
    """
    flat, pieces = _flat(x if _is_packed(x) else _empty_packed(x, x.device).copy_(x)), []
    for size, pin in zip(piece_sizes(x.nbytes), pins, strict=True):
        piece = torch.empty(size, dtype=torch.uint8, pin_memory=pin and x.is_cuda)
        part, flat = flat[:size], flat[size:]
        piece[: part.numel()].copy_(part, non_blocking=True)
        pieces.append(piece)
    return pieces


@to_host.register_fake
def _(x: Tensor, pins: Sequence[bool]) -> list[Tensor]:  # noqa: ARG001 (the names are the operator's)
    # On CUDA the results are CPU tensors; a plan runs on CPU tensors, where the two are the same.
    return [torch.empty(size, dtype=torch.uint8) for size in piece_sizes(x.nbytes)]


@torch.library.custom_op("lab::from_host", mutates_args=("out",))
def from_host(pieces: Sequence[Tensor], out: Tensor) -> None:
    """Copy the pieces of a tensor into ``out``, which lies in memory without gaps, as the sent one did.

    To CUDA: in the current stream's order, not waited for.
    """
    flat = _flat(out)
    for piece in pieces:
        part, flat = flat[: piece.numel()], flat[piece.numel() :]
        part.copy_(piece[: part.numel()], non_blocking=True)


@from_host.register_fake
def _(pieces: Sequence[Tensor], out: Tensor) -> None:  # noqa: ARG001
    return None


def _packed(x: Tensor) -> list[int]:
    """The strides of x's dimensions, in the order in which they lie in memory, without gaps."""
    strides, step = [0] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim)):
        strides[dim] = step
        step *= x.shape[dim]
    return strides


def _is_packed(x: Tensor) -> bool:
    """Whether x lies in memory without gaps; the stride of a single row does not matter."""
    return all(
        has == packed for size, has, packed in zip(x.shape, x.stride(), _packed(x), strict=True) if size > 1
    )


def _empty_packed(x: Tensor, device: torch.device) -> Tensor:
    """A tensor as x is, without gaps, its bytes not set."""
    return torch.empty_strided(x.shape, _packed(x), dtype=x.dtype, device=device)


def _flat(x: Tensor) -> Tensor:
    """The bytes of x, which lies without gaps, in their order in memory [x.nbytes]."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


class HostTensor:
    """A tensor that waits in host memory until it is needed again; with ``stays``, on the device."""

    def __init__(self, copier: HostCopier, x: Tensor, *, stays: bool = False) -> None:
        self._copier, self._stays, self._to = copier, stays, x.device
        # Detached: the tensor would otherwise keep the graph that computed it alive.
        self._device: Tensor | None = x.detach() if stays else None
        self._shape, self._strides, self._dtype = x.shape, _packed(x), x.dtype
        self._host: list[Tensor] | None = None if stays else copier.send(x.detach())
        self._arrival: torch.cuda.Event | None = None

    def prefetch(self) -> None:
        """Start the copy back to the device, and do not wait for it."""
        if self._device is None:
            assert self._host is not None
            out = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._to)
            self._device, self._arrival = self._copier.fetch(self._host, out)

    def get(self) -> Tensor:
        """The tensor on the device. The current stream waits for the copy."""
        self.prefetch()
        if self._arrival is not None:
            torch.cuda.current_stream(self._to).wait_event(self._arrival)
        x = self._device
        assert x is not None
        if not self._stays:
            # The caller owns it now; a second backward over a retained graph copies it again.
            self._device = self._arrival = None
        return x


class HostCopier:
    """Copies between device and host; on CUDA, on a stream of its own.

    Every device buffer belongs to the computing stream, which waits for the copy before the buffer is freed;
    so torch's allocator may reuse it at once, and ``Tensor.record_stream`` is not needed. ``pinned`` is
    how many bytes may be pinned in this process; None is what ``pinnable`` says for one of this host's ranks.
    """

    def __init__(self, pinned: int | None = None) -> None:
        self._limit = pinnable(local_ranks(), PINNED.taken) if pinned is None else pinned
        self._sending: list[Tensor] = []
        self._sent: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def send(self, x: Tensor) -> list[Tensor]:
        """Start the copy of x to the host, in pieces; x is kept alive until ``wait_until_sent``."""
        with torch.no_grad(), self._on_copy_stream(x):
            host = PINNED.to_host(x, self._limit)
            self._sent = self._mark(x)
        self._sending.append(x)
        return host

    def wait_until_sent(self) -> None:
        """Make the computing stream wait for all copies to the host, and release what was copied."""
        if self._sent is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._sent)
        self._sent = None
        self._sending.clear()

    def fetch(self, host: list[Tensor], out: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy back into ``out``; also return the event that marks its end."""
        with torch.no_grad(), self._on_copy_stream(out):
            torch.ops.lab.from_host(host, out)
            return out, self._mark(out)

    @contextmanager
    def _on_copy_stream(self, x: Tensor) -> Iterator[None]:
        if not x.is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        # What was queued before may still write x, or still read the memory that a new buffer was cut from.
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self, x: Tensor) -> torch.cuda.Event | None:
        return self._stream.record_event() if x.is_cuda and self._stream is not None else None


class Pinned:
    """An account of torch's caching host allocator, and copies to the host within a limit.

    The allocator keeps a block pinned when its tensor dies, for the next of that size, and never gives it
    back. So steps that are alike pin in the first alone; what exceeds the limit is copied to pageable memory,
    and the host waits for the copy. ``taken`` is how many bytes are pinned.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._free: Counter[int] = Counter()

    def to_host(self, x: Tensor, limit: int) -> list[Tensor]:
        """A copy of ``x`` in host memory, in pieces; pinned as long as that takes ``limit`` bytes in all."""
        pins, more = [], 0
        for size in piece_sizes(x.nbytes):
            again = self._free[size] > 0
            pins.append(again or self.taken + more + size <= limit)
            more += size if pins[-1] and not again else 0
        pieces: list[Tensor] = torch.ops.lab.to_host(x, pins)
        if isinstance(x, FakeTensor):
            return pieces  # of a plan, which pins nothing
        self.taken += more
        for piece, pin in zip(pieces, pins, strict=True):
            if pin:
                self._free[piece.nbytes] -= self._free[piece.nbytes] > 0
                weakref.finalize(piece, self._free.update, (piece.nbytes,))
        return pieces


PINNED = Pinned()
"""The account of this process, as the allocator is: a later model reuses what an earlier one has pinned."""
