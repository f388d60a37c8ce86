"""What a container gives is what is used: memory, cores, threads, files, a loopback, a place for files.

A folder stands for /sys/fs/cgroup; where a control group can be made, a real one is tried.
"""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest

from cluster import capacity, folders, limits
from cluster.capacity import CLUSTER_MEMORY, PERSON_MEMORY, RANK_MEMORY, check_capacity, people
from cluster.environment import share_of_cores
from cluster.errors import ClusterError
from cluster.placement import Placement
from cluster.processes import wait_for_end
from cluster.ranks import Cluster
from lab.planning import plan_cache

MIB = 2**20


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for that of the control groups, on a host with 64 cores and 512 GiB."""
    host = psutil.virtual_memory()._replace(total=512 * 1024 * MIB, available=500 * 1024 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(limits, "own_cores", lambda: set(range(64)))
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(capacity, "visible_devices", list)
    (tmp_path / "own").write_text("0::/\n")
    return tmp_path


def test_without_limits_it_is_the_host(groups: Path) -> None:
    group(
        groups, memory__max="max", memory__current=7, cpu__max="max 100000", pids__max="max", pids__current=3
    )
    assert limits.memory() == (512 * 1024 * MIB, 500 * 1024 * MIB)
    assert (limits.cores(), limits.core_quota()) == (64, float("inf"))


def test_the_limits_of_a_container(groups: Path) -> None:
    statistics = f"anon 5\ninactive_file {10 * MIB}\nactive_file {30 * MIB}"
    group(groups, memory__max=1200 * MIB, memory__current=340 * MIB, memory__stat=statistics)
    group(groups, cpu__max="250000 100000", pids__max=90, pids__current=11)
    assert limits.memory() == (1200 * MIB, 900 * MIB)
    assert (limits.cores(), limits.core_quota(), limits.free_threads()) == (2, 2.5, 79)
    assert share_of_cores(Placement(1, 1, 2), [set(range(64))] * 2) == 1
    assert share_of_cores(Placement(0, 0, 1), [set(range(64))]) == 2


def test_the_limits_of_version_1_are_those_of_all_groups_that_a_process_is_in(groups: Path) -> None:
    (groups / "own").write_text(
        "9:pids:/outer/inner\n4:memory:/outer/inner\n2:cpu,cpuacct:/seen/by/host\n0::/\n"
    )
    inner = {"memory__limit_in_bytes": 3000 * MIB, "memory__usage_in_bytes": 200 * MIB}
    outer = {"memory__limit_in_bytes": 2000 * MIB, "memory__usage_in_bytes": 1900 * MIB}
    group(groups / "memory" / "outer" / "inner", **inner)
    group(groups / "memory" / "outer", **outer, memory__stat=f"total_inactive_file {50 * MIB}")
    group(groups / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=0)
    group(groups / "cpu", cpu__cfs_quota_us=300000, cpu__cfs_period_us=100000)
    group(groups / "pids" / "outer", pids__max=30, pids__current=20)
    assert limits.memory() == (2000 * MIB, 150 * MIB)
    assert (limits.cores(), limits.free_threads()) == (3, 10)
    group(groups / "cpu", cpu__cfs_quota_us=-1)
    assert limits.cores() == 64


def test_more_ranks_than_the_container_holds_are_refused(groups: Path) -> None:
    used = 1200 * MIB - CLUSTER_MEMORY - RANK_MEMORY - 17
    group(groups, memory__max=1200 * MIB, memory__current=used)
    check_capacity(1)
    with pytest.raises(
        ClusterError, match=r"ranks=6: .* 3\.0 GiB .* 0\.8 of 1\.2 GiB .*; ranks=1 would work"
    ):
        Cluster(ranks=6)
    group(groups, memory__current=1000 * MIB)
    with pytest.raises(ClusterError, match=r"ranks=2: .*; it is too little for one rank"):
        Cluster(ranks=2)
    group(groups, memory__max="max", pids__max=150, pids__current=4)
    with pytest.raises(ClusterError, match=r"ranks=3: .* 177 threads, and 146 can .*; ranks=2 would work"):
        Cluster(ranks=3)


def test_as_many_people_as_memory_and_threads_hold(groups: Path) -> None:
    each = PERSON_MEMORY + CLUSTER_MEMORY + 3 * RANK_MEMORY
    group(groups, memory__max=7 * each + MIB, memory__current=MIB // 2)
    assert people(3) == (7, each)
    threads = capacity.PERSON_THREADS + capacity.CLUSTER_THREADS + 64 + 3 * capacity.RANK_THREADS
    group(groups, pids__max=5 * threads + 9, pids__current=10)
    assert people(3) == (4, each)
    (groups / "pids.max").write_text(f"{5 * threads + 10}")
    assert people(3) == (5, each)
    (groups / "pids.max").write_text("5")
    assert people(3) == (0, each)


def test_what_a_limit_of_memory_has_ended_is_counted(groups: Path) -> None:
    assert limits.killed_for_memory() == 0
    group(groups, memory__events="low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0")
    assert limits.killed_for_memory() == 2
    (groups / "own").write_text("4:memory:/\n")
    group(groups / "memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 5")
    assert limits.killed_for_memory() == 5


def test_a_quota_under_one_core_is_one_thread(groups: Path) -> None:
    group(groups, cpu__max="20000 100000")
    assert limits.cores() == 1
    assert share_of_cores(Placement(0, 0, 4), [set(range(64))] * 4) == 1


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of version 1 or 2 with 1,200 MB of memory."""
    root = Path("/sys/fs/cgroup")
    parent = root / "memory" if (root / "memory").is_dir() else root
    limit = "memory.limit_in_bytes" if parent != root else "memory.max"
    folder = parent / f"lab-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text("1200M")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield folder
    folder.rmdir()


