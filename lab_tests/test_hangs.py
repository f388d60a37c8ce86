"""Hangs outside of collectives: ranks that wait for ever are reported, ranks that make progress are not."""

import fcntl
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from cluster import hangs, stacks
from cluster.errors import HANG, STUCK, RankError
from cluster.hangs import LATER, LOOKS, HangWatch
from cluster.ranks import Cluster
from cluster.stacks import ASK, StackReport
from cluster.waiting import Call
from cluster.work import Work, work_so_far
from lab_tests.support.on_ranks import IN_TIME, in_time, wait_until

TIMEOUT = 100.0


@dataclass
class Ranks:
    """Ranks 1 and 3 of a call, by stand-ins: a clock, and the reports that they send when they are asked.

    Attributes:
        reports: What each rank reports next.
        change: Called as `change(self, number)` before report `number`.
        now: The time of the clock.
    """

    reports: dict[int, StackReport]
    change: Callable[["Ranks", int], None]
    now: float = 0.0

    def __post_init__(self) -> None:
        self.call = Call("c", [1, 3], None)
        self.call.heard = 0.0
        self.asked = 0

    def ask(self, ranks: Iterable[int], number: signal.Signals) -> None:
        assert number == ASK
        self.change(self, self.asked)
        self.asked += 1
        self.call.stacks.update({rank: self.reports[rank] for rank in ranks if rank in self.reports})

    def work(self, rank: int, **more: float) -> None:
        """Let `rank` report so much more work."""
        before = self.reports[rank].work
        now = Work(before.seconds + more.get("seconds", 0.0), before.disk + int(more.get("disk", 0)))
        self.reports[rank] = replace(self.reports[rank], work=now)


BARRIER = StackReport("barrier", "train", "a.py:7", "in a barrier")
LOCK = StackReport("", "read", "a.py:5", "in flock")
# The processor time between two reports, in seconds, of a rank that takes 2% of a core and of one that takes
# 0.5%, which is what the engine and a loop that looks for a file take.
BETWEEN = LATER * TIMEOUT / LOOKS
WORKING, POLLING = 0.02 * BETWEEN, 0.005 * BETWEEN


def lose_the_report(ranks: Ranks, number: int) -> None:
    if number > 0:
        ranks.reports.pop(3, None)


def answer(ranks: Ranks, number: int) -> None:
    ranks.call.answers[1] = b""
    if number == 0:
        ranks.call.heard = ranks.now


PROGRESS: dict[str, Callable[[Ranks, int], None]] = {
    "the stack changes": lambda ranks, n: ranks.reports.update({3: replace(LOCK, stack=str(n))}),
    "processor time": lambda ranks, n: ranks.work(3, seconds=WORKING),
    "a child process ends": lambda ranks, n: ranks.work(3, seconds=-WORKING),
    "a disk": lambda ranks, n: ranks.work(3, disk=1),
    "a record": lambda ranks, n: setattr(ranks.call, "heard", ranks.now),
    "no report": lose_the_report,
}
OUTSIDE = (STUCK, "rank 3: no rank has made progress for 125 s")
HANGS: dict[str, tuple[StackReport, Callable[[Ranks, int], None], tuple[str, str]]] = {
    "nothing": (LOCK, lambda ranks, n: None, OUTSIDE),
    "polling": (LOCK, lambda ranks, n: ranks.work(3, seconds=POLLING), OUTSIDE),
    "the other has answered": (LOCK, answer, OUTSIDE),
    "collectives alone": (BARRIER, lambda ranks, n: None, ("Hang", f"rank 1: {HANG} for 100 s")),
}
"""Where rank 3 is, what changes, and the kind and message of the hang."""


