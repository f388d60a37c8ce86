"""Seconds of a step by phase, and nothing else: no operator is looked at, so none is slowed down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """A step's meter that only looks at the clock. ``seconds`` has one dict a step: seconds by phase.

    Where there is CUDA, a phase ends when the device has done all that was asked of it.
    """

    def __init__(self) -> None:
        self.seconds: list[dict[str, float]] = []

    @contextmanager
    def measure(self, *_: Any) -> Iterator[None]:
        """One step."""
        self.seconds.append({})
        yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One part of it."""
        start = _now()
        yield
        self.seconds[-1][name] = _now() - start


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
