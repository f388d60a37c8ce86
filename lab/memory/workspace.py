"""Bytes that never cross the dispatcher: a plan adds them for the device that it is made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workspace:
    """The bytes that a device holds in addition to the storages of the step's tensors.

    Attributes:
        fixed: Bytes that are held all the time.
        kernel: Takes an operator's name and arguments; returns the bytes that its kernel allocates inside.
    """

    fixed: int = 0
    kernel: Callable[[str, tuple[Any, ...]], int] = lambda _op, _args: 0


NO_WORKSPACE = Workspace()
"""No bytes are added: a plan then counts what the meter counts on CPU ranks."""
