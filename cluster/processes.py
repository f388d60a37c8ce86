"""The processes of one cluster. They are descendants of those it started, and are ended by their ids."""

import contextlib
import time
from collections.abc import Iterable

import psutil

from cluster.watchdog import is_alive

POLL_SECONDS = 0.02


def family(pids: Iterable[int]) -> set[psutil.Process]:
    """Return the processes with these ids and all their descendants that run now."""
    processes = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            processes |= {root, *root.children(recursive=True)}
    return processes


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each process. A process that is gone is skipped, also where its id is in use again."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def end(processes: Iterable[psutil.Process], patience: float) -> None:
    """End processes: terminate each, then kill those that still run.

    Args:
        processes: The processes.
        patience: How long to wait after each of the two signals, in seconds.
    """
    running = list(processes)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    remaining = wait_for_end(running, patience)
    kill(remaining)
    wait_for_end(remaining, patience)


def wait_for_end(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all processes have ended.

    Args:
        processes: The processes.
        seconds: The longest time to wait.

    Returns:
        The processes that still run, which is none where all ended in time.
    """
    # psutil.wait_procs would also wait for processes that have ended but whose parent has not reaped them.
    deadline = time.monotonic() + seconds
    remaining = [process for process in processes if is_alive(process)]
    while remaining and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        remaining = [process for process in remaining if is_alive(process)]
    return remaining
