"""Causing faults of ranks and processes, and measuring the seconds to the message and to recovery."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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
from lab_tests.support.on_ranks import own_processes

RANKS = 4
TIMEOUT = 3.0
"""The timeout of a collective in seconds. A hang is reported after it."""

EVERY, MORE, FIRST = 5, 5, "step-00000005"
"""Steps between two checkpoints, those that a training goes on after a fault, and the first checkpoint."""

PATIENCE = 120.0
"""Seconds after which a process that does not come to an end, or makes no step, is stuck."""


class Attempt(NamedTuple):
    """What came of a fault that was caused once.

    Attributes:
        recovery: The seconds to recovery.
        message: The seconds to the message; None if there is none.
        unbroken: Whether what goes on is as it was to be; None if nothing goes on.
        left: Processes that are not this one's, and that did not end.
    """

    recovery: float
    message: float | None = None
    unbroken: bool | None = None
    left: int = 0


def measure_faults(times: int, say: Say) -> list[Row]:
    """Cause each fault ``times`` times, and return a row for each fault.

    The seconds to the message count from the fault, or from the end of the timeout if ranks hang. The seconds
    to recovery count from the message until all ranks have answered a call. If the owner of a cluster is
    killed, they count until its processes have ended. If training is killed, they count until the resumed
    training has made a step, and "unbroken" says how often its losses are those of uninterrupted training.

    If a process that compiles is killed, they count from the start of the next one until it has compiled, and
    "unbroken" says how often it did. If a second training starts in a folder, the seconds to the message
    count from its start to its end, and those to recovery until the first has made another step. "unbroken"
    says how often the second was refused and the first has the losses of all its steps.
    """
    return [measure_fault(fault, times, say) for fault in FAULTS]


def measure_fault(fault: str, times: int, say: Say) -> Row:
    """Return the row of a fault of ``FAULTS``."""
    around, cause = FAULTS[fault]
    before, attempts = own_processes(), []
    with around() as place:
        for number in range(times):
            say(f"{fault}: {number + 1} of {times}")
            attempts.append(cause(place))
    own = own_processes() - before
    recovery, message, unbroken, left = zip(*attempts, strict=True)
    return {
        "fault": fault,
        "times": times,
        "message": median(message) if message[0] else None,
        "message, worst": max(message) if message[0] else None,
        "recovery": median(recovery),
        "recovery, worst": max(recovery),
        "left over": len(own) + sum(left),
        "unbroken": None if unbroken[0] is None else f"{sum(unbroken)} of {times}",
    }


# ---- faults of ranks: each causes its error, and returns when it happened, in seconds since the epoch ------


def _on_ranks(cause: Callable[[Cluster], float], cluster: Cluster) -> Attempt:
    # A new rank needs seconds for it, and a stop does not interrupt an import.
    cluster.apply(import_module, __name__)
    happened = cause(cluster)
    message = time.time() - happened
    start = time.perf_counter()
    cluster.recover()
    cluster.apply(dist.barrier)
    return Attempt(time.perf_counter() - start, message)


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


def _raised(fault: Callable[[], None], cluster: Cluster) -> float:
    times: list[float] = []
    with suppress(RankError):
        cluster.apply(fault, on_record=lambda _, record: times.append(float(str(record))))
    return max(times)


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


def _kill_owner(_: None) -> Attempt:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(processes) >= 5, "a controller, two engines, two nannies"
        owner.kill()
    start = time.perf_counter()
    while any(map(is_alive, processes)) and time.perf_counter() - start < 30:
        time.sleep(0.05)
    return Attempt(time.perf_counter() - start, left=sum(map(is_alive, processes)))


def _kill_and_resume(place: str) -> Attempt:
    """Kill two ranks under torchrun at a random moment, resume, and compare the losses."""
    folder = Path(tempfile.mkdtemp(dir=place)) / "run"
    killed = _train(folder, "--steps", "100000")
    _wait_for(lambda: (folder / FIRST).exists())
    time.sleep(random.SystemRandom().uniform(0, 3))
    _kill_tree(killed)
    before = _losses(folder)
    start = time.perf_counter()
    resumed = _train(folder, "--steps", str(len(before) + MORE), "--resume")
    assert resumed.stdout is not None
    resumed.stdout.readline()
    seconds = time.perf_counter() - start
    resumed.communicate()
    losses = _losses(folder)
    same = len(losses) == len(before) + MORE and losses[: len(before)] == before
    return Attempt(seconds, unbroken=same)


def _train_twice(place: str) -> Attempt:
    """Start a second training in the folder of one that runs."""
    folder = Path(tempfile.mkdtemp(dir=place)) / "run"
    first = _train(folder, "--steps", "100000", stdout=subprocess.DEVNULL)
    try:
        _wait_for(lambda: (folder / FIRST).exists())
        before = _losses(folder)
        start = time.perf_counter()
        second = _train(folder, "--steps", "100000", "--resume", stderr=subprocess.PIPE)
        try:
            said = second.communicate(timeout=PATIENCE)[1]
        except subprocess.TimeoutExpired:
            said = ""
            _kill_tree(second)
        message = time.perf_counter() - start
        refused = second.returncode != 0 and "another training writes into" in said
        steps = len(_losses(folder))
        recovery = _wait_for(lambda: len(_losses(folder)) > steps, PATIENCE)
        _wait_for(lambda: len(_losses(folder)) >= len(before) + MORE, PATIENCE)
    finally:
        _kill_tree(first)
    losses = _losses(folder)
    whole = [step for step, _ in losses] == list(range(1, len(losses) + 1))
    return Attempt(recovery, message, refused and whole and losses[: len(before)] == before)


def _wait_for(condition: Callable[[], bool], patience: float = math.inf) -> float:
    """Return the seconds until the condition holds.

    Raises:
        AssertionError: It does not hold within ``patience`` seconds.
    """
    start = time.perf_counter()
    while not condition():
        assert time.perf_counter() - start < patience, f"it is stuck for {patience:g} s"
        time.sleep(0.01)
    return time.perf_counter() - start


def _losses(folder: Path) -> list[tuple[int, float]]:
    """Return the steps and losses that a training has written. The last line may be incomplete."""
    lines = (folder / "losses.jsonl").read_text().split("\n")[:-1]
    return [(values["step"], values["loss"]) for values in map(json.loads, lines)]


def _kill_tree(process: subprocess.Popen[str]) -> None:
    parent = psutil.Process(process.pid)
    # The parent first: one that lives sees the end of its compiler, and removes its lock.
    for one in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate()


def _train(
    folder: Path, *more: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """Start a training of two ranks in a folder."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--tokens", "256", "--every", str(EVERY), "--checkpoint", str(folder), "--json", *more]
    return subprocess.Popen(
        [*torchrun, "-m", "lab", "train", "tiny", *words], stdout=stdout, stderr=stderr, text=True
    )


