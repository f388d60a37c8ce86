"""Bytes that never cross the dispatcher: what a plan adds for the device that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workspace:
    """What a device takes beside the storages that operators hand to each other, in bytes.

    Attributes:
        fixed: held all the time.
        rounded: what the allocator takes for a storage of so many bytes.
        inside: what a kernel, by its name and arguments, takes while it runs.
    """

    fixed: int = 0
    rounded: Callable[[int], int] = int
    inside: Callable[[str, tuple[Any, ...]], int] = lambda _op, _args: 0


NO_WORKSPACE = Workspace()
"""CPU ranks, as the meter sees them."""
