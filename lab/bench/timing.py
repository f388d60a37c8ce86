"""Seconds of calls, of which several take turns so that a machine that slows down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of a call, and of the kernels that it starts on a GPU."""
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def rounds(repeats: int, *works: Callable[[], object]) -> list[list[float]]:
    """Return the seconds of each function by round. In a round each function runs once, in their order."""
    return [[seconds(work) for work in works] for _ in range(repeats)]


def _wait() -> None:
    # A process that has not used CUDA has no kernels to wait for, and the question would make a context.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
