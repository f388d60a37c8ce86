"""The road to the host: the only crossing between device and host memory, and parcels that take it.

It leads through one pair of operators, ``lab::to_host`` and ``lab::from_host``. On CPU both sides are the
same memory, and the copies are made all the same: a meter that counts what ``lab::to_host`` returns in the
host's lane sees a CPU rank, or a plan on fake tensors, move bytes just as a GPU does.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@torch.library.custom_op("lab::to_host", mutates_args=())
def to_host(x: Tensor, pin: bool) -> Tensor:
    """Copy x to new host memory, pinned or not. From CUDA: in order of the current stream, not waited for.

    The copy lies in memory as x does: it is moved as one piece, and nothing is turned round on the way.
    """
    host = torch.empty_like(x, device="cpu", pin_memory=pin and x.is_cuda)
    return host.copy_(x, non_blocking=True)


@to_host.register_fake
def _(x: Tensor, pin: bool) -> Tensor:
    # On CUDA the result is a CPU tensor; a plan runs on CPU tensors, where the two are the same.
    return torch.empty_like(x, device="cpu")


@torch.library.custom_op("lab::from_host", mutates_args=("out",))
def from_host(host: Tensor, out: Tensor) -> None:
    """Copy host memory into ``out`` on the device. To CUDA: in the current stream's order, not waited for."""
    out.copy_(host, non_blocking=True)


@from_host.register_fake
def _(host: Tensor, out: Tensor) -> None:
    return None


class Parcel:
    """One tensor, sent off: on the host, on its way back, or kept on the device where it ``stays``."""

    def __init__(self, road: Road, x: Tensor, *, stays: bool = False) -> None:
        self._road, self._stays, self._to = road, stays, x.device
        # Detached: what is kept would otherwise hold the graph that made it.
        self._device: Tensor | None = x.detach() if stays else None
        self._host: Tensor | None = None if stays else road.send(x.detach())
        self._arrival: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Begin the way back; nothing waits for it yet."""
        if self._device is None:
            assert self._host is not None
            self._device, self._arrival = self._road.bring(
                self._host, torch.empty_like(self._host, device=self._to)
            )

    def open(self) -> Tensor:
        """The tensor, on the device, once it is there."""
        self.fetch()
        if self._arrival is not None:
            torch.cuda.current_stream(self._to).wait_event(self._arrival)
        x = self._device
        assert x is not None
        if not self._stays:
            # The caller has it now; a second backward over a retained graph fetches it again.
            self._device = self._arrival = None
        return x


class Road:
    """Between device and host: CUDA copies travel on one stream beside the one that computes.

    A buffer belongs to the computing stream, which waits for the copy before it lets go of the buffer; so
    torch's allocator may hand it out again at once, and needs to be told of no second stream. ``pinned`` is
    how many bytes may be pinned; None is half of this machine's memory, shared by its GPUs.
    """

    def __init__(self, pinned: int | None = None) -> None:
        self._pinned = Pinned(_half_of_the_machine() if pinned is None else pinned)
        self._leaving: list[Tensor] = []
        self._departure: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def send(self, x: Tensor) -> Tensor:
        """Begin x's way to the host; it is held until ``depart``."""
        with torch.no_grad(), self._beside(x):
            host = self._pinned.to_host(x)
            self._departure = self._mark(x)
        self._leaving.append(x)
        return host

    def depart(self) -> None:
        """Let go of what was sent: the computing stream waits until all of it has left."""
        if self._departure is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._departure)
        self._departure = None
        self._leaving.clear()

    def bring(self, host: Tensor, out: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin the way back into ``out``; also returns when it has arrived."""
        with torch.no_grad(), self._beside(out):
            torch.ops.lab.from_host(host, out)
            return out, self._mark(out)

    @contextmanager
    def _beside(self, x: Tensor) -> Iterator[None]:
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
    """Copies to the host, in pinned memory as long as there is room: ``limit`` bytes in all.

    It keeps the books of torch's caching host allocator, which rounds a buffer up to a power of two, and
    keeps it pinned when it dies, for the next of that size. So steps that are alike pin in the first alone;
    what finds no room is copied to ordinary memory, and the copy is waited for.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0
        self._free: Counter[int] = Counter()

    def to_host(self, x: Tensor) -> Tensor:
        """A copy of ``x`` in host memory."""
        size = 1 << max(x.nbytes - 1, 0).bit_length()
        again = self._free[size] > 0
        pin = again or self.taken + size <= self.limit
        host: Tensor = torch.ops.lab.to_host(x, pin)
        if again:
            self._free[size] -= 1
        elif pin:
            self.taken += size
        if pin:
            weakref.finalize(host, self._free.update, (size,))
        return host


def _half_of_the_machine() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory // 2 // max(torch.cuda.device_count(), 1)
