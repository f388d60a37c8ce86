"""Bytes that never cross the dispatcher: what a plan adds for the device that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.hardware import fixed_workspace, flash_backward_workspace, rounded


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
    inside: Callable[[str, tuple[Any, ...]], int] = lambda op, args: 0


NO_WORKSPACE = Workspace()
"""CPU ranks, as the meter sees them."""


def cuda_workspace(ranks: int) -> Workspace:
    """What CUDA takes on each of ``ranks`` ranks, by the model in ``hardware.py``."""
    return Workspace(fixed_workspace(ranks), rounded, _inside)


def _inside(op: str, args: tuple[Any, ...]) -> int:
    if op != "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return 0
    (batch, heads, tokens, head_dim), (_, kv_heads, keys, _) = args[1].shape, args[2].shape
    copies = sum(not x.transpose(1, 2).is_contiguous() for x in (args[0], args[4]))
    return flash_backward_workspace(batch, heads, kv_heads, tokens, keys, head_dim, copies=copies)
