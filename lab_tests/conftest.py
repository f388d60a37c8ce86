"""What tests share: a cluster of four ranks, this process as one rank, plans kept away from the user's."""

import gc
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from xdist.scheduler import LoadFileScheduling

from cluster.ranks import Cluster
from lab.show.tuner.planner import THREAD

# A failed assertion of a helper shows its values, as one of a test does.
pytest.register_assert_rewrite("lab_tests.support")


LONG = "long"
SHORT = f"not {LONG}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="COMMIT",
        help="run the files of tests that import what has changed since this commit, or since the last one",
    )
    parser.addoption(
        "--third", action="store_true", help="run one in three of the long tests, others on the next day"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A test that is named is run, long or not."""
    given = "-m" in config.invocation_params.args or any("::" in name for name in config.args)
    if not config.option.markexpr and not given:
        config.option.markexpr = SHORT


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.changed is not None:
        from lab_tests.support.changed import ROOT, changed_files, reached_tests

        try:
            files = changed_files(config.option.changed)
        except subprocess.CalledProcessError as error:
            raise pytest.UsageError(f"--changed={config.option.changed}: give a commit of git") from error
        reached = {ROOT / file for file in reached_tests(files)}
        others = [item for item in items if item.path not in reached]
        items[:] = [item for item in items if item.path in reached]
        config.hook.pytest_deselected(items=others)
    if config.option.third:
        from lab_tests.support.long_run import third_of_day

        long = [item for item in items if item.get_closest_marker(LONG)]
        others = {*long} - {*third_of_day(long, date.today())}
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)


APART = (
    "test_notebooks.py::test_a_notebook_runs", "test_notebooks.py::test_each_notebook_runs",
    "test_fit.py::test_a_preset_fits", "test_longest.py", "test_scaling.py",
)  # fmt: skip
"""Tests that take long and share nothing: each may run in any process. All others of a file run in one."""


class _ByFile(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        apart = nodeid.removeprefix("lab_tests/").startswith(APART)
        return nodeid if apart else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Those that are apart come last: a scope of one test is behind all of several."""
    return _ByFile(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish() -> None:
    """What is imported and collected stays: to search it for garbage takes seconds of many tests."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    """At the end, each failure has one line; pytest's own summary has many, where a comparison is printed."""
    yield
    for kind in ("failed", "error"):
        for report in terminalreporter.stats.get(kind, []):
            crash = getattr(report.longrepr, "reprcrash", None)
            said = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
            terminalreporter.write_line(f"{kind.upper()} {report.nodeid} - {said}"[:300])
    if config.option.markexpr == SHORT:
        terminalreporter.write_line(
            "This was the short run. `pytest -m long` has the rest: more pairs of techniques and families, "
            "lengths, faults and pages, and the notebooks at their own sizes."
        )
    if config.option.third:
        terminalreporter.write_line(
            "This was a third of the long tests, others on the next day. `pytest -m long` runs all of them."
        )


@pytest.fixture(scope="session", autouse=True)
def _own_plans_and_clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not by XDG_CACHE_HOME, where the browser of the browser's tests is installed."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platformdirs, "user_cache_path", lambda name: folder / "cache" / name)
        patch.setattr(platformdirs, "user_state_path", lambda name: folder / "state" / name)
        yield


@pytest.fixture(autouse=True)
def _tuners_have_their_plans() -> Iterator[None]:
    """No thread of a tuner works beside the next test."""
    yield
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests use one thread, and so do the commands and notebooks that they start.

    Models this small are slower on two threads, and ten times slower while another test needs the other core:
    OpenMP's threads spin while they wait for each other.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Cluster]:
    with Cluster(ranks=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def impatient_ranks() -> Iterator[Cluster]:
    with Cluster(ranks=2, timeout=2) as cluster:
        yield cluster


@pytest.fixture
def impatient(impatient_ranks: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """The same ranks, whole after the test before, with its module imported, which takes seconds."""
    if impatient_ranks.broken:
        impatient_ranks.recover()
    impatient_ranks.apply(import_module, request.module.__name__)
    return impatient_ranks


@pytest.fixture(scope="module")
def _fresh_ranks(ranks4: Cluster) -> None:
    """Ranks new to torch: after dozens of calls torch now and then keeps a sharded parameter, and with it a
    group that was left, so that its peers wait on and are told to recover.
    """
    ranks4.stop()
    ranks4.start()


@pytest.fixture(scope="module")
def _fresh_ranks_after_deepspeed(ranks4: Cluster) -> Iterator[None]:
    """DeepSpeed's module keeps the first world group for good: a rank that fails could not leave it."""
    yield
    ranks4.stop()
    ranks4.start()


@pytest.fixture(autouse=True)
def _recovered(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ranks4" in request.fixturenames:
        cluster = request.getfixturevalue("ranks4")
        if cluster.broken:
            cluster.recover()


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A shell's background jobs ignore interrupts, and a test run may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text whose bytes are tokens of the smallest vocabulary."""
    path = tmp_path_factory.mktemp("text") / "digits.txt"
    path.write_text("".join(str(n**3 % 977) for n in range(2000)))
    return path


@pytest.fixture
def eight() -> Iterator[dist.ProcessGroup]:
    """A group of eight of which only this rank exists: what it sends is counted and goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
