"""What faults cost: each caused for real, again and again; seconds to the message and to recovery."""

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
from lab.training.out_of_memory import RankOutOfMemory
from lab.training.run import run

RANKS = 4
TIMEOUT = 3.0
"""Seconds that a collective may take here; what is told of a hang is told after it."""

EVERY, MORE = 5, 5
"""Steps between checkpoints, and those that a resumed training makes beyond the killed one's last."""


def measure_faults(times: int, say: Say) -> list[Row]:
    """One row a fault, caused ``times`` times: median and worst seconds, processes left over at the end.

    Seconds to the message count from the fault itself (of a hang from the end of its timeout), those to
    recovery from the message until the ranks have answered again. Where the owner is killed they count until
    all is gone; where training is, until it has gone on by a step, and ``unbroken`` counts losses that are.
    """
    rows = [_on_ranks(fault, cause, times, say) for fault, cause in CAUSES.items()]
    return [*rows, _owner_killed(times, say), _training_killed(times, say)]


def _on_ranks(fault: str, cause: Callable[[Cluster], float], times: int, say: Say) -> Row:
    told, recovered = [], []
    with _nothing_else() as left:
        with Cluster(ranks=RANKS, timeout=TIMEOUT) as cluster:
            for number in range(times):
                say(f"{fault}: {number + 1} of {times}")
                when = cause(cluster)
                told.append(time.time() - when)
                start = time.perf_counter()
                cluster.recover()
                cluster.apply(dist.barrier)
                recovered.append(time.perf_counter() - start)
        return _row(fault, times, told, recovered, left())


# ---- the faults: each raises its error and returns when it happened, in seconds since the epoch ------------


def _raises(cluster: Cluster) -> float:
    return _happened(cluster, _one_raises)


def _dies(cluster: Cluster) -> float:
    return _happened(cluster, _one_dies)


def _sticks(cluster: Cluster) -> float:
    return _happened(cluster, _one_sticks)


def _hangs(cluster: Cluster) -> float:
    return _happened(cluster, _all_hang) + TIMEOUT


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


def _happened(cluster: Cluster, fault: Callable[[], None]) -> float:
    when: list[float] = []
    with suppress(RankError):
        cluster.apply(fault, on_record=lambda _, record: when.append(float(str(record))))
    return max(when)


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
        time.sleep(0.1)  # for the message to leave
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


# ---- what nobody is left to tell of -------------------------------------------------------------------

OWNER = """
import time, psutil
from cluster import Cluster
with Cluster(ranks=2):
    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
    time.sleep(3600)
"""


def _owner_killed(times: int, say: Say) -> Row:
    fault, gone, left = "the owner is killed", [], 0
    for number in range(times):
        say(f"{fault}: {number + 1} of {times}")
        with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
            owner.kill()
        start = time.perf_counter()
        while any(map(is_alive, processes)) and time.perf_counter() - start < 30:
            time.sleep(0.05)
        gone.append(time.perf_counter() - start)
        left += sum(map(is_alive, processes))
    return _row(fault, times, [], gone, left)


def _training_killed(times: int, say: Say) -> Row:
    """Two ranks under torchrun, killed at a random moment and resumed: the losses are the unbroken run's."""
    fault, recovered, alike = "training is killed", [], 0
    with _nothing_else() as left:
        for number in range(times):
            say(f"{fault}: {number + 1} of {times}")
            with tempfile.TemporaryDirectory() as folder:
                seconds, same = _kill_and_resume(Path(folder) / "run")
            recovered.append(seconds)
            alike += same
        row = _row(fault, times, [], recovered, left())
    return {**row, "unbroken": f"{alike} of {times}"}


def _kill_and_resume(folder: Path) -> tuple[float, bool]:
    words = ["tiny", "--tokens", "256", "--every", str(EVERY), "--checkpoint", str(folder), "--json"]
    killed = _launched(*words, "--steps", "100000")
    while not (folder / f"step-{EVERY:08d}").exists():
        time.sleep(0.05)
    time.sleep(random.SystemRandom().uniform(0, 3))
    agent = psutil.Process(killed.pid)
    for process in [*agent.children(recursive=True), agent]:
        process.kill()
    killed.communicate()
    # The run that nothing broke, as far as it came; its last line may be cut short.
    path = folder / "losses.jsonl"
    whole = [json.loads(line)["loss"] for line in path.read_text().split("\n")[:-1]]
    start = time.perf_counter()
    resumed = _launched(*words, "--steps", str(len(whole) + MORE), "--resume")
    assert resumed.stdout is not None
    resumed.stdout.readline()
    seconds = time.perf_counter() - start
    resumed.communicate()
    found = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    return seconds, len(found) == len(whole) + MORE and found[: len(whole)] == whole


def _launched(*words: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "-m", "lab", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


# ---- rows ----------------------------------------------------------------------------------------------


@contextmanager
def _nothing_else() -> Iterator[Callable[[], int]]:
    """Count the processes that this one has then, and had not before."""
    before = set(psutil.Process().children(recursive=True))
    yield lambda: sum(map(is_alive, set(psutil.Process().children(recursive=True)) - before))


def _row(fault: str, times: int, told: list[float], recovered: list[float], left: int) -> Row:
    return {
        "fault": fault,
        "times": times,
        "message": median(told) if told else None,
        "message, worst": max(told) if told else None,
        "recovery": median(recovered),
        "recovery, worst": max(recovered),
        "left over": left,
        "unbroken": None,
    }
