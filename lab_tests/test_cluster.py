"""The cluster: ranks and engines, results and records, failures, and the processes that remain."""

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq
from torch.distributed.device_mesh import init_device_mesh

from cluster import host, remote, waiting, watchdog
from cluster.calling import Caller
from cluster.client import AnswerMessage, RecordMessage
from cluster.errors import ClusterError, Failure, RankError, Stopped
from cluster.forks import ForkedProcess
from cluster.live import Stamp, publish
from cluster.network import LOOPBACK, reserved_ports
from cluster.processes import family
from cluster.ranks import Cluster
from cluster.waiting import TICK_SECONDS, Call
from lab_tests.support.long_run import mostly_long
from lab_tests.support.on_ranks import (
    IN_TIME,
    describe_rank,
    end_on,
    in_time,
    no_process_left,
    pids,
    raise_on,
    ranks_kept,
    sums,
    wait_until,
)
from lab_tests.support.refusing import enter_all


def publish_slowly(count: int, pause: float) -> float:
    for index in range(count):
        publish({"index": index, "square": (index + dist.get_rank()) ** 2})
        time.sleep(pause)
    return time.time()


def publish_many(count: int) -> None:
    for index in range(count):
        publish(index)


def leave_a_sampler(seconds: float) -> None:
    def sample() -> None:
        end = time.time() + seconds
        while time.time() < end:
            publish("from the run before")
            time.sleep(0.01)

    threading.Thread(target=sample, daemon=True).start()


def publish_one(pause: float) -> None:
    time.sleep(pause)
    publish("own")


@pytest.fixture
def ready(ranks4: Cluster) -> Cluster:
    """Ranks that have imported this module, which takes new ones seconds: a stop waits for its end."""
    ranks4.apply(import_module, __name__)
    return ranks4


def fail_while_one_sleeps(culprit: int, sleeper: int) -> None:
    if dist.get_rank() == sleeper:
        time.sleep(600)
    raise_on(culprit)


def fail_while_one_waits_for(file: Path, culprit: int, waiter: int) -> None:
    while dist.get_rank() == waiter and not file.exists():
        time.sleep(0.02)
    raise_on(culprit)


def mismatched(own_group: bool) -> None:
    group = dist.new_group(timeout=timedelta(hours=1)) if own_group else None
    if dist.get_rank() == 0:
        dist.barrier(group=group)
    else:
        dist.broadcast(torch.ones(3), src=0, group=group)
        dist.all_reduce(torch.ones(5), group=group)


def work_together() -> None:
    while True:
        publish("worked")
        dist.all_reduce(torch.ones(7))


def sleep_through_interrupts(sleeper: int) -> None:
    while dist.get_rank() == sleeper:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)
    time.sleep(600)


def fail_one_after_another(order: list[int]) -> None:
    dist.barrier()
    time.sleep(0.15 * order.index(dist.get_rank()))
    raise LookupError(f"place {order.index(dist.get_rank())}")


