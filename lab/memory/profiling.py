"""Seconds and bytes of the same step: torch's profiler under the meter, each operator with its module.

The meter is a dispatch mode and takes time of its own at every operator. That is measured with the rest: what
stands in ``Profile.calls`` are the operators themselves, ``Profile.meter_seconds`` is what the meter and its
marks took around them.
"""

from __future__ import annotations

import gc
import gzip
import pickle
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from lab.memory.meter import ACTIVATIONS, OTHER, Meter
from lab.memory.timeline import CATEGORIES, Moment, Timeline
from lab.torch_private import memory_snapshot, start_memory_history, stop_memory_history, storage_id

MARK = "lab"
"""Begins the names of the meter's marks in a trace: ``lab|forward|model.layers.0.mlp|aten.silu``."""

_COLLECTIVES = ("gloo:", "nccl:")
"""What a collective is called while a thread of its backend runs it, or waits for the other ranks."""


@dataclass(frozen=True)
class Call:
    """One operator as it ran: ``start`` in seconds on the timeline's clock, ``seconds`` long."""

    op: str
    module: str
    phase: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Spent:
    """What all calls of one name took together, in seconds."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Left:
    """A storage that outlived its step and is no parameter, gradient or optimizer state.

    ``made`` is the instant at which it was first seen: its op and module are who made it, its step when.
    """

    bytes: int
    category: str
    made: Moment


@dataclass(frozen=True, eq=False)
class Profile:
    """The last of some training steps of one rank, in seconds and in bytes.

    ``timeline`` has the bytes of all the steps, ``calls`` the operators of the last one in order, ``left``
    what was still held after it, the largest first. ``trace`` is the profiler's own, gzipped JSON for
    Perfetto; ``snapshot`` is for PyTorch's memory viewer, None where there is no CUDA allocator.
    """

    timeline: Timeline
    calls: tuple[Call, ...]
    left: tuple[Left, ...]
    meter_seconds: float
    trace: bytes
    snapshot: bytes | None

    @property
    def last(self) -> Timeline:
        """The rows of the profiled step."""
        return self.timeline.rows(self.timeline.step == self.timeline.step[-1])

    @property
    def seconds(self) -> float:
        """What the profiled step took, from its first row to its last."""
        rows = self.last.seconds
        return float(rows[-1] - rows[0])

    def spent(self, by: Literal["op", "module", "phase"]) -> list[Spent]:
        """Seconds and calls by operator, by kind of module (layers together) or by phase, the most first."""
        taken: dict[str, list[float]] = defaultdict(list)
        for call in self.calls:
            taken[name_of(call, by)].append(call.seconds)
        found = [Spent(name, sum(seconds), len(seconds)) for name, seconds in taken.items()]
        return sorted(found, key=lambda spent: -spent.seconds)


def name_of(call: Call, by: Literal["op", "module", "phase"]) -> str:
    """What a call counts as; layers are one: ``model.layers.3.mlp.down_proj`` is ``mlp.down_proj``."""
    if by == "module":
        parts = call.module.removeprefix("model.").split(".")
        return ".".join(parts[2:] or ["layer"] if parts[0] == "layers" else parts) or "no module"
    return call.op if by == "op" else call.phase


class ProfilingMeter(Meter):
    """A meter that marks each operator in the profiler's trace and knows where each storage came from."""

    def __init__(self) -> None:
        # The profiler's clock, so that rows and calls stand on one axis.
        super().__init__(clock=lambda: time.time_ns() / 1e9)
        self._born: dict[int, int] = {}
        self._waits = torch.cuda.is_available()

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As the meter does, inside a mark; a GPU is waited for, so that an operator's time is its own."""
        if func.namespace == "profiler":
            return func(*args, **kwargs)  # a mark of FSDP's or the optimizer's
        with record_function(f"{MARK}|{self._phase}|{self._paths.current()}|{func.overloadpacket}"):
            result = super().observe(func, args, kwargs)
            if self._waits:
                torch.cuda.synchronize()
        return result

    def _count_tensor(self, tensor: torch.Tensor, category: int) -> Any:
        # Asked before and of this one: counting may free others.
        known = storage_id(tensor.untyped_storage()) in self._live
        block = super()._count_tensor(tensor, category)
        if block is not None and not known:
            self._born[block.key] = len(self.rows)  # the row that the operator at work is about to add
        return block

    def left(self) -> tuple[Left, ...]:
        """What is held now beside the model's state, the largest first."""
        gc.collect()
        rows = self.timeline()
        kept = [b for b in self._live.values() if b.size and b.category in (ACTIVATIONS, OTHER)]
        kept.sort(key=lambda block: -block.size)
        return tuple(Left(b.size, CATEGORIES[b.category], rows.moment(self._born[b.key])) for b in kept)

    @contextmanager
    def profiled(self) -> Iterator[list[Profile]]:
        """Profile the step in the block; the list that is yielded holds its profile afterwards."""
        result: list[Profile] = []
        cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        if cuda:
            start_memory_history(stacks=True)
        snapshot = None
        try:
            with profile(activities=activities) as profiler:
                yield result
            if cuda:
                snapshot = pickle.dumps(memory_snapshot())
        finally:
            if cuda:
                stop_memory_history()
        calls, overhead = _calls(profiler.profiler.kineto_results.events(), self._start)
        result.append(Profile(self.timeline(), calls, self.left(), overhead, _trace(profiler), snapshot))


def _calls(events: Iterable[Any], zero: float) -> tuple[tuple[Call, ...], float]:
    """The marked operators in order, and the seconds that went into marking and metering them."""
    on_host = [e for e in events if str(e.device_type()) == "DeviceType.CPU"]
    on_host.sort(key=lambda e: (e.start_thread_id(), e.start_ns(), -e.duration_ns()))
    calls, metered = [], 0
    for place, event in enumerate(on_host):
        if event.name().startswith(MARK + "|"):
            _, phase, module, op = event.name().split("|")
            start, end = _inside(on_host, place)
            calls.append(Call(op, module, phase, start / 1e9 - zero, (end - start) / 1e9))
            metered += event.duration_ns() - (end - start)
    calls.sort(key=lambda call: call.start)
    calls += _collectives(on_host, calls, zero)
    return tuple(sorted(calls, key=lambda call: call.start)), metered / 1e9


def _inside(events: Sequence[Any], place: int) -> tuple[int, int]:
    """From when to when, in ns, the mark at this place had its operator, and a wait for it, running."""
    mark = events[place]
    end = mark.start_ns() + mark.duration_ns()
    last = first = mark.start_ns()
    for event in events[place + 1 :]:
        if event.start_thread_id() != mark.start_thread_id() or event.start_ns() >= end:
            break
        if last == first:
            first = event.start_ns()
        last = max(last, event.start_ns() + event.duration_ns())
    return first, min(last, end)


def _collectives(events: Iterable[Any], calls: Sequence[Call], zero: float) -> Iterator[Call]:
    """What a backend's threads ran, each for the operator that asked for it: the last that began before."""
    before = Call("", "", "setup", 0.0, 0.0)
    asked = iter(calls)
    upcoming = next(asked, None)
    for event in sorted(events, key=lambda e: e.start_ns()):
        if not event.name().startswith(_COLLECTIVES):
            continue
        start = event.start_ns() / 1e9 - zero
        while upcoming is not None and upcoming.start <= start:
            before, upcoming = upcoming, next(asked, None)
        yield Call(event.name(), before.module, before.phase, start, event.duration_ns() / 1e9)


def _trace(profiler: profile) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes())
