"""Ranks on two other hosts, by ssh, mpiexec and Slurm: they are described, they end, and nothing remains."""

import contextlib
import io
import json
import os
import re
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

from cluster import watchdog
from cluster.engines import Engines
from cluster.errors import ClusterError, RankError
from cluster.processes import family
from cluster.ranks import Cluster
from lab_tests.support.hosts import SSH_PORT, Hosts, needs, network, slurm, sshd
from lab_tests.support.on_ranks import (
    IN_TIME,
    describe_rank,
    end_on,
    in_time,
    listening_at,
    no_process_left,
    own_processes,
    raise_on,
    sum_over_ranks,
    wait_until,
)

pytestmark = pytest.mark.long

# Another process's work slows a start down; none of these waits is met on a machine that is free.
PATIENCE = 120.0


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


@pytest.fixture
def over_ssh(hosts: Hosts, keys: Path) -> dict[str, Any]:
    return {
        "profile": "ssh",
        "hosts": tuple(f"root@{host.address}:{SSH_PORT}" for host in hosts.hosts),
        "key": str(keys / "key"),
        "options": ("-F", "none", "-o", f"UserKnownHostsFile={keys}/known"),
    } | common(hosts)


@pytest.fixture
def by_mpiexec(hosts: Hosts, keys: Path, tmp_path: Path) -> dict[str, Any]:
    needs("mpiexec")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host.address} slots=1\n" for host in hosts.hosts))
    agent = f"ssh -F none -i {keys}/key -p {SSH_PORT} -o UserKnownHostsFile={keys}/known"
    options = ("--allow-run-as-root", "--mca", "plm_rsh_agent", agent)
    return {"profile": "mpi", "hostfile": str(hostfile), "options": options} | common(hosts)


@pytest.fixture
def as_a_job(hosts: Hosts, _slurm: None, tmp_path: Path) -> dict[str, Any]:
    return {"profile": "slurm", "nodes": 2, "time": "00:10:00", "folder": str(tmp_path)} | common(hosts)


def common(hosts: Hosts) -> dict[str, Any]:
    return {"ranks": 2, "address": hosts.address, "start_timeout": PATIENCE}


@pytest.fixture(params=["over_ssh", "by_mpiexec", "as_a_job"])
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `Cluster` is told to run two ranks on the two hosts."""
    return request.getfixturevalue(request.param)


def check_ranks(cluster: Cluster, hosts: Hosts) -> list[int]:
    """The ids of the processes of the ranks."""
    found = cluster.apply(describe_rank)
    assert [f["engine"] for f in found] == [f["rank"] for f in found] == [0, 1]
    assert [f["host"] for f in found] == [host.name for host in hosts.hosts]
    assert [f["variables"]["CLUSTER_ADDRESS"] for f in found] == [host.address for host in hosts.hosts]
    for f in found:
        assert f["variables"]["GLOO_SOCKET_IFNAME"] == f["variables"]["NCCL_SOCKET_IFNAME"] == "eth0"
        assert f["threads"] == len(os.sched_getaffinity(0))
        assert (f["encrypted"], f["on disk"]) == (True, False)
    assert cluster.apply(sum_over_ranks, 10.0) == [11.0, 11.0]
    return [f["pid"] for f in found]


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
    with no_process_left(), Cluster(**place) as cluster:
        engines = cluster._caller.engines
        found = check_ranks(cluster, hosts)
        check_what_is_open(engines, hosts)

        with pytest.raises(RankError, match=r"^rank 1 failed first: ArithmeticError: 7 is not 11") as caught:
            cluster.apply(raise_on, 1)
        assert caught.value.victims == (0,), "freed, though on another host"
        controller = engines._cluster.controller.pid
        assert check_ranks(cluster, hosts) == found, "no rank needed a restart"

        with in_time(), pytest.raises(RankError) as died:
            cluster.apply(end_on, 1)
        assert (died.value.rank, died.value.kind) == (1, "ProcessDied")
        with pytest.raises(ClusterError, match=r"process of rank 1 ended.*recover"):
            cluster.apply(describe_rank)
        with in_time():  # by heartbeats alone the old ranks would be missed after 60 s
            cluster.recover()
        anew = check_ranks(cluster, hosts)
        assert cluster._caller.engines is engines
        assert engines._cluster.controller.pid == controller, "only the ranks were started anew"
        assert not set(found) & set(anew)
    wait_until(lambda: not ranks_on(hosts), "the ranks' end", lambda: ranks_on(hosts))
    if place["profile"] == "slurm":
        assert jobs() == []
    assert [path.name for path in tmp_path.glob("cluster-*")] == []


def check_what_is_open(engines: Engines, hosts: Hosts) -> None:
    """The controller listens on loopback and at its address only, and speaks nothing but CURVE there."""
    listening = listening_at(family([engines._cluster.controller.pid]))
    assert {a.ip for a in listening} == {"127.0.0.1", hosts.address}
    reached = [a.port for a in listening if a.ip == hosts.address]
    assert len(reached) >= 9
    assert {mechanism(hosts.address, port) for port in reached} == {"CURVE"}

    folder = engines.directory
    files = list(folder.glob("security/ipcontroller-*.json"))
    assert len(files) == 2
    assert {oct(path.stat().st_mode)[-3:] for path in files} == {"600"}
    assert oct(folder.stat().st_mode)[-3:] == "700"
    written = json.loads(files[0].read_text())
    secrets = [written["curve_serverkey"], written["key"]]
    assert list(map(len, secrets)) == [40, 64]
    commands = " ".join(word for p in psutil.process_iter(["cmdline"]) for word in p.info["cmdline"] or ())
    assert not [secret for secret in secrets if secret in commands]


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
import sys, time
from cluster import Cluster

with Cluster(**eval(sys.argv[1])) as cluster:
    print("up", flush=True)
    cluster.apply(time.sleep, 600)
"""


