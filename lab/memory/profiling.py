"""Seconds and bytes of one step: torch's profiler runs under the meter, and each operator has its module.

The meter is a dispatch mode, and takes time at every operator. This time is measured too. ``Profile.calls``
has the seconds of the operators alone, and ``Profile.meter_seconds`` the seconds of the meter and its marks.
"""

from __future__ import annotations

import gc
import gzip
import pickle
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from lab.memory.categories import CATEGORIES, OTHER
from lab.memory.meter import ACTIVATIONS, Meter
from lab.memory.moment import Moment
from lab.memory.timeline import Timeline
from lab.torch_private import memory_snapshot, start_memory_history, stop_memory_history

MARK = "lab"
"""The start of the names of the meter's marks in a trace: ``lab|forward|model.layers.0.mlp|aten.silu``."""

_COLLECTIVES = ("gloo:", "nccl:")
"""The starts of the names of collectives, while a backend's thread runs them or waits for other ranks."""


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        op: The operator.
        module: The path of the module that called it.
        phase: The phase of the step.
        start: When it began, in seconds on the timeline's clock.
        seconds: How long it took.
    """

    op: str
    module: str
    phase: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Total:
    """All calls of one name together.

    Attributes:
        name: The operator, the kind of module, or the phase.
        seconds: How long the calls took together.
        calls: How many there were.
    """

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Leftover:
    """A storage that outlives its step and is no parameter, gradient or optimizer state.

    Attributes:
        bytes: Its size.
        category: Its category.
        first_seen: The instant at which the meter saw it first, with the operator and module that made it.
    """

    bytes: int
    category: str
    first_seen: Moment


@dataclass(frozen=True, eq=False)
class Profile:
    """The last of several training steps of one rank, in seconds and in bytes.

    Attributes:
        timeline: The bytes of all the steps.
        calls: The operators of the last step, in order.
        leftovers: The storages that are still held after the last step, the largest first.
        meter_seconds: The seconds of the last step that the meter took.
        trace: The profiler's trace, gzipped JSON for Perfetto.
        snapshot: A pickle for PyTorch's memory viewer; None without CUDA.
    """

    timeline: Timeline
    calls: tuple[Call, ...] = field(repr=False)
    leftovers: tuple[Leftover, ...] = field(repr=False)
    meter_seconds: float
    trace: bytes = field(repr=False)
    snapshot: bytes | None = field(repr=False)

    @property
    def last(self) -> Timeline:
        """The rows of the profiled step."""
        return self.timeline.rows(self.timeline.step == self.timeline.step[-1])

    @property
    def seconds(self) -> float:
        """The seconds from the first row of the profiled step to its last."""
        rows = self.last.seconds
        return float(rows[-1] - rows[0])

    def totals(self, by: Literal["op", "module", "phase"]) -> list[Total]:
        """Return seconds and calls by operator, by kind of module or by phase; the longest comes first."""
        by_name: dict[str, list[float]] = defaultdict(list)
        for call in self.calls:
            by_name[name_of(call, by)].append(call.seconds)
        totals = [Total(name, sum(seconds), len(seconds)) for name, seconds in by_name.items()]
        return sorted(totals, key=lambda total: -total.seconds)


def name_of(call: Call, by: Literal["op", "module", "phase"]) -> str:
    """Return the name under which a call is added up: an operator, a kind of module or a phase.

    Modules of all layers have one name: ``model.layers.3.mlp.down_proj`` is ``mlp.down_proj``.
    """
    if by == "module":
        parts = call.module.removeprefix("model.").split(".")
        return ".".join(parts[2:] or ["layer"] if parts[0] == "layers" else parts) or "no module"
    return call.op if by == "op" else call.phase


class ProfilingMeter(Meter):
    """A meter that marks each operator in the profiler's trace."""

    def __init__(self) -> None:
        # The clock of the profiler, so that rows and calls have one axis of time.
        super().__init__(clock=lambda: time.time_ns() / 1e9)
        self._waits = torch.cuda.is_available()

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and count the operator inside a mark; on a GPU, wait for it, to measure its own time."""
        if func.namespace == "profiler":
            return func(*args, **kwargs)  # a mark that FSDP or the optimizer sets
        with record_function(f"{MARK}|{self._phase}|{self._paths.current()}|{func.overloadpacket}"):
            result = super().observe(func, args, kwargs)
            if self._waits:
                torch.cuda.synchronize()
        return result

    def leftovers(self) -> tuple[Leftover, ...]:
        """Return the storages that are held now and are not the model's state, the largest first."""
        gc.collect()
        rows = self.timeline()
        blocks = [b for b in self._live.values() if b.size and ACTIVATIONS <= b.category < OTHER]
        blocks.sort(key=lambda block: -block.size)
        return tuple(Leftover(b.size, CATEGORIES[b.category], rows.moment(b.first)) for b in blocks)

    @contextmanager
    def profile_step(self) -> Iterator[list[Profile]]:
        """Profile the step that runs in this context; afterwards the list that it yields has the profile."""
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
        calls, overhead = _calls(profiler.profiler.kineto_results.events(), self.start)
        result.append(Profile(self.timeline(), calls, self.leftovers(), overhead, _trace(profiler), snapshot))


def _calls(events: Iterable[Any], zero: float) -> tuple[tuple[Call, ...], float]:
    """Return the marked operators in order, and the seconds that the marks and the meter took."""
    on_host = [e for e in events if str(e.device_type()) == "DeviceType.CPU"]
    on_host.sort(key=lambda e: (e.start_thread_id(), e.start_ns(), -e.duration_ns()))
    calls, overhead = [], 0
    for place, event in enumerate(on_host):
        if event.name().startswith(MARK + "|"):
            _, phase, module, op = event.name().split("|")
            start, end = _inside(on_host, place)
            calls.append(Call(op, module, phase, start / 1e9 - zero, (end - start) / 1e9))
            overhead += event.duration_ns() - (end - start)
    calls.sort(key=lambda call: call.start)
    calls += [*_collectives(on_host, calls, zero)]
    return tuple(sorted(calls, key=lambda call: call.start)), overhead / 1e9


def _inside(events: Sequence[Any], place: int) -> tuple[int, int]:
    """Return the start and end, in ns, of the operator in the mark at this place, and of the wait for it."""
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
    """Yield what a backend's threads ran; each belongs to the last operator that began before it."""
    calls = [Call("", "", "setup", -inf, 0.0), *calls]
    for event in events:
        if event.name().startswith(_COLLECTIVES):
            start = event.start_ns() / 1e9 - zero
            before = calls[bisect_right(calls, start, key=lambda call: call.start) - 1]
            yield Call(event.name(), before.module, before.phase, start, event.duration_ns() / 1e9)


def _trace(profiler: profile) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes())
