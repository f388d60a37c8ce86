"""The processes of one cluster: found as descendants of those it started, ended by their id."""

import contextlib
from collections.abc import Iterable

import psutil


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
    """Ask each to end, kill after `patience` seconds those that have not, and return when all are gone."""
    asked = list(processes)
    for process in asked:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(asked, timeout=patience)
    kill(left)
    psutil.wait_procs(left, timeout=patience)