def watch(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> tuple[float, str, str] | None:
    """Return when a hang is found within 100 timeouts, its kind and its message."""
    clock = SimpleNamespace(monotonic=lambda: ranks.now, time=lambda: ranks.now)
    monkeypatch.setattr(hangs, "time", clock)
    watch = HangWatch(ranks.call, TIMEOUT, ranks.ask)
    while ranks.now < 100 * TIMEOUT:
        ranks.now += 0.5
        failure = watch.look()
        if failure is not None:
            return ranks.now, failure.kind, f"rank {failure.rank}: {failure.message}"
    return None


@pytest.mark.parametrize("name", PROGRESS)
def test_a_rank_that_makes_progress_is_never_given_up(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert watch(monkeypatch, Ranks({1: BARRIER, 3: LOCK}, PROGRESS[name])) is None


@pytest.mark.parametrize("name", HANGS)
def test_ranks_that_only_wait_are_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    report, change, hang = HANGS[name]
    when, *found = watch(monkeypatch, Ranks({1: BARRIER, 3: report}, change))
    assert LATER * TIMEOUT < when < 2 * LATER * TIMEOUT
    assert tuple(found) == hang


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_the_work_of_threads_and_of_children_counts() -> None:
    """In processor time, which the load of the machine does not change."""
    code = "import time\nwhile time.process_time() < 0.4: pass"
    before = work_so_far().seconds
    thread = threading.Thread(target=burn, args=(0.4,))
    thread.start()
    thread.join()
    after = work_so_far().seconds
    assert 0.3 < after - before < 1
    with subprocess.Popen([sys.executable, "-c", code + "\ninput()"], stdin=subprocess.PIPE) as child:
        wait_until(lambda: work_so_far().seconds - after >= 0.35, "the work of the child", seconds=60)
        running = work_so_far().seconds
        child.communicate(b"\n")
    assert 0.3 < running - after < 1
    assert work_so_far().seconds > after + 0.3, "of children that have ended, too"


def test_the_work_of_polling_threads_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks that other tests have started may work now.
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [])
    polled, done = threading.Event(), threading.Event()

    def poll() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        burn(0.4)
        polled.set()
        done.wait()

    before = work_so_far().seconds
    thread = threading.Thread(target=poll)
    thread.start()
    try:
        polled.wait()
        assert work_so_far().seconds - before < 0.2
    finally:
        done.set()
        thread.join()


# ---- with ranks --------------------------------------------------------------------------------------------


def wait_for_a_lock(path: Path) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(hours=1))
    if dist.get_rank() == 0:
        with (path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    dist.barrier(group=group)


def wait_for_a_thread_or_a_peer(path: Path) -> None:
    if dist.get_rank() == 0:
        threading.Event().wait()
    else:
        ends = socket.socketpair()
        ends[0].recv(1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wait", "lines", "other"),
    [
        (wait_for_a_lock, ("fcntl.flock(file, fcntl.LOCK_EX)", "dist.barrier(group=group)"),
         r"in barrier, at test_hangs\.py:\d+ in wait_for_a_lock"),
        (wait_for_a_thread_or_a_peer, ("threading.Event().wait()", "ends[0].recv(1)"),
         r"in wait_for_a_thread_or_a_peer \(test_hangs\.py:\d+\)"),
    ],
    ids=["lock", "no collective"],
)  # fmt: skip
def test_ranks_that_wait_are_named(
    impatient: Cluster, tmp_path: Path, wait: Callable[[Path], None], lines: tuple[str, str], other: str
) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with in_time(), pytest.raises(RankError) as caught:
            impatient.apply(wait, tmp_path)
    first, others, *_ = str(caught.value).split("\n\n")
    place = rf"{wait.__name__} \(test_hangs\.py:\d+\)"
    assert re.fullmatch(rf"rank 0 waits in {place}: no rank has made progress for 2\.5 s", first)
    assert re.fullmatch(f"rank 1 still waiting, {other}", others)
    assert all(line in caught.value.stacks[rank] for rank, line in enumerate(lines))
    assert str(caught.value).endswith("cluster.recover() restarts the ranks")
    assert impatient.broken
    impatient.recover()
    assert impatient.apply(dist.get_rank) == [0, 1]


SECONDS = 7.0
# Takes a fifth of a core.
COMPILE = f"""
import time
end = time.monotonic() + {SECONDS}
while time.monotonic() < end:
    start = time.process_time()
    while time.process_time() < start + 0.01:
        pass
    time.sleep(0.04)
"""


def run_a_compiler() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(hours=1))
    if dist.get_rank() == 1:
        subprocess.run([sys.executable, "-c", COMPILE], check=True)
    dist.barrier(group=group)


def print_now_and_then() -> None:
    if dist.get_rank() == 1:
        for number in range(int(SECONDS)):
            time.sleep((print(number, flush=True), 1.0)[1])  # in one line, so that the stack stays the same


def work_at_one_place() -> None:
    end, turns, more = time.monotonic() + SECONDS, 0, torch.ones(1)
    while more.item():
        turns += 1
        more.fill_(float(time.monotonic() < end))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
    assert turns > 100


@pytest.mark.long
@pytest.mark.parametrize(
    "work",
    [run_a_compiler, print_now_and_then, work_at_one_place],
    ids=["a child process", "output", "one place"],
)
def test_ranks_that_make_progress_go_on(impatient: Cluster, work: Callable[[], None]) -> None:
    assert impatient.timeout == 2
    assert 2 * LATER * impatient.timeout < SECONDS
    assert impatient.apply(work) == [None, None]


class Kept:
    """An object that a function holds in a local variable."""


def test_a_report_keeps_no_local_variable_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, publishing, published = threading.Event(), threading.Event(), threading.Event()
    signals = iter([asked.wait, sys.exit])

    def publish(_: object) -> None:
        publishing.set()
        assert published.wait(IN_TIME)

    def answer_once() -> None:
        with suppress(SystemExit):
            stacks._answer()

    monkeypatch.setattr(signal, "sigwait", lambda _: next(signals)())
    monkeypatch.setattr(stacks, "publish", publish)
    answering = threading.Thread(target=answer_once)
    answering.start()

    def step() -> weakref.ref[Kept]:
        kept = Kept()
        asked.set()
        assert publishing.wait(IN_TIME)
        return weakref.ref(kept)

    left = step()
    alive = left() is not None
    published.set()
    answering.join()
    assert not alive
