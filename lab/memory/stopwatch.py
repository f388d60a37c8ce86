"""Seconds of a step by phase; alone it looks at no operator, so none is slowed down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lab.memory.cuda import CudaMeter
from lab.memory.meter import Meter
from lab.memory.out_of_memory import outside_the_meter


class Stopwatch:
    """A step's meter that looks at the clock. ``seconds`` has one dict a step: seconds by phase.

    Where there is CUDA, a phase ends when the device has done all that was asked of it. With a ``meter``, the
    step is under that meter too, and the seconds include what it takes. Out of memory that no meter saw is
    raised as OutOfMemory.
    """

    def __init__(self, meter: Meter | CudaMeter | None = None) -> None:
        self.seconds: list[dict[str, float]] = []
        self._meter = meter
        self._phase = "setup"

    @contextmanager
    def measure(self, *step: Any) -> Iterator[None]:
        """Time one step, the block; ``step`` is its model and optimizer."""
        self.seconds.append({})
        try:
            with nullcontext() if self._meter is None else self._meter.measure(*step):
                yield
        except torch.OutOfMemoryError as error:
            raise outside_the_meter(error, self._phase) from error

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one part of it."""
        self._phase = name
        start = _now()
        with nullcontext() if self._meter is None else self._meter.phase(name):
            yield
        self.seconds[-1][name] = _now() - start


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
