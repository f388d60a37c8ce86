"""Ranks that are forked from one process: each is what a process of its own would be.

Seen red: random numbers that ranks share, variables that are set after the process has started, a folder of
modules that is added after it.
"""

import gc
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch

from cluster import forks
from cluster.errors import ClusterError, RankError
from cluster.host import own_cores
from cluster.ranks import Cluster
from lab_tests.support.on_ranks import end_on, no_process_left


def seen() -> dict[str, Any]:
    return {
        "numbers": (random.random(), float(numpy.random.rand()), float(torch.rand(()))),
        "variable": os.environ["OF_A_TEST"],
        "path": sys.path,
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "input": os.readlink("/proc/self/fd/0"),
        "session": os.getsid(0) == os.getpid(),
    }


@pytest.mark.long
def test_a_rank_is_as_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On ranks of its own: other tests have set the seeds of those that they share."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_A_TEST", "set later")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with Cluster(ranks=2) as one, Cluster(ranks=2) as other:
        ranks = one.apply(seen) + other.apply(seen)
    assert len({number for rank in ranks for number in rank["numbers"]}) == 12
    for rank in ranks:
        assert str(tmp_path / "modules") in rank["path"]
        assert (rank["variable"], rank["input"], rank["session"]) == ("set later", os.devnull, True)
        assert rank["folder"] == str(tmp_path)
    [parent] = {rank["parent"] for rank in ranks}
    assert psutil.Process(parent).ppid() == os.getpid()


@pytest.mark.long
def test_ranks_go_on_without_it_and_the_next_cluster_has_a_new_one() -> None:
    with Cluster(ranks=2) as cluster:
        [parent, _] = cluster.apply(os.getppid)
        psutil.Process(parent).kill()
        psutil.wait_procs([psutil.Process(parent)], 10)
        assert cluster.apply(os.getppid)[0] != parent
        with pytest.raises(RankError, match=r"rank 1 failed first: ProcessDied"):
            cluster.apply(end_on, 1)
        with Cluster(ranks=1) as other:
            assert other.apply(os.getppid)[0] not in (parent, os.getpid())


def test_a_forked_rank_does_not_search_what_is_imported(ranks4: Cluster) -> None:
    assert all(frozen > 2e5 for frozen in ranks4.apply(gc.get_freeze_count))


def test_what_ends_at_once_is_told_with_its_code(ranks4: Cluster) -> None:
    rank = forks._forks.fork(forks.Request([], {"PYTHONPATH": ""}, "/no/such/folder", os.devnull))
    assert rank.wait(60) == 1
    rank.send_signal(signal.SIGTERM)


@pytest.mark.long
@pytest.mark.usefixtures("_interruptible")
def test_a_cluster_that_is_interrupted_while_its_ranks_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process that is forked still imports, which takes seconds, and there is no rank yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    forked = forks._forks

    def interrupt() -> None:
        while forks._forks is forked:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with no_process_left(30), pytest.raises(KeyboardInterrupt):
        Cluster(ranks=2).start()
    thread.join()


def test_a_process_that_has_ended_forks_no_more() -> None:
    process = forks.Forks(os.environ, own_cores())
    process._process.kill()
    for _ in range(2):
        with pytest.raises(ClusterError, match=r"^the process that is forked into ranks ended with -9$"):
            process.fork(forks.Request([], {}, "/", os.devnull))
    assert not process.alive
    process.close()