def test_nothing_is_left_when_the_owner_is_killed(
    place: dict[str, Any], hosts: Hosts, tmp_path: Path
) -> None:
    began, log = own_processes(), tmp_path / "owner.log"
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with (
        log.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-c", OWNER, repr(place)],
            stdout=subprocess.PIPE, stderr=out, env=variables, text=True,
        ) as owner,
    ):  # fmt: skip
        assert owner.stdout.readline() == "up\n", log.read_text()
        here = own_processes() - began
        assert len(ranks_on(hosts)) >= 4, "two ranks and their nannies"
        owner.kill()

    def left() -> list[str]:
        mine = [str(p) for p in here if watchdog.is_alive(p)]
        return mine + ranks_on(hosts) + (jobs() if place["profile"] == "slurm" else [])

    wait_until(lambda: not left(), "the end", left)


def starts(settings: dict[str, Any], text: str) -> None:
    """The start fails with one line that matches `text`, and says where the log is."""
    with pytest.raises(ClusterError, match=text) as caught, Cluster(**settings):
        pass
    assert "\n" not in str(caught.value)
    logs = re.search(r"logs are in (\S+/log)", str(caught.value))
    assert logs is not None
    assert list(Path(logs[1]).iterdir())


def test_a_start_that_fails_says_why_and_leaves_nothing(
    hosts: Hosts, keys: Path, over_ssh: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = over_ssh["hosts"][0], hosts.hosts[1].address
    module = tmp_path / "broken" / "cluster"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise OSError('no room for an engine')")
    paths = f"{module.parent}:{os.pathsep.join(sys.path)}"
    with no_process_left():
        for settings, text in (
            ({"hosts": (first, f"root@{second}:{SSH_PORT + 1}")}, "rank 1 ended: ssh: connect to .*refused"),
            ({"hosts": (first, f"root@{second.rpartition('.')[0]}.99")},
             "rank 1 ended: ssh: connect to host .*(No route|timed out)"),
            ({"python": "/none/python"}, "ended: .*/none/python: (No such file|not found)"),
            ({"key": str(keys / "host")}, "ranks? .* ended: .*Permission denied"),
        ):  # fmt: skip
            starts(over_ssh | settings, text)
        monkeypatch.setattr("cluster.profiles.ssh.import_path", lambda: paths)
        starts(over_ssh, r"ended: OSError: no room for an engine; logs are in")
        wait_until(lambda: not ranks_on(hosts), "the ranks' end", lambda: ranks_on(hosts))


def test_a_job_that_is_cancelled_is_told(as_a_job: dict[str, Any]) -> None:
    with Cluster(**as_a_job) as cluster:
        [job, _] = jobs()
        cancel = ["scancel", "--signal=KILL", "--full", job]
        threading.Timer(1.0, lambda: subprocess.run(cancel, check=True)).start()
        # Whichever comes first: the job's end, or word from a nanny that outlived its rank for a moment.
        said = rf"job {job} is |its process ended"
        with in_time(), pytest.raises((ClusterError, RankError), match=said):
            cluster.apply(time.sleep, 300)
        assert cluster.broken
    assert jobs() == []


def test_slurm_says_why_a_job_does_not_start(as_a_job: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match=r"Slurm refused the job: .*Invalid partition") as caught:
        Cluster(**as_a_job, partition="none").start()
    assert "\n" not in str(caught.value)
    waits = as_a_job | {"start_timeout": 4.0, "options": ("--begin=now+1hour",)}
    starts(waits, r"no rank answered within 4 s and 2 were expected; job \d+ is PENDING \(BeginTime\)")
    assert jobs() == []


def test_an_engine_ends_when_the_controllers_port_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused three times in a row, and not after a miss between answers."""
    answers = iter("-+--+---.")

    def connect(address: tuple[str, int], timeout: float) -> io.StringIO:
        if next(answers) == "-":
            raise ConnectionRefusedError
        return io.StringIO()

    monkeypatch.setattr(watchdog.time, "sleep", lambda _: None)
    monkeypatch.setattr(socket, "create_connection", connect)
    watchdog.wait_for_port("192.0.2.1", 1)
    assert next(answers) == "."
    assert watchdog.MISSES * watchdog.POLL_SECONDS * 2 < IN_TIME / 3
