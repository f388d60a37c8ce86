"""The meter of CUDA: what torch's caching allocator says of itself, with the meter's names for it.

The allocator's history is exact and knows no tensors: so many bytes were taken, so many given back. The meter
at the dispatcher knows what ran, in which module, and who held what, but not what kernels take inside. Both
run in the one step that is measured, and the timeline has the allocator's bytes at each instant with the
meter's split of them; what the meter does not know of is *other*.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from lab.errors import LabError
from lab.memory.meter import ACTIVATIONS, OTHER, Meter
from lab.memory.timeline import Timeline, TimelineBuilder
from lab.torch_private import memory_events, start_memory_history, stop_memory_history
from lab.units import format_bytes

Event = Mapping[str, Any]
"""One of the allocator's history: ``action``, ``size`` in bytes, ``time_us`` since the epoch."""


@dataclass(frozen=True)
class History:
    """What the allocator says of a step.

    Attributes:
        events: all that it did, in order.
        device_peak: the most bytes allocated at once.
        reserved_peak: the most bytes that it held of the device at once, allocated or cached.
        retries: how often it gave its cache back and asked the device again, near the limit.
        outside_torch: bytes of the device that are taken and not the allocator's: CUDA's context, libraries,
            NCCL, other processes.
    """

    events: Sequence[Event] = ()
    device_peak: int = 0
    reserved_peak: int = 0
    retries: int = 0
    outside_torch: int = 0


class Allocator(Protocol):
    """What is asked of torch's caching allocator."""

    def begin(self) -> int:
        """Start recording, forget earlier peaks; return the bytes that are allocated."""

    def end(self) -> History:
        """Stop recording; return what happened since ``begin``."""


class CudaAllocator:
    """Torch's own, of the current device."""

    def begin(self) -> int:
        """See ``Allocator``."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # Without stacks: the meter knows better names, and they would cost most of the time.
        start_memory_history(stacks=False)
        self._retries: int = torch.cuda.memory_stats()["num_alloc_retries"]
        return torch.cuda.memory_allocated()

    def end(self) -> History:
        """See ``Allocator``."""
        torch.cuda.synchronize()
        events = memory_events()
        stop_memory_history()
        stats = torch.cuda.memory_stats()
        return History(
            events,
            stats["allocated_bytes.all.peak"],
            stats["reserved_bytes.all.peak"],
            stats["num_alloc_retries"] - self._retries,
            outside_torch(),
        )


class AllocatedPeak:
    """The most bytes that CUDA's allocator holds from now on, kernels' workspaces among them.

    It costs nothing while a step runs. Where ``device`` is no CUDA device there is nothing to ask.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()

    def bytes(self) -> int | None:
        """The peak so far; None where there is no CUDA device."""
        return torch.cuda.max_memory_allocated() if self._on_cuda else None


class CudaMeter:
    """A step's meter on CUDA: ``measure`` and ``phase`` as the meter's, for one step.

    ``history`` is the allocator's, known when the step has ended.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._began = time.time()
        self._meter = Meter(clock=time.time, every_operator=True)
        self._held = 0
        self.history = History()

    @contextmanager
    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Count one step, the block."""
        self._held = self._allocator.begin()
        try:
            with self._meter.measure(model, optimizer):
                yield
        finally:
            self.history = self._allocator.end()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of it."""
        with self._meter.phase(name):
            yield

    def timeline(self) -> Timeline:
        """The allocator's bytes over time, by the meter's names."""
        return named(self.history.events, self._held, self._meter.timeline(), self._began)


def named(events: Sequence[Event], held: int, meter: Timeline, began: float) -> Timeline:
    """The allocator's history as a timeline: ``held`` bytes at first, a row for each event that changes that.

    ``meter`` is what the dispatcher saw meanwhile, in seconds since ``began``, itself since the epoch: a row
    for each operator, added when it has returned. The allocator is asked while an operator runs, so each
    event takes its names and its split from the meter's first row at or after it; what follows the last row
    takes that one's. Bytes of which the meter does not know are *other*; where it counts some that were given
    back, or are not taken yet, *activations* are that much less.
    """
    rows = TimelineBuilder()
    for event in events:
        # What is asked back is no longer allocated, though a second stream may still read it.
        change = {"alloc": 1, "free_requested": -1}.get(event["action"], 0) * event["size"]
        if not change:
            continue
        held += change
        seconds = event["time_us"] / 1e6 - began
        row = min(int(np.searchsorted(meter.seconds, seconds, side="left")), len(meter) - 1)
        at, split = meter.moment(row), meter.device[row].copy()
        split[OTHER] = held - split[:OTHER].sum()
        if split[OTHER] < 0:
            split[ACTIVATIONS] += split[OTHER]
            split[OTHER] = 0
        rows.add(
            seconds,
            split.tolist(),
            at.host,
            phase=at.phase,
            module=at.module,
            op=meter.ops[meter.op[row]],
            step=at.step,
        )
    return rows.since(0)


def outside_torch() -> int:
    """Bytes of the current device that are taken and that torch's allocator does not hold."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@contextmanager
def capped(limit: int, absent: int) -> Iterator[None]:
    """In the block the current device has ``limit`` bytes in all, as a smaller one would have.

    The allocator may hold what is left of them: less what is outside torch when the block begins, and less
    ``absent``, the bytes that a rank would hold outside torch and that this process does not (NCCL's).

    Raises:
        LabError: nothing would be left.
    """
    taken = outside_torch() + absent
    if taken >= limit:
        raise LabError(
            f"device_memory={format_bytes(limit)}: outside torch's allocator {format_bytes(taken)} "
            "are taken (CUDA's context, NCCL, other processes); give more than that"
        )
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((limit - taken) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