# ---- a lock that a killed process has left -------------------------------------------------------------

BUILD = """
import sys
from torch.utils.cpp_extension import load
from lab.techniques.deepspeed import build_folder
with build_folder():
    load("operator", [sys.argv[1]], is_python_module=False)
"""
"""Compiles in the folder in which DeepSpeed's operator is compiled, which takes half a minute itself."""

SOURCE = '#include <regex>\nbool empty(const char *text) { return std::regex_match(text, std::regex("")); }\n'


def _compile_twice(place: str) -> Attempt:
    """Kill a process that compiles, so that torch's lock stays, and compile again."""
    folder = Path(tempfile.mkdtemp(dir=place))
    (folder / "operator.cpp").write_text(SOURCE)
    killed = _compile(folder)
    _wait_for(lambda: any(folder.rglob("operator/lock")))
    _kill_tree(killed)
    assert any(folder.rglob("operator/lock")), "the process that was killed has left no lock"
    start = time.perf_counter()
    again, ended = _compile(folder), False
    try:
        ended = again.wait(PATIENCE) == 0
    except subprocess.TimeoutExpired:
        _kill_tree(again)
    return Attempt(time.perf_counter() - start, unbroken=ended)


def _compile(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(folder / "operator.cpp")],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(folder)},
        stderr=subprocess.DEVNULL,
        text=True,
    )


CAUSES: dict[str, Callable[[Cluster], float]] = {
    "a rank raises": partial(_raised, _one_raises),
    "a rank raises, another is stuck": partial(_raised, _one_sticks),
    "a rank runs out of memory": _runs_out,
    "a rank is killed": partial(_raised, _one_dies),
    "all ranks hang": lambda cluster: _raised(_all_hang, cluster) + TIMEOUT,
    "stopped in a step": _stopped,
}
FAULTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Attempt]]] = {
    **{
        fault: (partial(Cluster, ranks=RANKS, timeout=TIMEOUT), partial(_on_ranks, cause))
        for fault, cause in CAUSES.items()
    },
    "the owner is killed": (nullcontext, _kill_owner),
    "training is killed": (tempfile.TemporaryDirectory, _kill_and_resume),
    "a stale lock": (tempfile.TemporaryDirectory, _compile_twice),
    "two trainings in one folder": (tempfile.TemporaryDirectory, _train_twice),
}
"""What is around all attempts, and the function that causes the fault once in it."""
