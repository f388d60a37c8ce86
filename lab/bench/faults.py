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
from importlib import import_module
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

PATIENCE = 120.0
"""Seconds after which a process that does not come to an end, or makes no step, is stuck."""


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
    rows = [_on_ranks(fault, cause, times, say) for fault, cause in CAUSES.items()]
    return [
        *rows,
        _owner_killed(times, say),
        _training_killed(times, say),
        _stale_lock(times, say),
        _two_trainings(times, say),
    ]


def _on_ranks(fault: str, cause: Callable[[Cluster], float], times: int, say: Say) -> Row:
    message, recovery = [], []
    with _count_processes() as left:
        with Cluster(ranks=RANKS, timeout=TIMEOUT) as cluster:
            for number in range(times):
                say(f"{fault}: {number + 1} of {times}")
                # A new rank needs seconds for it, and a stop does not interrupt an import.
                cluster.apply(import_module, __name__)
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
    _kill_tree(killed)
    before = _losses(folder)
    start = time.perf_counter()
    resumed = _launch(*words, "--steps", str(len(before) + MORE), "--resume")
    assert resumed.stdout is not None
    resumed.stdout.readline()
    seconds = time.perf_counter() - start
    resumed.communicate()
    losses = _losses(folder)
    return seconds, len(losses) == len(before) + MORE and losses[: len(before)] == before


def _two_trainings(times: int, say: Say) -> Row:
    """Start a second training in the folder of one that runs."""
    fault, message, recovery, whole = "two trainings in one folder", [], [], 0
    with _count_processes() as left:
        for number in range(times):
            say(f"{fault}: {number + 1} of {times}")
            with tempfile.TemporaryDirectory() as folder:
                refused, next_step, same = _train_twice(Path(folder) / "run")
            message.append(refused)
            recovery.append(next_step)
            whole += same
        row = _row(fault, times, message, recovery, left())
    return {**row, "unbroken": f"{whole} of {times}"}


def _train_twice(folder: Path) -> tuple[float, float, bool]:
    """Return the seconds to the second's end and to the first's next step, and whether all went well."""
    words = ["tiny", "--tokens", "256", "--every", str(EVERY), "--checkpoint", str(folder), "--json"]
    first = _launch(*words, "--steps", "100000", stdout=subprocess.DEVNULL)
    try:
        while not (folder / f"step-{EVERY:08d}").exists():
            time.sleep(0.05)
        before = _losses(folder)
        start = time.perf_counter()
        second = _launch(*words, "--steps", "100000", "--resume", stderr=subprocess.PIPE)
        try:
            said = second.communicate(timeout=PATIENCE)[1]
        except subprocess.TimeoutExpired:
            said = ""
            _kill_tree(second)
        message = time.perf_counter() - start
        refused = second.returncode != 0 and "another training writes into" in said
        recovery = _wait_for_step(folder, len(_losses(folder)) + 1)
        _wait_for_step(folder, len(before) + MORE)
    finally:
        _kill_tree(first)
    losses = _losses(folder)
    whole = [step for step, _ in losses] == list(range(1, len(losses) + 1))
    return message, recovery, refused and whole and losses[: len(before)] == before


def _wait_for_step(folder: Path, step: int) -> float:
    """Return the seconds until a training has made that step.

    Raises:
        AssertionError: It makes no such step within ``PATIENCE`` seconds.
    """
    start = time.perf_counter()
    while len(_losses(folder)) < step:
        if time.perf_counter() - start > PATIENCE:
            raise AssertionError(f"step {step} is not made within {PATIENCE:g} s")
        time.sleep(0.05)
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


def _launch(
    *words: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "-m", "lab", "train", *words], stdout=stdout, stderr=stderr, text=True
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


def _stale_lock(times: int, say: Say) -> Row:
    """Kill a process that compiles, so that torch's lock stays, and compile again."""
    fault, recovery, ended = "a stale lock", [], 0
    with _count_processes() as left:
        for number in range(times):
            say(f"{fault}: {number + 1} of {times}")
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "operator.cpp"
                source.write_text(SOURCE)
                killed = _compile(source)
                while not list(Path(folder).rglob("operator/lock")):
                    time.sleep(0.01)
                _kill_tree(killed)
                if not list(Path(folder).rglob("operator/lock")):
                    raise AssertionError("the process that was killed has left no lock")
                start = time.perf_counter()
                again = _compile(source)
                try:
                    ended += again.wait(PATIENCE) == 0
                except subprocess.TimeoutExpired:
                    _kill_tree(again)
                recovery.append(time.perf_counter() - start)
        row = _row(fault, times, [], recovery, left())
    return {**row, "unbroken": f"{ended} of {times}"}


def _compile(source: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(source)],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(source.parent)},
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
