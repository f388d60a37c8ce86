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
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from lab.memory.meter import ACTIVATIONS, OTHER, Meter
from lab.memory.timeline import Timeline, TimelineBuilder

Event = Mapping[str, Any]
"""One of the allocator's history: ``action``, ``size`` in bytes, ``time_us`` since the epoch."""


class Allocator(Protocol):
    """What is asked of torch's caching allocator."""

    def begin(self) -> int:
        """Start recording, forget earlier peaks; return the bytes that are allocated."""

    def end(self) -> tuple[Sequence[Event], int, int, int]:
        """Stop; return the history, the allocated and the reserved peak, and bytes outside torch."""


class CudaAllocator:
    """Torch's own, of the current device."""

    def begin(self) -> int:
        """See ``Allocator``."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        # Without stacks: the meter knows better names, and they would cost most of the time.
        torch.cuda.memory._record_memory_history("all", context=None)
        return torch.cuda.memory_allocated()

    def end(self) -> tuple[Sequence[Event], int, int, int]:
        """See ``Allocator``. Outside torch are CUDA's context, NCCL, and other processes."""
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(None)
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        return events, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), outside


class CudaMeter:
    """A step's meter on CUDA: ``measure`` and ``phase`` as the meter's, for one step.

    ``device_peak``, ``reserved_peak`` and ``outside_torch`` are bytes, known when the step has ended.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._began = time.time()
        self._meter = Meter(clock=time.time, every_operator=True)
        self._held = 0
        self._events: Sequence[Event] = ()
        self.device_peak = self.reserved_peak = self.outside_torch = 0

    @contextmanager
    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Count one step, the block."""
        self._held = self._allocator.begin()
        try:
            with self._meter.measure(model, optimizer):
                yield
        finally:
            self._events, self.device_peak, self.reserved_peak, self.outside_torch = self._allocator.end()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of it."""
        with self._meter.phase(name):
            yield

    def timeline(self) -> Timeline:
        """The allocator's bytes over time, by the meter's names."""
        return named(self._events, self._held, self._meter.timeline(), self._began)


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
