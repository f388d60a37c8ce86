"""CUDA's streams on a CPU: copies and exchanges run as late, or as early, as their events allow.

The computing stream runs at once, as the CPU does. The copies of ``HostCopier``, and all-to-alls in the
background, are queued. They run when the computing stream waits for an event that was recorded after them.
A queued operation has weak references to the memory of the device alone, because CUDA's allocator gives a
freed block to the next tensor, whether or not another stream still uses it. Memory of the host is kept, as
the caching host allocator keeps it.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.techniques.host_transfer import piece_sizes
from lab.torch_private import queue_callback

SEND, FETCH, EXCHANGE = "to the host", "to the device", "exchange"
SCHEDULES = {"late": (), "early to the device": (FETCH,), "early to the host": (SEND, EXCHANGE)}
"""Which kinds of operations run as soon as they are queued; all others run as late as possible."""


class Race(AssertionError):
    """An operation of one stream uses memory that another stream writes, or that has been freed."""


class Stream:
    """A stream other than the computing one: a queue."""

    def __init__(self, device: Any = None) -> None:
        self.device, self.queue, self.queued, self.done = device, deque[Callable[[], None]](), 0, 0
        self.follows = False

    def wait_stream(self, computing: Computing) -> None:
        self.follows = True

    def record_event(self) -> Event:
        return Event(self, self.queued)

    def push(self, operation: Callable[[], None], *, early: bool) -> None:
        if not self.follows:
            raise Race("an operation does not wait for what was computed before it")
        self.queue.append(operation)
        self.queued += 1
        if early:
            self.run(self.queued)

    def synchronize(self) -> None:
        self.run(self.queued)

    @torch.no_grad()
    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.queue.popleft()()


class Event:
    """A point in the queue of a stream. A work of torch.distributed has ``wait`` too."""

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream, self.number = stream, number

    def wait(self) -> None:
        self.stream.run(self.number)


class Computing:
    """The computing stream, which runs at once."""

    def wait_event(self, event: Event) -> None:
        event.wait()


class _OnDevice:
    """A tensor on the device, by a weak reference to its storage."""

    def __init__(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self._storage, self._nbytes, self._dtype = weakref.ref(storage), storage.nbytes(), x.dtype
        self._view = (x.storage_offset(), x.shape, x.stride())

    def get(self) -> Tensor:
        storage = self._storage()
        if storage is None or storage.nbytes() != self._nbytes:
            raise Race("memory is freed while a copy or an exchange may use it")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class LateStreams:
    """The streams of a block, see ``late_streams``.

    Attributes:
        counts: The number of operations of each kind.
    """

    def __init__(self, early: tuple[str, ...]) -> None:
        self.early, self.counts = early, dict.fromkeys((SEND, FETCH, EXCHANGE), 0)
        self._streams: list[Stream] = []
        # Each group of ranks has a stream, as with NCCL.
        self._exchanges: defaultdict[Any, Stream] = defaultdict(self.new_stream)
        self._gradients = self.new_stream()

    def new_stream(self, device: Any = None) -> Stream:
        self._streams.append(Stream(device))
        return self._streams[-1]

    @contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        with _Queue(self, stream):
            yield
        stream.follows = False

    def push(self, kind: str, stream: Stream, operation: Callable[[], None], out: Tensor | None) -> None:
        self.counts[kind] += 1
        if out is not None and kind not in self.early:
            # From now on, ``out`` may be written at any time.
            with torch.no_grad():
                out.fill_(torch.nan)
        stream.push(operation, early=kind in self.early)

    def exchange(
        self,
        out: Tensor,
        send: Tensor,
        *sizes: Any,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        real: Callable[..., Any],
    ) -> Event | None:
        if not async_op:
            real(out, send, *sizes, group=group)
            return None
        to, source = _OnDevice(out), _OnDevice(send)
        stream = self._exchanges[group]
        stream.follows = True  # torch's process groups wait for the computing stream
        self.push(EXCHANGE, stream, lambda: real(to.get(), source.get(), *sizes, group=group), out)
        return stream.record_event()

    def current_stream(self, device: Any = None) -> Stream | Computing:
        return self._gradients if _caller() == "move_to_host" else Computing()

    def to_host_whole(self, x: Tensor, pin: bool, *, real: Callable[..., Tensor]) -> Tensor:
        """Copy reduced gradients, in a stream of FSDP, which waits for it when backward ends."""
        source, host, stream = _OnDevice(x), torch.empty_like(x), self._gradients
        stream.follows = True
        self.push(SEND, stream, lambda: host.copy_(real(source.get(), pin)), host)
        queue_callback(stream.synchronize)
        return host

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        """Keep the memory of ``x`` until the stream has done what is queued now."""
        memory = x.untyped_storage()
        stream.push(lambda: memory.nbytes(), early=False)

    def finish(self) -> None:
        """Run what nobody has waited for."""
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Forget what has not run, so that what a failed block leaves behind can be freed."""
        for stream in self._streams:
            stream.queue.clear()
            stream.done = stream.queued


class _Queue(TorchDispatchMode):
    """Queues the copies of a block on a stream."""

    def __init__(self, streams: LateStreams, stream: Stream) -> None:
        super().__init__()
        self._streams, self._stream = streams, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, out = None, None
        match func.name(), args:
            case "lab::to_host", (x, pins):
                source = _OnDevice(x)
                pieces = result = [torch.full((n,), 255, dtype=torch.uint8) for n in piece_sizes(x.nbytes)]

                def run() -> None:
                    for piece, sent in zip(pieces, func(source.get(), pins), strict=True):
                        piece.copy_(sent)

                kind = SEND
            case "lab::write_host", (x, pieces, offset):
                source, kind = _OnDevice(x), SEND

                def run() -> None:
                    func(source.get(), pieces, offset)

            case "lab::from_host", (pieces, out, *offset):  # without an offset of 0
                to, kind = _OnDevice(out), FETCH

                def run() -> None:
                    func(pieces, to.get(), *offset)

            case _:
                raise AssertionError(f"{func.name()} in the stream of a copier")
        self._streams.push(kind, self._stream, run, out)
        return result


def _caller() -> str:
    """Return the name of the function that called the caller of this function."""
    return sys._getframe(2).f_code.co_name


@contextmanager
def late_streams(*early: str) -> Iterator[LateStreams]:
    """Let copies and exchanges of this block run late, but those of the kinds ``early`` at once.

    Raises:
        Race: An operation uses memory that has been freed, or does not wait for what was computed before.
    """
    streams, exchange, copy = LateStreams(early), dist.all_to_all_single, torch.ops.lab.to_host_whole

    def is_cuda(_: Tensor) -> bool:
        """True where the lab asks whether it needs a stream, and nowhere else."""
        return _caller() in ("_on_copy_stream", "_mark", "move_to_host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(is_cuda))
        patch.setattr(torch.cuda, "Stream", streams.new_stream)
        patch.setattr(torch.cuda, "stream", streams.inside)
        patch.setattr(torch.cuda, "current_stream", streams.current_stream)
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: streams.record_stream(x, stream))
        patch.setattr(torch.ops.lab, "to_host_whole", partial(streams.to_host_whole, real=copy))
        patch.setattr(
            dist, "all_to_all_single", lambda *given, **more: streams.exchange(*given, **more, real=exchange)
        )
        try:
            yield streams
            streams.finish()
        finally:
            streams.close()
