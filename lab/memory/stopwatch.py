"""The seconds of a step, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lab.memory.meter import Meter
from lab.memory.out_of_memory import unmetered_out_of_memory


class Stopwatch:
    """A step's meter that measures time. It sees no operator, and so slows none down.

    On CUDA a phase ends when the device has finished the work of that phase. An out-of-memory error of torch
    is raised as OutOfMemory.

    Args:
        meter: A meter that measures the same steps. The seconds then include the time that it takes.

    Attributes:
        seconds: One dict for each step: the seconds by phase.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self.seconds: list[dict[str, float]] = []
        self._meter = meter
        self._phase = "setup"

    @contextmanager
    def measure(self, *step: Any) -> Iterator[None]:
        """Measure the step that runs in this context; ``step`` is its model and optimizer."""
        self.seconds.append({})
        try:
            with nullcontext() if self._meter is None else self._meter.measure(*step):
                yield
        except torch.OutOfMemoryError as error:
            raise unmetered_out_of_memory(error, self._phase) from error

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase of the step."""
        self._phase = name
        start = _now()
        with nullcontext() if self._meter is None else self._meter.phase(name):
            yield
        # Of several micro-batches, each has the phase.
        self.seconds[-1][name] = self.seconds[-1].get(name, 0.0) + _now() - start


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