def test_rank_is_engine_id_and_threads_are_shared_out(ranks4: Cluster) -> None:
    found = ranks4.apply(describe_rank)
    threads = max(1, len(host.own_cores()) // 4)
    assert [f["engine"] for f in found] == [f["rank"] for f in found] == [0, 1, 2, 3]
    assert {f["ranks"] for f in found} == {ranks4.ranks} == {4}
    assert {f["threads"] for f in found} == {threads}
    assert {f["variables"]["OMP_NUM_THREADS"] for f in found} == {str(threads)}
    launched = ranks4._caller.engines._cluster.engine_set.launchers
    assert {str(f["rank"]): f["pid"] for f in found} == {name: e.pid for name, e in launched.items()}
    assert len({f["pid"] for f in found} | {os.getpid()}) == 5
    if ranks4.device_type == "cpu":
        assert {f["backend"] for f in found} == {"gloo"}


def test_a_rank_collects_garbage_unless_it_was_told_not_to(ranks4: Cluster) -> None:
    assert ranks4.apply(gc.isenabled) == [True] * 4
    ranks4.apply(gc.disable)
    assert ranks4.apply(gc.isenabled) == [False] * 4
    ranks4.apply(gc.enable)


def test_records_arrive_while_the_call_blocks(ranks4: Cluster) -> None:
    arrivals: list[tuple[int, dict[str, int], float, int]] = []

    def note(rank: int, record: dict[str, int]) -> None:
        arrivals.append((rank, record, time.time(), threading.get_ident()))

    ended = ranks4.apply(publish_slowly, 5, 0.1, on_record=note)
    for rank in range(4):
        own = [a for a in arrivals if a[0] == rank]
        assert [a[1] for a in own] == [{"index": i, "square": (i + rank) ** 2} for i in range(5)]
        assert own[0][2] < ended[rank] - 0.3
    assert {a[3] for a in arrivals} == {threading.get_ident()}


def test_every_record_is_there_when_the_call_returns(ranks4: Cluster) -> None:
    got: dict[int, list[int]] = {rank: [] for rank in range(4)}
    ranks4.apply(publish_many, 211, on_record=lambda rank, record: got[rank].append(record))
    assert got == {rank: list(range(211)) for rank in range(4)}


def test_a_record_is_not_credited_to_the_next_run(ranks4: Cluster) -> None:
    early: list[str] = []
    ranks4.apply(leave_a_sampler, 0.6, on_record=lambda rank, record: early.append(record))
    late: list[str] = []
    ranks4.apply(publish_one, 0.2, on_record=lambda rank, record: late.append(record))
    assert late == ["own"] * 4


def test_what_an_earlier_run_sent_is_ignored() -> None:
    got: list[str] = []
    run = Call("now", [3], lambda rank, record: got.append(record))
    inbox: SimpleQueue[RecordMessage | AnswerMessage] = SimpleQueue()
    for stamp, record in [
        (Stamp("then", 3), "old"),
        (Stamp("then", 3, end=True), None),
        (Stamp("now", 3), "new"),
    ]:
        inbox.put(RecordMessage(cloudpickle.dumps((stamp, record))))
    assert not run.wait(inbox, lambda: bool(run.ended), 0.2)
    assert got == ["new"]


def test_publish_elsewhere_does_nothing() -> None:
    publish(object())


def test_an_error_in_on_record_reaches_the_caller(ranks4: Cluster) -> None:
    def refuse(rank: int, record: Any) -> None:
        raise BufferError(f"{record}")

    with ranks_kept(ranks4), pytest.raises(BufferError, match="own"):
        ranks4.apply(publish_one, 0.0, on_record=refuse)


def test_an_error_in_on_record_after_a_failure_leaves_the_ranks_whole(
    ranks4: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record may come after the failure of its rank."""

    def refuse(*_: Any) -> bool:
        raise BufferError("late")

    with ranks_kept(ranks4), monkeypatch.context() as patched:
        patched.setattr(Caller, "wait_for_records", refuse)
        with pytest.raises(BufferError, match="late"):
            ranks4.apply(raise_on, 1, on_record=refuse)


def test_the_earliest_failure_is_the_cause(ranks4: Cluster) -> None:
    with (
        ranks_kept(ranks4),
        pytest.raises(RankError, match=r"^rank 2 failed first: LookupError: place 0") as caught,
    ):
        ranks4.apply(fail_one_after_another, [2, 0, 3, 1])
    assert caught.value.victims == (0, 3, 1)
    assert caught.value.waiting == ()
    assert "rank 1 failed after it" in str(caught.value)


def test_failing_rank_is_named_and_frees_those_that_wait_for_it(ranks4: Cluster) -> None:
    before = pids(ranks4)
    with in_time(), pytest.raises(RankError) as caught:
        ranks4.apply(raise_on, 2)
    text = str(caught.value)
    assert text.splitlines()[0] == "rank 2 failed first: ArithmeticError: 7 is not 11"
    assert 'raise ArithmeticError("7 is not 11")' in text
    assert "remote.py" not in text
    assert re.search(
        r"ranks 0, 1, 3 failed after it, in barrier, at on_ranks\.py:\d+ in raise_on: a peer left",
        text,
    )
    assert text.splitlines() == caught.value._render_traceback_()
    assert set(caught.value.victims) == {0, 1, 3}
    assert isinstance(caught.value.cause, ArithmeticError)

    assert sums(ranks4)
    caught.value.recover()
    assert sums(ranks4)
    assert pids(ranks4) == before, "no rank needed a restart"


@pytest.mark.long
def test_a_stuck_rank_is_found_and_recover_replaces_it(impatient: Cluster) -> None:
    with in_time(), pytest.raises(RankError, match=r"^rank 0 failed first: ArithmeticError") as caught:
        impatient.apply(fail_while_one_sleeps, 0, 1)
    assert 1 in caught.value.waiting
    assert re.search(
        r"rank 1 still waiting, in fail_while_one_sleeps \(test_cluster\.py:\d+\)", str(caught.value)
    )
    assert "time.sleep(600)" in caught.value.stacks[1]
    assert str(caught.value).endswith("cluster.recover() restarts the ranks")

    assert impatient.broken
    with pytest.raises(ClusterError, match=r"rank.* 1 did not come back.*cluster\.recover\(\)"):
        pids(impatient)

    with in_time():
        caught.value.recover()
    assert [f["engine"] for f in impatient.apply(describe_rank)] == [0, 1]
    assert sums(impatient)


def test_a_rank_that_was_only_slow_serves_the_next_call(ranks4: Cluster, tmp_path: Path) -> None:
    """On a busy machine a rank may need seconds more than the peers that failed."""
    before = pids(ranks4)
    file = tmp_path / "go on"
    with pytest.raises(RankError, match=r"^rank 0 failed first") as caught:
        ranks4.apply(fail_while_one_waits_for, file, 0, 3)
    assert 3 in caught.value.waiting
    assert ranks4.broken
    threading.Timer(0.5, file.touch).start()
    assert sums(ranks4)
    assert not ranks4.broken
    assert pids(ranks4) == before, "no rank needed a restart"


@pytest.mark.long
@pytest.mark.parametrize("tick", [TICK_SECONDS, 60])
def test_the_wait_for_a_slow_rank_is_stopped_from_another_thread(
    impatient: Cluster, tick: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the stop was lost where the rank answered it before the caller looked again."""
    before = pids(impatient)
    with pytest.raises(RankError, match=r"^rank 0 failed first"):
        impatient.apply(fail_while_one_sleeps, 0, 1)
    monkeypatch.setattr(waiting, "TICK_SECONDS", tick)
    threading.Timer(0.5, impatient.interrupt).start()
    with in_time(), pytest.raises(Stopped):
        impatient.apply(os.getpid)
    assert pids(impatient) == before, "the sleeping rank was interrupted"


@pytest.mark.long
@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_in_the_wait_for_a_slow_rank_lets_the_next_call_run(impatient: Cluster) -> None:
    """Seen red: the next call was told to recover, and after Ctrl-C in any other wait it is not."""
    with pytest.raises(RankError, match=r"^rank 0 failed first"):
        impatient.apply(fail_while_one_sleeps, 0, 1)
    threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        impatient.apply(os.getpid)
    assert sums(impatient)


@pytest.mark.long
def test_a_dead_rank_is_named_and_recover_replaces_it(
    impatient: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_late(process: ForkedProcess, code: int | None, end: Any = ForkedProcess.end) -> None:
        time.sleep(0.4)
        end(process, code)

    # Seen red: on a busy machine the nanny's word arrives before the exit code does.
    monkeypatch.setattr(ForkedProcess, "end", end_late)
    with in_time(), pytest.raises(RankError, match=r"^rank 1 failed first: .*ended \(exit code 87\)"):
        impatient.apply(end_on, 1)
    with pytest.raises(ClusterError, match=r"process of rank 1 ended.*recover"):
        pids(impatient)

    impatient.recover()
    os.kill(pids(impatient)[0], signal.SIGKILL)
    wait_until(impatient._caller.engines.missing, "the word that the rank has ended")
    with pytest.raises(ClusterError, match=r"rank 0 ended since the last call.*recover"):
        pids(impatient)
    assert impatient.broken
    impatient.recover()


def make_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group([0, 1, 2, 3])
    return threads_of_gloo()


def threads_of_gloo() -> int:
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return sum("gloo" in name.read_text() for name in names)


def test_process_groups_end_with_the_call_that_made_them(ranks4: Cluster) -> None:
    ranks4.apply(os.getpid)
    before = ranks4.apply(threads_of_gloo)
    during = ranks4.apply(make_groups, 7)
    assert all(d >= b + 7 for b, d in zip(before, during, strict=True))
    assert ranks4.apply(threads_of_gloo) == before
    assert sums(ranks4)


def test_a_call_that_is_not_answered_in_time_is_an_error(ranks4: Cluster) -> None:
    with ranks_kept(ranks4), pytest.raises(ClusterError, match=r"no answer within 0\.3 s from ranks 0-3"):
        ranks4.apply(time.sleep, 0.9, answer_timeout=0.3)


@pytest.mark.usefixtures("_interruptible")
def test_a_kernels_interrupt_ends_the_call_on_the_ranks(ready: Cluster) -> None:
    before, got = pids(ready), list[str]()
    threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
    with in_time(), pytest.raises(KeyboardInterrupt):
        ready.apply(work_together, on_record=lambda rank, record: got.append(record))
    assert got
    assert sums(ready)
    assert pids(ready) == before, "no rank needed a restart"


def test_a_call_is_stopped_from_another_thread(ranks4: Cluster) -> None:
    ranks4.interrupt()  # with nothing to end
    threading.Timer(0.3, ranks4.interrupt).start()
    with in_time(), pytest.raises(Stopped):
        ranks4.apply(time.sleep, 600)
    assert sums(ranks4)


@pytest.mark.long
def test_a_rank_that_no_stop_reaches_is_restarted_by_the_next_call(impatient: Cluster) -> None:
    threading.Timer(0.3, impatient.interrupt).start()
    with pytest.raises(Stopped):
        impatient.apply(sleep_through_interrupts, 1)
    assert impatient.broken
    assert sums(impatient)
    assert not impatient.broken


def import_slowly(folder: str) -> None:
    sys.path.insert(0, folder)
    import slow_module  # type: ignore[import-not-found]

    while slow_module.whole:
        time.sleep(0.01)


@pytest.mark.long
def test_a_stop_does_not_leave_a_module_half_imported(ready: Cluster, tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import time\nfor _ in range(100): time.sleep(0.01)\nwhole = True"
    )
    threading.Timer(0.4, ready.interrupt).start()
    with pytest.raises(Stopped):
        ready.apply(import_slowly, str(tmp_path))
    assert ready.apply(lambda: sys.modules["slow_module"].whole) == [True] * 4


class Closing:
    """A block that takes two seconds to end."""

    ended = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for _ in range(200):
            time.sleep(0.01)
        Closing.ended = True


def close_slowly() -> None:
    with Closing():
        sys.modules["closing"] = Closing  # type: ignore[assignment]
    time.sleep(600)


@pytest.mark.long
def test_a_stop_does_not_cut_the_end_of_a_block(ready: Cluster) -> None:
    threading.Timer(0.4, ready.interrupt).start()
    with pytest.raises(Stopped):
        ready.apply(close_slowly)
    assert ready.apply(lambda: sys.modules.pop("closing").ended) == [True] * 4


def fail_half_open() -> None:
    enter_all()
    raise LookupError("half open")


def a_gradient() -> list[float]:
    x = torch.full((2, 2), 3.0, requires_grad=True)
    (x @ x.sin()).float().sum().backward()
    assert x.grad is not None
    return [round(value, 3) for value in x.grad.flatten().tolist()]


def test_modes_that_a_failed_call_left_on_are_off_in_the_next(ranks4: Cluster) -> None:
    """That each of them alone is left is tested where torch's private names are."""
    before = ranks4.apply(a_gradient)
    with pytest.raises(RankError, match="half open"):
        ranks4.apply(fail_half_open)
    assert ranks4.apply(a_gradient) == before


@pytest.mark.parametrize(
    "own_group", mostly_long([False, True], 0), ids=["timeout of the group", "no timeout"]
)
def test_a_hang_ends_after_the_timeout_of_its_call_and_says_where_each_rank_is(
    ranks4: Cluster, own_group: bool
) -> None:
    began = time.monotonic()
    with in_time(), pytest.raises(RankError, match=r"^ranks 0-3 hang: a collective did not end") as caught:
        ranks4.apply(mismatched, own_group, timeout=2)
    assert time.monotonic() - began > 2
    text = str(caught.value)
    assert re.search(r"rank 0 .*in barrier, at test_cluster\.py:\d+ in mismatched", text)
    assert re.search(r"ranks? .*3.* in (broadcast|all_reduce), at test_cluster\.py:\d+ in mismatched", text)
    assert "dist.barrier(group=group)" in caught.value.stacks[0]
    assert "group=group)" in caught.value.stacks[3]
    assert ranks4.broken == own_group, "gloo's own timeout leaves the ranks usable"
    ranks4.recover()
    assert sums(ranks4)


def timeouts() -> list[float]:
    """Seconds, of the world's group, of one that new_group made and of one that a mesh made."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    groups = dist.group.WORLD, dist.new_group([0, 1, 2, 3]), mesh.get_group("columns")
    found = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    return [timeout.total_seconds() for timeout in found]


def test_a_calls_timeout_is_that_of_its_groups_and_of_no_other_call(ranks4: Cluster) -> None:
    assert ranks4.timeout == 60
    assert ranks4.apply(timeouts) == [[60.0] * 3] * 4
    assert ranks4.apply(timeouts, timeout=1234.5) == [[1234.5] * 3] * 4
    assert ranks4.apply(timeouts) == [[60.0] * 3] * 4


def test_nccls_collectives_have_more_time_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cluster(ranks=2).timeout == 60
    monkeypatch.setattr("cluster.ranks.visible_devices", lambda: ["0", "1"])  # stands in for torch's count
    assert Cluster(ranks=2).timeout == 600
    assert Cluster(ranks=2, timeout=7).timeout == 7


LONGEST = 30 * 24 * 3600


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0"), (-1.0, "-1"), (float("inf"), "inf"), (float("nan"), "nan"), (1e20, "1e+20"),
        (1e-4, "0.0001"), (LONGEST + 1, "2592001"), ("5", "'5'"), ([1], "[1]"), (True, "True"),
    ],
)  # fmt: skip
def test_a_timeout_that_cannot_work_is_refused(ranks4: Cluster, seconds: Any, shown: str) -> None:
    said = f"={shown}: it takes a number of seconds from 0.01 to 2592000, which is 30 days; 600 would work"
    for name, use in {
        "timeout": lambda: Cluster(ranks=2, timeout=seconds),
        "start_timeout": lambda: Cluster(ranks=2, start_timeout=seconds),
        " timeout": lambda: ranks4.apply(os.getpid, timeout=seconds),
        "answer_timeout": lambda: ranks4.apply(os.getpid, answer_timeout=seconds),
    }.items():
        with pytest.raises(ClusterError) as error:
            use()
        assert str(error.value) == name.strip() + said


def test_the_shortest_and_the_longest_timeout() -> None:
    for seconds in (0.01, LONGEST):
        assert Cluster(ranks=2, timeout=seconds, start_timeout=seconds).timeout == seconds


# ---- NCCL: the peers of a rank that fails wait in a kernel, which no Python code of theirs ends ------------


def one_raises_and_kernels_wait(culprit: int) -> None:
    """Stands in for NCCL's ranks: the others wait in a loop that takes no interrupt and that no peer ends."""
    if dist.get_rank() == culprit:
        publish(time.time())
        raise ArithmeticError("7 is not 11")
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(600)


def join_as_with_gpus(*args: Any) -> str:
    """Stands in for `remote.join` on a rank that has a GPU."""
    remote.join(*args)
    return "cuda"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Cluster]:
    cluster = Cluster(ranks=2)
    yield cluster
    cluster.stop()


@pytest.fixture
def as_with_gpus(two_ranks: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two ranks of which each says, when it joins, that it has a GPU."""
    monkeypatch.setattr("cluster.ranks.remote.join", join_as_with_gpus)
    return two_ranks if two_ranks.started else two_ranks.start()


@pytest.mark.long
def test_peers_that_wait_in_kernels_are_restarted_by_the_next_call(as_with_gpus: Cluster) -> None:
    assert (as_with_gpus.device_type, as_with_gpus.timeout) == ("cuda", 600)
    before, when = pids(as_with_gpus), list[Any]()
    with pytest.raises(RankError, match=r"^rank 1 failed first: ArithmeticError: 7 is not 11") as caught:
        as_with_gpus.apply(one_raises_and_kernels_wait, 1, on_record=lambda _, record: when.append(record))
    assert time.time() - when[0] < IN_TIME, "on gloo it takes two seconds"
    assert caught.value.waiting == (0,)
    assert str(caught.value).endswith("the next call restarts the ranks")
    assert as_with_gpus.broken
    assert not set(pids(as_with_gpus)) & set(before)
    assert not as_with_gpus.broken


def lose_the_device() -> None:
    """Stands in for an error in a CUDA kernel: from then on each call of CUDA fails in this process."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.set_num_threads = fail  # which a rank calls when it joins
    fail()


@pytest.mark.long
def test_ranks_that_all_lost_their_devices_are_restarted_by_the_next_call(as_with_gpus: Cluster) -> None:
    before = pids(as_with_gpus)
    with pytest.raises(RankError, match="illegal memory access") as caught:
        as_with_gpus.apply(lose_the_device)
    assert caught.value.waiting == ()
    assert not set(pids(as_with_gpus)) & set(before)
    assert not as_with_gpus.broken
    with pytest.raises(RankError, match="illegal memory access"):
        as_with_gpus.apply(lose_the_device)
    as_with_gpus.recover()
    assert len(pids(as_with_gpus)) == 2


@pytest.mark.long
def test_ranks_on_cpus_that_cannot_join_again_are_restarted_by_recover(impatient: Cluster) -> None:
    before = pids(impatient)
    with pytest.raises(RankError, match="illegal memory access") as caught:
        impatient.apply(lose_the_device)
    assert caught.value.waiting == ()
    with pytest.raises(ClusterError, match=r"again: RuntimeError: CUDA error: .*; cluster.recover\(\)"):
        pids(impatient)
    assert impatient.broken
    impatient.recover()
    assert not set(pids(impatient)) & set(before)
    assert not impatient.broken


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_that_failed_aborts_nccls_communicators(
    alone: None, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """Torch's two ways out, and what it calls NCCL's backend, by stand-ins."""
    taken: list[str] = []
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)  # whose caches are not meant
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: taken.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: taken.append("abort"))
    remote.leave(failed=failed)
    assert taken == ["abort" if failed else "destroy"]


@pytest.mark.parametrize("ranks", [0, -2, 2.5, True, "4"])
def test_ranks_must_be_a_whole_number(ranks: Any) -> None:
    with pytest.raises(ClusterError, match="ranks="):
        Cluster(ranks=ranks)


def test_a_cluster_that_is_not_started_says_so() -> None:
    with pytest.raises(ClusterError, match=r"cluster\.start\(\)"):
        Cluster(ranks=2).apply(os.getpid)


@pytest.mark.long
def test_nothing_is_left_after_an_error_with_a_stuck_rank() -> None:
    with no_process_left(), contextlib.suppress(ZeroDivisionError), Cluster(ranks=2) as cluster:
        directory = cluster._caller.engines.directory
        assert directory.exists()
        with pytest.raises(RankError):
            cluster.apply(fail_while_one_sleeps, 1, 0)
        raise ZeroDivisionError
    assert not directory.exists()


SHADOWS = ("cluster", "random", "json", "secrets", "torch", "numpy", "zmq", "watchdog")


def test_files_beside_a_notebook_hide_no_module_from_the_ranks(tmp_path: Path) -> None:
    """With ranks that are forks, and with those that are programs of their own."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('hides a module')")
    (tmp_path / "own.py").write_text("value = 3")
    code = """
import sys
from lab import Cluster
sys.path.insert(0, "")
for profile in ("local", "node8"):
    with Cluster(ranks=2, profile=profile) as cluster:
        print(cluster.apply(lambda: (__import__("own").value, len(__import__("random").__all__) > 9)))
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["[(3, True), (3, True)]"] * 2, done.stderr


def test_a_file_that_hides_the_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.py").touch()
    command = [sys.executable, "-c", "import lab"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = f"ImportError: {tmp_path}/cluster.py hides the lab's package `cluster`: rename that file"
    assert done.stderr.splitlines()[-1] == said


def test_folders_beside_a_notebook_hide_no_package(tmp_path: Path) -> None:
    """A folder that is no package comes before an editable installation's finder, and after its path."""
    for name in ("lab", "cluster"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", "import lab; print(lab.LabError.__name__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "LabError\n", f"{done.stderr}\nAn older installation: run pip install -e . again"


def test_what_the_controller_writes_is_private_at_once(tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text("open('key', 'w').close()")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(watchdog.watched("writes"), cwd=tmp_path, check=True, umask=0o022, env=variables)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_the_controller_listens_on_ports_that_are_kept_for_it(ranks4: Cluster) -> None:
    """A part of it that lost its port to another process ended in silence, and the start took a minute.

    Seen red: without the reservation, and with one port less.
    """
    cluster = ranks4._caller.engines._cluster
    connections = [one for process in family([cluster.controller.pid]) for one in process.net_connections()]
    used = [one for one in connections if one.status == psutil.CONN_LISTEN]
    argument = next(one for one in cluster.controller_args if one.startswith("--IPController.ports="))
    assert {str(connection.laddr.port) for connection in used} == {*argument.split("=")[1].split(",")}


def test_a_reserved_port_is_given_to_its_server_alone() -> None:
    with reserved_ports(2) as [first, second], zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, first))
        server.bind(f"tcp://{LOOPBACK}:{first}")
        with socket.create_connection((LOOPBACK, first)), pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, second))


def test_a_rank_whose_peer_left_was_not_first_however_it_says_so() -> None:
    said = (
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:34732. GLHF!",
        "Read error: Connection reset by peer",
    )
    failures = [Failure(rank, "RuntimeError", text, "", 1.0, "barrier") for rank, text in enumerate(said)]
    failures.append(Failure(5, "RuntimeError", "Timed out waiting 2000ms for recv", "", 1.5, "broadcast"))
    text = str(RankError(failures))
    assert text.startswith("ranks 0, 1, 5 hang")
    assert "ranks 0, 1 failed after it, in barrier: a peer left" in text
    own = Failure(3, "BrokenPipeError", "[Errno 32] Broken pipe", "", 0.5)
    assert str(RankError([*failures, own])).startswith(
        "rank 3 failed first: BrokenPipeError: [Errno 32] Broken"
    )
    assert str(RankError([failures[0]])).startswith(
        "rank 0 failed first: RuntimeError: [pair.cc:553] Connection cl"
    )
