"""Causing faults of ranks and processes, and measuring the seconds to the message and to recovery."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist

from cluster.errors import RankError, Stopped
from cluster.live import publish
from cluster.ranks import Cluster
from cluster.watchdog import is_alive
from lab.bench.table import Row, Say
from lab.training.rank_out_of_memory import RankOutOfMemory
from lab.training.run import run

RANKS = 4
TIMEOUT = 3.0
"""The timeout of a collective in seconds. A hang is reported after it."""

EVERY, MORE = 5, 5
"""Steps between two checkpoints, and steps of the resumed training after the last step of the killed one."""


def measure_faults(times: int, say: Say) -> list[Row]:
    """Cause each fault ``times`` times, and return a row for each fault.

    The seconds to the message count from the fault, or from the end of the timeout if ranks hang. The seconds
    to recovery count from the message until all ranks have answered a call. If the owner of a cluster is
    killed, they count until its processes have ended. If training is killed, they count until the resumed
    training has made a step, and "unbroken" says how often its losses are those of uninterrupted training.
    """
    rows = [_on_ranks(fault, cause, times, say) for fault, cause in CAUSES.items()]
    return [*rows, _owner_killed(times, say), _training_killed(times, say)]


def _on_ranks(fault: str, cause: Callable[[Cluster], float], times: int, say: Say) -> Row:
    message, recovery = [], []
    with _count_processes() as left:
        with Cluster(ranks=RANKS, timeout=TIMEOUT) as cluster:
            for number in range(times):
                say(f"{fault}: {number + 1} of {times}")
                happened = cause(cluster)
                message.append(time.time() - happened)
                start = time.perf_counter()
                cluster.recover()
                cluster.apply(dist.barrier)
                recovery.append(time.perf_counter() - start)
        return _row(fault, times, message, recovery, left())


# ---- the faults: each causes its error, and returns when it happened, in seconds since the epoch -----------


def _raises(cluster: Cluster) -> float:
    return _cause_on_ranks(cluster, _one_raises)


def _dies(cluster: Cluster) -> float:
    return _cause_on_ranks(cluster, _one_dies)


def _sticks(cluster: Cluster) -> float:
    return _cause_on_ranks(cluster, _one_sticks)


def _hangs(cluster: Cluster) -> float:
    return _cause_on_ranks(cluster, _all_hang) + TIMEOUT


def _stopped(cluster: Cluster) -> float:
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.time())
        cluster.interrupt()

    threading.Timer(1.0, stop).start()
    with suppress(Stopped):
        cluster.apply(_all_work)
    return stopped[0]


def _runs_out(cluster: Cluster) -> float:
    try:
        run("tiny", "plain", tokens=1024, cluster=cluster, device_memory="24MiB")
    except RankOutOfMemory as error:
        return error.time
    raise AssertionError("24 MiB were enough")


def _cause_on_ranks(cluster: Cluster, fault: Callable[[], None]) -> float:
    times: list[float] = []
    with suppress(RankError):
        cluster.apply(fault, on_record=lambda _, record: times.append(float(str(record))))
    return max(times)


CAUSES: dict[str, Callable[[Cluster], float]] = {
    "a rank raises": _raises,
    "a rank raises, another is stuck": _sticks,
    "a rank runs out of memory": _runs_out,
    "a rank is killed": _dies,
    "all ranks hang": _hangs,
    "stopped in a step": _stopped,
}


def _one_raises() -> None:
    if dist.get_rank() == 1:
        publish(time.time())
        raise ArithmeticError
    dist.barrier()


def _one_sticks() -> None:
    if dist.get_rank() == 2:
        time.sleep(3600)
    _one_raises()


def _one_dies() -> None:
    if dist.get_rank() == 1:
        publish(time.time())
        time.sleep(0.1)  # until the record is sent
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _all_hang() -> None:
    publish(time.time())
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.broadcast(torch.ones(3), src=0)


def _all_work() -> None:
    while True:
        dist.all_reduce(torch.ones(1000))


# ---- killed owners and trainings -----------------------------------------------------------------------

OWNER = """
import time, psutil
from cluster import Cluster
with Cluster(ranks=2):
    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
    time.sleep(3600)
"""


def _owner_killed(times: int, say: Say) -> Row:
    fault, recovery, left = "the owner is killed", [], 0
    for number in range(times):
        say(f"{fault}: {number + 1} of {times}")
        with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
            owner.kill()
        start = time.perf_counter()
        while any(map(is_alive, processes)) and time.perf_counter() - start < 30:
            time.sleep(0.05)
        recovery.append(time.perf_counter() - start)
        left += sum(map(is_alive, processes))
    return _row(fault, times, [], recovery, left)


def _training_killed(times: int, say: Say) -> Row:
    """Kill two ranks under torchrun at a random moment, resume, and compare the losses."""
    fault, recovery, equal = "training is killed", [], 0
    with _count_processes() as left:
        for number in range(times):
            say(f"{fault}: {number + 1} of {times}")
            with tempfile.TemporaryDirectory() as folder:
                seconds, same = _kill_and_resume(Path(folder) / "run")
            recovery.append(seconds)
            equal += same
        row = _row(fault, times, [], recovery, left())
    return {**row, "unbroken": f"{equal} of {times}"}


def _kill_and_resume(folder: Path) -> tuple[float, bool]:
    """Return the seconds to the first resumed step, and whether the losses before it are unchanged."""
    words = ["tiny", "--tokens", "256", "--every", str(EVERY), "--checkpoint", str(folder), "--json"]
    killed = _launch(*words, "--steps", "100000")
    while not (folder / f"step-{EVERY:08d}").exists():
        time.sleep(0.05)
    time.sleep(random.SystemRandom().uniform(0, 3))
    agent = psutil.Process(killed.pid)
    for process in [*agent.children(recursive=True), agent]:
        process.kill()
    killed.communicate()
    # The losses of the training until it was killed. The last line may be incomplete.
    path = folder / "losses.jsonl"
    before = [json.loads(line)["loss"] for line in path.read_text().split("\n")[:-1]]
    start = time.perf_counter()
    resumed = _launch(*words, "--steps", str(len(before) + MORE), "--resume")
    assert resumed.stdout is not None
    resumed.stdout.readline()
    seconds = time.perf_counter() - start
    resumed.communicate()
    losses = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    return seconds, len(losses) == len(before) + MORE and losses[: len(before)] == before


def _launch(*words: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "-m", "lab", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


# ---- rows ----------------------------------------------------------------------------------------------


@contextmanager
def _count_processes() -> Iterator[Callable[[], int]]:
    """Yield a function that counts the child processes that have started since then and still run."""
    before = set(psutil.Process().children(recursive=True))
    yield lambda: sum(map(is_alive, set(psutil.Process().children(recursive=True)) - before))


def _row(fault: str, times: int, message: list[float], recovery: list[float], left: int) -> Row:
    return {
        "fault": fault,
        "times": times,
        "message": median(message) if message else None,
        "message, worst": max(message) if message else None,
        "recovery": median(recovery),
        "recovery, worst": max(recovery),
        "left over": left,
        "unbroken": None,
    }
