"""The processes of one cluster: found as descendants of those it started, ended by their id."""

import contextlib
import time
from collections.abc import Iterable

import psutil

from cluster.watchdog import is_alive

POLL_SECONDS = 0.02


def family(pids: Iterable[int]) -> set[psutil.Process]:
    """Return the processes `pids` and all their descendants that live now."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {root, *root.children(recursive=True)}
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each; one that is gone, even where its id has a new bearer, is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def end(processes: Iterable[psutil.Process], patience: float) -> None:
    """Ask each to end, kill those still there after `patience` seconds, and return when all are gone."""
    asked = list(processes)
    for process in asked:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    left = outlive(asked, patience)
    kill(left)
    outlive(left, patience)


def outlive(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return those of `processes` that still run after `seconds`, or nothing as soon as all have ended."""
    # psutil.wait_procs would wait for those that are dead but not reaped, which only their parent can change.
    deadline = time.monotonic() + seconds
    left = [process for process in processes if is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = [process for process in left if is_alive(process)]
    return left
