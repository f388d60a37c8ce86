"""How much host memory the ranks of a host may take, and how much of it they may pin."""

from __future__ import annotations

import os

from cluster.limits import memory
from lab.units import GiB

SYSTEM_RESERVE, RANK_RESERVE = 4 * GiB, 4 * GiB
"""Bytes of a host's memory that a step cannot have: for the system, and for the process of each rank.

The first is for the kernel, the services and the page cache. The second is for Python, the libraries of torch
and CUDA, the context of the GPU and the buffers of NCCL. Both are assumed.
"""

PINNABLE_SHARE = 0.8
"""The share of the host's memory that may be pinned.

Pinned memory cannot be swapped out or reclaimed; the rest is left to the processes themselves, to the page
cache and to other users.
"""


def reserve(ranks: int) -> int:
    """Return the bytes of a host's memory that the system and the processes of ``ranks`` ranks take."""
    return SYSTEM_RESERVE + ranks * RANK_RESERVE


def pinnable(ranks: int = 1, pinned: int = 0) -> int:
    """Return how many bytes of host memory each of ``ranks`` processes on this host may pin in all.

    All processes together may pin ``PINNABLE_SHARE`` of the memory of the host, or of the container if its
    limit is lower. A process never gets more than the bytes that it has pinned already, and an equal part of
    the memory that is available now.

    Args:
        ranks: The number of processes that pin memory on this host.
        pinned: The bytes that each of them has pinned already.
    """
    total, available = memory()
    return min(int(PINNABLE_SHARE * total) // ranks, pinned + available // ranks)


def local_ranks() -> int:
    """Return how many ranks run on this host.

    torchrun and ``cluster`` set the number in the environment of each rank. Without it, the result is 1.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