def lab(*before: str, ranks: int) -> str:
    """Return the last line of `lab run` on so many ranks, which must be refused."""
    command = [sys.executable, "-m", "lab", "run", "tiny", "--tokens", "4096", "--ranks", str(ranks)]
    done = subprocess.run([*before, *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.long
def test_a_real_control_group(small_group: Path) -> None:
    inside = ["sh", "-c", f'echo $$ > {small_group}/cgroup.procs && exec "$@"', "sh"]
    line = lab(*inside, ranks=6)
    assert "ranks=6: they need about 3.0 GiB of memory, and 0." in line
    assert "of 1.2 GiB are available here; " in line


@pytest.mark.long
def test_a_kernel_that_a_real_control_group_ends_is_told_so(small_group: Path, tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in ("a = 0", "b'x' * 2_000_000_000")]
    cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "n.ipynb")
    inside = ["sh", "-c", f'echo $$ > {small_group}/cgroup.procs && exec "$@"', "sh"]
    command = [*inside, sys.executable, "-m", "lab", "execute", "n.ipynb", "--out", "o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert "failed n, cell 1: the kernel died: memory was used up" in done.stderr


@pytest.mark.long
def test_few_files_and_a_loopback_that_is_down_are_one_line() -> None:
    said = "the controller opens about 132 files, and 64 are allowed; `ulimit -n 132` would work"
    assert lab("prlimit", "--nofile=64", ranks=2) == f"lab: ranks=2: {said}"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    assert "127.0.0.1 cannot be reached: as root, `ip link set lo up`" in lab("unshare", "--net", ranks=2)


def test_a_client_that_does_not_reach_the_controller_is_an_error_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*_: object, timeout: float, **__: object) -> None:
        assert 0 < timeout < 50
        raise TimeoutError("Hub connection request timed out")

    monkeypatch.setattr("cluster.engines.RankClient", late)
    with pytest.raises(
        ClusterError, match=r"the ranks did not start: Hub connection request timed out; logs"
    ):
        Cluster(ranks=1, start_timeout=50).start()


def test_a_python_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ClusterError, match=r"controller did not start: /nowhere/python: No such file"):
        Cluster(ranks=1).start()


def fail() -> None:
    raise ValueError


def test_a_folder_that_a_cleaner_removed_is_made_again() -> None:
    with Cluster(ranks=1) as cluster:
        assert cluster._caller is not None
        directory = cluster._caller.engines.directory
        with pytest.raises(Exception, match="ValueError"):
            cluster.apply(fail)
        shutil.rmtree(directory)
        assert cluster.apply(int, timeout=20) == [0]
        assert (directory / "log").is_dir()
        # New engines would look for connection files: the controller is new, too.
        [pid] = cluster.apply(os.getpid)
        rank = psutil.Process(pid)
        rank.kill()
        wait_for_end([rank], 50)
        cluster.recover()
        assert cluster.apply(int) == [0]
        assert cluster._caller.engines.directory != directory
    assert not directory.exists() or not any((directory / "log").iterdir())


@pytest.fixture
def nameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user id without a name and without HOME; the folder for temporary files."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv("HOME", "/")  # so that it is set again
    monkeypatch.delenv("HOME")
    return tmp_path


def test_a_user_without_a_home_has_a_private_folder(nameless: Path) -> None:
    folders.cache_folder()
    home = Path(os.environ["HOME"])
    assert home == nameless / f"longcontext-lab-{os.getuid()}"
    assert home.stat().st_mode & 0o777 == 0o700
    del os.environ["HOME"]
    folders.state_folder()
    assert os.environ["HOME"] == str(home)


def test_a_folder_that_is_not_the_users_own_is_refused_and_a_plan_needs_none(nameless: Path) -> None:
    home = nameless / f"longcontext-lab-{os.getuid()}"
    home.mkdir()
    home.chmod(0o755)
    with pytest.raises(ClusterError, match="is not a folder of this user alone: set HOME to one that is"):
        folders.state_folder()
    home.rmdir()
    home.symlink_to(nameless)
    with pytest.raises(ClusterError, match="set HOME to one that is"):
        folders.state_folder()
    kept = plan_cache.cached("shapes", {}, lambda: 7, encode=lambda _: {}, decode=lambda _: 8)
    assert kept == 7
    assert list(nameless.iterdir()) == [home]
