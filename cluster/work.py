"""The work that a rank has done, with its child processes: processor time, and bytes of disks."""

import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# The names of the threads of gloo and NCCL begin so. These threads poll while no message arrives, too.
POLLERS = ("gloo", "pt_gloo", "pt_nccl", "NCCL")


@dataclass(frozen=True)
class Work:
    """The work of a rank since its start.

    Attributes:
        seconds: The processor time of all its threads but those that poll, and of its child processes.
        disk: The bytes that these processes have read from disks or written to them.
    """

    seconds: float = 0.0
    disk: int = 0


NO_WORK = Work()


def work_so_far() -> Work:
    """Return the work of this process, without that of the thread that calls this function.

    A rank that waits for a kernel of CUDA spins, which takes processor time: such a rank works, also where
    the kernel waits for a peer, and NCCL ends it after a timeout of its own. If the process has set
    `cudaDeviceScheduleBlockingSync`, the rank takes none and counts as one that waits. torch does not set it.
    """
    rank = psutil.Process()
    seconds = -sum(thread.user_time + thread.system_time for thread in rank.threads() if _ignored(thread.id))
    disk = 0
    for process in (rank, *rank.children(recursive=True)):
        # A child may end in the meantime. Its processor time is then among that of its parent's children. A
        # kernel without I/O accounting has no counters.
        with suppress(psutil.Error, AttributeError):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
            counters = process.io_counters()
            disk += counters.read_bytes + counters.write_bytes
    return Work(seconds, disk)


def _ignored(thread: int) -> bool:
    try:
        name = Path(f"/proc/self/task/{thread}/comm").read_text()
    except OSError:
        return False
    return name.startswith(POLLERS) or thread == threading.get_native_id()
