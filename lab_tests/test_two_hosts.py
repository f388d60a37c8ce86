"""Ranks on two other hosts, by ssh, mpiexec and Slurm: they are described, they end, and nothing remains."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from cluster import watchdog
from cluster.errors import ClusterError, RankError
from cluster.ranks import Cluster
from lab_tests.support.hosts import SSH_PORT, Hosts, needs, network, slurm, sshd, wait_until

pytestmark = pytest.mark.slow

# Another process's work slows a start down; none of these waits is met on a machine that is free.
PATIENCE = 120.0
LEAVE_SECONDS = 20.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def keys(hosts: Hosts) -> Iterator[Path]:
    with sshd(hosts) as folder:
        yield folder


@pytest.fixture(scope="module")
def _slurm(hosts: Hosts) -> Iterator[None]:
    with slurm(hosts) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def _logs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def over_ssh(hosts: Hosts, keys: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "profile": "ssh",
        "hosts": tuple(f"root@{host.address}:{SSH_PORT}" for host in hosts.hosts),
        "key": str(keys / "key"),
        "options": ("-F", "none", "-o", f"UserKnownHostsFile={keys}/known"),
    }


def by_mpiexec(hosts: Hosts, keys: Path, tmp_path: Path) -> dict[str, Any]:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host.address} slots=1\n" for host in hosts.hosts))
    agent = f"ssh -F none -i {keys}/key -p {SSH_PORT} -o UserKnownHostsFile={keys}/known"
    options = ("--allow-run-as-root", "--mca", "plm_rsh_agent", agent)
    return {"profile": "mpi", "hostfile": str(hostfile), "options": options}


def as_a_job(hosts: Hosts, tmp_path: Path) -> dict[str, Any]:
    return {"profile": "slurm", "nodes": 2, "time": "00:10:00", "folder": str(tmp_path)}


@pytest.fixture(params=["ssh", "mpi", "slurm"])
def place(request: pytest.FixtureRequest, hosts: Hosts, tmp_path: Path) -> dict[str, Any]:
    """What `Cluster` is told to run two ranks on the two hosts."""
    common = {"ranks": 2, "address": hosts.address, "start_timeout": PATIENCE}
    if request.param == "slurm":
        request.getfixturevalue("_slurm")
        return common | as_a_job(hosts, tmp_path)
    keys = request.getfixturevalue("keys")
    if request.param == "mpi":
        needs("mpiexec")
    return common | (over_ssh if request.param == "ssh" else by_mpiexec)(hosts, keys, tmp_path)


def describe_rank() -> dict[str, Any]:
    from ipyparallel.engine.app import IPEngine

    total = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(total)
    engine = IPEngine.instance()
    return {
        "id": engine.id,
        "rank": dist.get_rank(),
        "sum": float(total),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "address": os.environ["CLUSTER_ADDRESS"],
        "interfaces": [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]],
        "threads": torch.get_num_threads(),
        "encrypted": bool(engine.curve_serverkey),
        "on disk": os.path.exists(engine.profile_dir.location),
    }


def fail_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise ArithmeticError("7 is not 11")
    dist.barrier()


def end_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        os._exit(87)
    dist.barrier()


def check_ranks(cluster: Cluster, hosts: Hosts) -> list[dict[str, Any]]:
    found = cluster.apply(describe_rank)
    assert [f["id"] for f in found] == [f["rank"] for f in found] == [0, 1]
    assert [f["sum"] for f in found] == [11.0, 11.0]
    assert [f["address"] for f in found] == [host.address for host in hosts.hosts]
    assert [f["interfaces"] for f in found] == [["eth0", "eth0"]] * 2
    assert [f["threads"] for f in found] == [len(os.sched_getaffinity(0))] * 2
    assert [f["encrypted"] for f in found] == [True, True]
    assert [f["on disk"] for f in found] == [False, False]
    return found


def ranks_on(hosts: Hosts) -> list[str]:
    """The command lines of what clusters left running on the hosts."""
    commands = []
    for host in hosts.hosts:
        for process in host.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                if re.search("cluster.engine|ipyparallel|orted", command) and watchdog.is_alive(process):
                    commands.append(command)
    return commands


def jobs() -> list[str]:
    listed = subprocess.run(["squeue", "--noheader", "--format=%i %T"], capture_output=True, text=True)
    return listed.stdout.split()


def test_ranks_on_two_hosts(place: dict[str, Any], hosts: Hosts, tmp_path: Path) -> None:
    """One start serves it all: who is who, a failure named, a death named, recovery, and a clean stop."""
    before = set(psutil.Process().children(recursive=True))
    with Cluster(**place) as cluster:
        assert cluster._engines is not None
        found = check_ranks(cluster, hosts)
        check_what_is_open(cluster, hosts)

        with pytest.raises(RankError, match=r"^rank 1 failed first: ArithmeticError: 7 is not 11") as caught:
            cluster.apply(fail_on, 1)
        assert caught.value.victims == (0,), "freed, though on another host"
        controller = cluster._engines._cluster.controller.pid
        again = check_ranks(cluster, hosts)
        assert [f["pid"] for f in again] == [f["pid"] for f in found], "no rank needed a restart"

        began = time.monotonic()
        with pytest.raises(RankError) as died:
            cluster.apply(end_on, 1)
        assert time.monotonic() - began < 10
        assert (died.value.rank, died.value.kind) == (1, "ProcessDied")
        with pytest.raises(ClusterError, match=r"process of rank 1 ended.*recover"):
            cluster.apply(describe_rank)
        began = time.monotonic()
        cluster.recover()
        assert time.monotonic() - began < 50, "by heartbeats alone the old ranks would be missed after 60 s"
        anew = check_ranks(cluster, hosts)
        assert cluster._engines._cluster.controller.pid == controller, "only the ranks were started anew"
        assert not {f["pid"] for f in found} & {f["pid"] for f in anew}
    left = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in left if watchdog.is_alive(p)] == []
    wait_until(lambda: not ranks_on(hosts), "the ranks' end", lambda: str(ranks_on(hosts)), seconds=20)
    if place["profile"] == "slurm":
        assert jobs() == []
    assert [path.name for path in tmp_path.glob("cluster-*")] == []


def check_what_is_open(cluster: Cluster, hosts: Hosts) -> None:
    """The controller listens on loopback and at its address only, and speaks nothing but CURVE there."""
    assert cluster._engines is not None
    controller = psutil.Process(cluster._engines._cluster.controller.pid)
    listening = [
        connection.laddr
        for process in (controller, *controller.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {a.ip for a in listening} == {"127.0.0.1", hosts.address}
    reached = [a.port for a in listening if a.ip == hosts.address]
    assert len(reached) >= 9
    assert {mechanism(hosts.address, port) for port in reached} == {"CURVE"}

    folder = cluster._engines.directory
    files = list(folder.glob("security/ipcontroller-*.json"))
    assert len(files) == 2
    assert {oct(path.stat().st_mode)[-3:] for path in files} == {"600"}
    assert oct(folder.stat().st_mode)[-3:] == "700"
    written = json.loads(files[0].read_text())
    secrets = [written["curve_serverkey"], written["key"]]
    assert list(map(len, secrets)) == [40, 64]
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands for secret in secrets if secret in command]


def mechanism(address: str, port: int) -> str:
    """What a ZeroMQ socket asks of those who connect, as its greeting says (ZMTP 3.0)."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection((address, port), timeout=10) as peer:
        peer.sendall(greeting)
        said = b""
        while len(said) < len(greeting) and (more := peer.recv(64)):
            said += more
    return said[12:32].rstrip(b"\0").decode()


