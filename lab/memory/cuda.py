"""The meter of CUDA: the bytes of torch's caching allocator, with the operators and categories of the meter.

The allocator's history is exact, but knows no tensors: it lists how many bytes were allocated and freed. The
meter at the dispatcher knows the operator, the module and the category of each storage, but not the bytes
that kernels allocate inside. Both run during the one step that is measured. The timeline has the allocator's
bytes at each instant, split into categories as the meter splits them. Bytes unknown to the meter are *other*.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from lab.errors import LabError
from lab.memory.categories import OTHER
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.torch_private import (
    memory_events,
    set_expandable_segments,
    start_memory_history,
    stop_memory_history,
)
from lab.units import format_bytes

Event = Mapping[str, Any]
"""One event of the allocator's history: ``action``, ``size`` in bytes, ``time_us`` since the epoch."""


@dataclass(frozen=True)
class History:
    """The allocator's record of a step.

    Attributes:
        events: The events, in order.
        device_peak: The most bytes that were allocated at once.
        reserved_peak: The most bytes that the allocator had reserved at once, allocated or cached.
        retries: How many times the allocator freed its cache and asked the device again, near the limit.
        outside_torch: Bytes of the device that others hold: CUDA's context, libraries, NCCL, other processes.
        reserved: See ``reserved_by_pool``, at the end of the step.
    """

    events: Sequence[Event] = ()
    device_peak: int = 0
    reserved_peak: int = 0
    retries: int = 0
    outside_torch: int = 0
    reserved: Mapping[str, int] = field(default_factory=dict)


class CudaAllocator:
    """torch's caching allocator of the current device, whose history is recorded."""

    def begin(self) -> int:
        """Start to record, and reset the peaks; return the bytes that are allocated."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # Stacks would take most of the time, and the meter knows the operator and the module.
        start_memory_history(stacks=False)
        self._retries: int = torch.cuda.memory_stats()["num_alloc_retries"]
        return torch.cuda.memory_allocated()

    def end(self) -> History:
        """Stop to record; return the history since ``begin``."""
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
            reserved_by_pool(),
        )


def use_expandable_segments() -> int:
    """Set expandable segments of CUDA's allocator, unless the environment sets the allocator.

    When the device is nearly full, segments of fixed sizes reserve several GiB more than they hold. Empty
    ones are released first. Returns the bytes of tensors that are still in segments of fixed sizes on the
    current device; 0 if the environment sets the allocator.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return 0
    torch.cuda.empty_cache()
    set_expandable_segments(True)
    return sum(each["allocated_size"] for each in _segments() if not each["is_expandable"])


class AllocatedPeak:
    """The most bytes that CUDA's allocator holds from now on, including the workspaces of kernels.

    It costs no time while a step runs.

    Args:
        device: The device that trains. On CPU there is no such number.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()

    def bytes(self) -> int | None:
        """Return the peak so far; None on CPU."""
        return torch.cuda.max_memory_allocated() if self._on_cuda else None


class CudaMeter(Meter):
    """The meter of one step on CUDA.

    Attributes:
        history: The allocator's history; empty until the step has ended.
    """

    def __init__(self, allocator: CudaAllocator) -> None:
        super().__init__(clock=time.time, every_operator=True)
        self._allocator = allocator
        self._allocated = 0
        self.history = History()

    @contextmanager
    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Measure the step that runs in this context."""
        self._allocated = self._allocator.begin()
        try:
            with super().measure(model, optimizer):
                yield
        finally:
            self.history = self._allocator.end()

    def timeline(self) -> Timeline:
        """Return the allocator's bytes over time, with the meter's operators and categories."""
        return allocator_timeline(self.history.events, self._allocated, super().timeline(), self.start)


def allocator_timeline(events: Sequence[Event], allocated: int, meter: Timeline, start: float) -> Timeline:
    """Return the allocator's history as a timeline, with a row for each event that changes its bytes.

    Operators that move bytes between ranks, or between device and host, have a row too.

    The meter adds a row when an operator has returned, and the allocator is called while the operator runs.
    So an event belongs to the meter's first row at or after it, and to the last row if none follows. That
    row gives the event its operator, its module and its categories. Bytes unknown to the meter are *other*.
    Where the meter counts more bytes than the allocator (bytes that are freed already, or not allocated yet),
    the difference is taken from *temporary buffers*, and what they lack from the categories before them.

    The storages are the meter's, at the rows at which it held them.

    Args:
        events: The allocator's events.
        allocated: The bytes that were allocated before the first event.
        meter: The meter's timeline of the same step, with a row for every operator.
        start: When the meter's clock was at zero, in seconds since the epoch.
    """
    # Freed bytes are no longer allocated, although another stream may still read them.
    signs = {"alloc": 1, "free_requested": -1}
    changes = [(event["time_us"], signs.get(event["action"], 0) * event["size"]) for event in events]
    times, sizes = np.array([change for change in changes if change[1]], dtype=np.int64).reshape(-1, 2).T
    seconds = times / 1e6 - start
    rows = np.minimum(np.searchsorted(meter.seconds, seconds, side="left"), len(meter) - 1)
    # An operator that moves bytes may allocate none.
    moving = np.setdiff1d(meter.storages.moves[:, 1], rows)
    seconds = np.concatenate((seconds, meter.seconds[moving]))
    order = np.argsort(seconds, kind="stable")
    seconds, rows = seconds[order], np.concatenate((rows, moving))[order]
    sizes = np.concatenate((sizes, np.zeros_like(moving)))[order]
    device = meter.device[rows]
    device[:, OTHER] = allocated + sizes.cumsum() - device[:, :OTHER].sum(axis=1)
    for category in reversed(range(OTHER)):
        excess = np.minimum(device[:, category], np.maximum(-device[:, OTHER], 0))
        device[:, category] -= excess
        device[:, OTHER] += excess
    return replace(meter.take(rows), seconds=seconds, device=device, storages=meter.storages.at_rows(rows))


def reserved_by_pool() -> dict[str, int]:
    """Return the bytes that the allocator of the current device has reserved, by stream and pool.

    A stream has a pool for small tensors and one for large ones: "stream 0 large". Stream 0 is that of
    computation, and the others are in no order.
    """
    segments = _segments()
    streams = sorted({0, *(segment["stream"] for segment in segments)})
    reserved: Counter[str] = Counter()
    for segment in segments:
        pool = f"stream {streams.index(segment['stream'])} {segment['segment_type']}"
        reserved[pool] += segment["total_size"]
    return dict(reserved)


def _segments() -> list[dict[str, Any]]:
    """Return the segments of the allocator of the current device."""
    return [each for each in torch.cuda.memory_snapshot() if each["device"] == torch.cuda.current_device()]


def outside_torch() -> int:
    """Return how many bytes of the current device are in use outside torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@contextmanager
def limit_memory(limit: int, absent: int) -> Iterator[None]:
    """Let the current device run out of memory in this context as a device of ``limit`` bytes would.

    The allocator may hold what is left of the limit after the bytes outside torch.

    Args:
        limit: The bytes of the smaller device.
        absent: Bytes that a rank would hold outside torch and that this process does not hold (NCCL's).

    Raises:
        LabError: No bytes would be left for the allocator.
    """
    outside = outside_torch() + absent
    if outside >= limit:
        raise LabError(
            f"device_memory={format_bytes(limit)}: {format_bytes(outside)} are in use outside torch's "
            "allocator (CUDA's context, NCCL, other processes); give more than that"
        )
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((limit - outside) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
