"""What this process may take: memory, cores, threads and open files, of its host or of its container."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from cluster.host import own_cores

CGROUP = Path("/sys/fs/cgroup")
"""The folder in which Linux shows the limits of control groups, and so of containers."""

OWN_GROUPS = Path("/proc/self/cgroup")


class Memory(NamedTuple):
    """The memory of the host, or of the container where that is less.

    Attributes:
        total: All of it, in bytes.
        available: What can be taken now, in bytes. What the kernel can take back from its caches counts.
    """

    total: int
    available: int


def memory() -> Memory:
    """Return the memory that this process may use."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for folder in _groups("memory"):
        for limit, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            # A file may not exist, and "max" in it (no limit) is not a number.
            with suppress(OSError, ValueError):
                most = int((folder / limit).read_text())
                free = most - int((folder / used).read_text()) + _files_in(folder / "memory.stat", prefix)
                total, available = min(total, most), min(available, max(free, 0))
    return Memory(total, available)


def cores() -> int:
    """Return how many cores this process may keep busy, at least 1."""
    return max(1, int(min(len(own_cores()), core_quota())))


def core_quota() -> float:
    """Return how many cores' time the container gets; infinity where nothing limits it."""
    count = float("inf")
    for folder in _groups("cpu"):
        with suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            count = min(count, quota / period)
        with suppress(OSError, ValueError):
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            count = min(count, quota / period) if quota > 0 else count
    return count


def free_threads() -> float:
    """Return how many further threads can be started; infinity where nothing limits them."""
    free = float("inf")
    for folder in _groups("pids"):
        with suppress(OSError, ValueError):
            free = min(
                free, int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text())
            )
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The system counts the threads of a user, and lets root start as many as it likes.
    if limit != resource.RLIM_INFINITY and os.geteuid():
        users = psutil.process_iter(["uids", "num_threads"])
        # What the system does not tell of another user's process is None.
        mine = [one.info for one in users if one.info["uids"] and one.info["uids"].real == os.getuid()]
        free = min(free, limit - sum(one["num_threads"] or 0 for one in mine))
    return free


def killed_for_memory() -> int:
    """Return a count that grows when the system ends a process of the container for lack of memory."""
    count = 0
    for folder in _groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError, ValueError):
                counters = dict(line.split() for line in (folder / name).read_text().splitlines())
                count += int(counters.get("oom_kill", 0))
    return count


def most_open_files() -> int:
    """Return how many files and sockets a process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group, and of those that it is in, for a controller."""
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 1 has a folder for each controller, and version 2 one for all.
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP / controller if controllers else CGROUP
        own = root / path.lstrip("/")
        # A container sees its own group as the root, and may have the path that the host sees.
        yield from (group for group in (own, *own.parents) if group.is_relative_to(root) and group.is_dir())


def _files_in(statistics: Path, prefix: str) -> int:
    """Return the bytes of files that are only in memory to be read faster, which the kernel takes back."""
    with suppress(OSError, ValueError):
        pairs = dict(line.split(" ", 1) for line in statistics.read_text().splitlines())
        return sum(int(pairs.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return 0