OWNER = """
import json, sys, time
from cluster import Cluster

with Cluster(**json.loads(sys.argv[1])) as cluster:
    print("up", flush=True)
    cluster.apply(time.sleep, 600)
"""


def test_nothing_is_left_when_the_owner_is_killed(
    place: dict[str, Any], hosts: Hosts, tmp_path: Path
) -> None:
    told = {key: list(value) if isinstance(value, tuple) else value for key, value in place.items()}
    began = set(psutil.Process().children(recursive=True))
    log = (tmp_path / "owner.log").open("w")
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OWNER, json.dumps(told)]
    with (
        log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=variables, text=True) as owner,
    ):
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n", (tmp_path / "owner.log").read_text()
        here = set(psutil.Process().children(recursive=True)) - began
        assert len(ranks_on(hosts)) >= 4, "two ranks and their nannies"
        owner.send_signal(signal.SIGKILL)
        owner.wait()

        def left() -> list[str]:
            mine = [str(p) for p in here if watchdog.is_alive(p)]
            return mine + ranks_on(hosts) + (jobs() if place["profile"] == "slurm" else [])

        wait_until(lambda: not left(), "the end", lambda: str(left()), seconds=LEAVE_SECONDS)


def starts(settings: dict[str, Any], text: str) -> None:
    """The start fails with one line that matches `text`, and says where the log is."""
    with pytest.raises(ClusterError, match=text) as caught, Cluster(**settings):
        pass
    assert "\n" not in str(caught.value)
    logs = re.search(r"logs are in (\S+/log)", str(caught.value))
    assert logs is not None
    assert list(Path(logs[1]).iterdir())


