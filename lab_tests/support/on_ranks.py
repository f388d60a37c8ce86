"""What tests of clusters share: functions that run on ranks, limits of time, and processes that are left."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
import torch.distributed as dist

from cluster.ranks import Cluster
from cluster.watchdog import is_alive


def describe_rank() -> dict[str, Any]:
    """Return what a rank is, and where."""
    from ipyparallel.engine.app import IPEngine

    engine = IPEngine.instance()
    return {
        "engine": engine.id,
        "rank": dist.get_rank(),
        "ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "cores": os.sched_getaffinity(0),
        "variables": dict(os.environ),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "host": socket.gethostname(),
        "backend": dist.get_backend(),
        "encrypted": bool(engine.curve_serverkey),
        "on disk": os.path.exists(engine.profile_dir.location),
    }


def sum_over_ranks(start: float) -> float:
    """Return the sum of ``start`` to the power of each rank."""
    value = torch.tensor(start ** dist.get_rank())
    dist.all_reduce(value)
    return float(value)


def pids(cluster: Cluster) -> list[int]:
    """Return the processes of the ranks."""
    return cluster.apply(os.getpid)


def sums(cluster: Cluster) -> bool:
    """Return whether all ranks work together."""
    return cluster.apply(sum_over_ranks, 2.0) == [2.0**cluster.ranks - 1] * cluster.ranks


@contextmanager
def ranks_kept(cluster: Cluster) -> Iterator[None]:
    """Check that the same processes serve a call after this block.

    A rank may need seconds to leave a call that failed, so what the cluster says of it right then proves
    nothing. After a failure the next call waits for it, and after a stop it restarts the ranks.
    """
    before = pids(cluster)
    yield
    assert pids(cluster) == before, "ranks were restarted"
    assert sums(cluster)


def raise_on(culprit: int) -> None:
    """Raise an error on one rank, while the others wait for it."""
    if dist.get_rank() == culprit:
        time.sleep(0.2)
        raise ArithmeticError("7 is not 11")
    dist.barrier()


def end_on(culprit: int) -> None:
    """End the process of one rank, while the others wait for it."""
    if dist.get_rank() == culprit:
        os._exit(87)
    dist.barrier()


# Seconds in which the cluster notices a failure, or ends what it started, on a busy machine too. After 60 s
# the ranks' timeout and ipyparallel's heartbeats would do the same.
IN_TIME = 50.0


@contextmanager
def in_time() -> Iterator[None]:
    """Check that a block takes less than ``IN_TIME``."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < IN_TIME


def wait_until(
    done: Callable[[], bool], what: str, why: Callable[[], object] = lambda: "", seconds: float = IN_TIME
) -> None:
    """Wait until ``done()`` is true; after so many seconds the test fails, and says ``why()``."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s {why()}"
        time.sleep(0.05)


def own_processes() -> set[psutil.Process]:
    """Return the living descendants of this process, but not that from which the next ranks are forked."""
    own = set()
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if is_alive(one) and (one.cmdline()[-1:] != ["cluster.forks"] or one.ppid() != os.getpid()):
                own.add(one)
    return own


def listening_at(processes: Iterable[psutil.Process]) -> list[Any]:
    """Return the addresses at which processes listen for TCP connections, each with ``ip`` and ``port``."""
    found = [connection for process in processes for connection in process.net_connections("tcp")]
    return [connection.laddr for connection in found if connection.status == psutil.CONN_LISTEN]


@contextmanager
def no_process_left(seconds: float = 0.0) -> Iterator[None]:
    """Check that the processes that a block starts have ended so many seconds after it."""
    before = own_processes()
    yield
    wait_until(lambda: own_processes() <= before, "their end", lambda: own_processes() - before, seconds)
