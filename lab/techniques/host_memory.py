"""How much host memory the ranks of this host may pin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARE = 0.8
"""Of the host's memory, the part that may be pinned.

Pinned memory cannot be swapped out or reclaimed; the rest is left to the processes themselves, to the page
cache and to other users.
"""

CGROUP = Path("/sys/fs/cgroup")


def pinnable(ranks: int = 1, pinned: int = 0) -> int:
    """Return how many bytes of host memory each of ``ranks`` processes on this host may pin in all.

    It is an equal part of ``SHARE`` of the memory of the host, or of the container that has less. It is never
    more than a process has pinned already and an equal part of what is left there now.

    Args:
        ranks: The number of processes that pin memory on this host.
        pinned: The bytes that each of them has pinned already.
    """
    memory = psutil.virtual_memory()
    totals, rooms = [memory.total], [memory.available]
    for limit, used in _containers():
        totals.append(limit)
        rooms.append(max(limit - used, 0))
    return min(int(SHARE * min(totals)) // ranks, pinned + min(rooms) // ranks)


def local_ranks() -> int:
    """Return how many ranks run on this host, as torchrun and ``cluster`` tell each of them; 1 elsewhere."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _containers() -> Iterator[tuple[int, int]]:
    """Yield the limit of this process's control group in bytes, and the bytes of it that are in use.

    The page cache that is not in active use does not count: the kernel gives it up when memory is asked for.
    """
    for folder, limit, used, cache in (
        (CGROUP, "memory.max", "memory.current", "inactive_file"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        # There is no such file, or no limit, which is the word "max".
        with suppress(OSError, ValueError):
            most, now = int((folder / limit).read_text()), int((folder / used).read_text())
            yield most, now - _statistic(folder / "memory.stat", cache)


def _statistic(path: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