def test_a_start_that_fails_says_why_and_leaves_nothing(
    hosts: Hosts, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children(recursive=True))
    settings = {"ranks": 2, "address": hosts.address, "start_timeout": PATIENCE} | over_ssh(
        hosts, keys, tmp_path
    )
    first = settings["hosts"][0]
    refusing = f"root@{hosts.hosts[1].address}:{SSH_PORT + 1}"
    starts(settings | {"hosts": (first, refusing)}, r"rank 1 ended: ssh: connect to host .*refused")
    nowhere = f"root@{hosts.hosts[1].address.rpartition('.')[0]}.99"
    starts(
        settings | {"hosts": (first, nowhere)}, r"rank 1 ended: ssh: connect to host .*(No route|timed out)"
    )
    starts(settings | {"python": "/none/python"}, r"ended: .*/none/python: (No such file|not found)")
    other = keys / "host"
    starts(settings | {"key": str(other)}, r"ranks? .* ended: .*Permission denied")
    module = tmp_path / "broken" / "cluster"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise OSError('no room for an engine')")
    paths = f"{module.parent}:{os.pathsep.join(sys.path)}"
    monkeypatch.setattr("cluster.profiles.ssh.import_path", lambda: paths)
    starts(settings, r"ended: OSError: no room for an engine; logs are in")
    wait_until(lambda: not ranks_on(hosts), "the ranks' end", lambda: str(ranks_on(hosts)), seconds=10)
    left = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in left if watchdog.is_alive(p)] == []


@pytest.mark.usefixtures("_slurm")
def test_a_job_that_is_cancelled_is_told(hosts: Hosts, tmp_path: Path) -> None:
    settings = {"ranks": 2, "address": hosts.address, "start_timeout": PATIENCE} | as_a_job(hosts, tmp_path)
    with Cluster(**settings) as cluster:
        [job, _] = jobs()
        cancel = ["scancel", "--signal=KILL", "--full", job]
        threading.Timer(1.0, lambda: subprocess.run(cancel, check=True)).start()
        began = time.monotonic()
        # Whichever comes first: the job's end, or word from a nanny that outlived its rank for a moment.
        with pytest.raises((ClusterError, RankError), match=rf"job {job} is |its process ended"):
            cluster.apply(time.sleep, 300)
        assert time.monotonic() - began < 30
        assert cluster.broken
    assert jobs() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], capture_output=True)
    if made.returncode:
        pytest.skip("no small disk can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_told_before_anything_starts(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(
        ClusterError, match=rf"{small_disk} has 8 MiB free and a cluster's logs need 16; TMPDIR"
    ):
        Cluster(ranks=2).start()
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list(small_disk.iterdir()) == []


@pytest.mark.usefixtures("_slurm")
def test_slurm_says_why_a_job_does_not_start(hosts: Hosts, tmp_path: Path) -> None:
    settings = {"ranks": 2, "address": hosts.address, "start_timeout": 15.0} | as_a_job(hosts, tmp_path)
    with pytest.raises(ClusterError, match=r"Slurm refused the job: .*Invalid partition") as caught:
        Cluster(**settings, partition="none").start()
    assert "\n" not in str(caught.value)
    waits = settings | {"start_timeout": 4.0, "options": ("--begin=now+1hour",)}
    starts(waits, r"no rank answered within 4 s and 2 were expected; job \d+ is PENDING \(BeginTime\)")
    assert jobs() == []


def test_an_engine_ends_when_the_controllers_port_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused three times in a row, and not after a miss between answers."""
    answers = iter("-+--+---")
    looked: list[str] = []

    class Answer:
        def close(self) -> None: ...

    def connect(address: tuple[str, int], timeout: float) -> Answer:
        looked.append(next(answers))
        if looked[-1] == "-":
            raise ConnectionRefusedError
        return Answer()

    waited: list[float] = []
    monkeypatch.setattr(watchdog.time, "sleep", waited.append)
    monkeypatch.setattr(socket, "create_connection", connect)
    watchdog.wait_for_port("192.0.2.1", 1)
    assert "".join(looked) == "-+--+---"
    assert watchdog.MISSES * watchdog.POLL_SECONDS * 2 < LEAVE_SECONDS - watchdog.POLL_SECONDS
