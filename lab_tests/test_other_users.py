"""Another user of this machine reads nothing of a cluster: no file, no message, no key."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.live import publish
from cluster.ranks import Cluster
from lab_tests.support.on_ranks import listening_at

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user"),
]

# Debian's user `nobody`.
OTHER = 65534

# Waits for the line with what root knows of the cluster, and tries to read it. It imports as root, which may
# be the only user who can read the packages.
SPY = f"""
import json, os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
import zmq

os.setgroups([])
os.setgid({OTHER})
os.setuid({OTHER})
print("ready", flush=True)
known = json.loads(sys.stdin.readline())

def succeeds(attempt):
    try:
        attempt()
    except (OSError, RuntimeError):
        return False
    return True

def stores(ports):
    found = []
    def find(port):
        def write():
            dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=2)).set("key", "value")
        if succeeds(write):
            found.append(port)
    # A port of something else may never answer.
    for port in ports:
        threading.Thread(target=find, args=(port,), daemon=True).start()
    time.sleep(3)
    return found

def messages(ports):
    context = zmq.Context()
    heard = []
    sockets = [context.socket(zmq.SUB) for _ in ports]
    for socket, port in zip(sockets, ports):
        socket.connect(f"tcp://127.0.0.1:{{port}}")
        socket.subscribe(b"")
    end = time.monotonic() + 3
    while time.monotonic() < end:
        heard += [port for socket, port in zip(sockets, ports) if socket.poll(10)]
    context.destroy(linger=0)
    return sorted(set(heard))

print(json.dumps({{
    "listed": [path for path in known["folders"] if succeeds(lambda: os.listdir(path))],
    "read": [path for path in known["files"] if succeeds(lambda: open(path, "rb"))],
    "environments": [
        path for path in known["processes"] if succeeds(lambda: (Path(path) / "environ").read_bytes())
    ],
    "command lines": [(Path(path) / "cmdline").read_text() for path in known["processes"]],
    "heard": messages(known["message ports"]),
    "stores": stores(known["rank ports"]),
}}), flush=True)
os._exit(0)
"""

# Each configuration file of IPython's default profile, and a script that it would run at its start.
PROFILE_FILES = (
    "ipython_config.py", "ipython_kernel_config.py", "ipcluster_config.py", "ipcontroller_config.py",
    "ipengine_config.py", "startup/00.py",
)  # fmt: skip


def chatter(until: str) -> None:
    """Print and publish on each rank until there is such a file."""
    while not Path(until).exists():
        print("printed")
        publish("published")
        time.sleep(0.05)


def secrets(directory: Path) -> set[str]:
    """The values in connection files that let their reader in."""
    found = [json.loads(path.read_text()) for path in directory.glob("security/*.json")]
    return {str(info[name]) for info in found for name in ("key", "curve_serverkey")}


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What root knows of a cluster whose ranks print and publish, and what another user could read of it."""
    folder = tmp_path_factory.mktemp("attempts")
    ipython, mark, done = folder / "ipython", folder / "mark", folder / "done"
    for name in PROFILE_FILES:
        path = ipython / "profile_default" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(mark)!r}, 'a').write(__file__)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(ipython))
        with (
            subprocess.Popen(
                [sys.executable, "-c", SPY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
            ) as spy,
            Cluster(ranks=2) as cluster,
        ):
            engines = cluster._caller.engines
            directory, processes = engines.directory, engines._processes
            ranks = {process for process in processes if "cluster.forks" in process.cmdline()}
            paths = list(directory.rglob("*"))
            known: dict[str, Any] = {
                "folders": [str(path) for path in (directory, *paths) if path.is_dir()],
                "files": [str(path) for path in paths if path.is_file()],
                "processes": [f"/proc/{process.pid}" for process in processes],
                "message ports": sorted({address.port for address in listening_at(processes - ranks)}),
                "rank ports": sorted({address.port for address in listening_at(ranks)}),
                "secrets": secrets(directory),
                "mark": mark,
                "profile": ipython,
            }
            assert spy.stdout.readline() == "ready\n"
            spy.stdin.write(json.dumps(known, default=str) + "\n")
            spy.stdin.flush()

            def wait_for_the_spy() -> None:
                known["spy"] = spy.communicate()[0]
                done.touch()

            records: list[Any] = []
            threading.Thread(target=wait_for_the_spy).start()
            cluster.apply(chatter, str(done), on_record=lambda rank, record: records.append(record))
            assert len(records) > 50, "there was something to hear"
    return {**known, **json.loads(known["spy"])}


def test_another_user_reads_no_file(attempts: dict[str, Any]) -> None:
    names = {Path(path).name.partition("-")[0] for path in attempts["files"]}
    assert names >= {"ipcontroller", "ipengine", "store"}
    assert attempts["read"] == []
    assert attempts["listed"] == []


def test_another_user_hears_no_message(attempts: dict[str, Any]) -> None:
    assert len(attempts["message ports"]) > 10
    assert attempts["heard"] == []


def test_another_user_finds_no_store_of_the_ranks(attempts: dict[str, Any]) -> None:
    assert attempts["rank ports"], "gloo listens"
    assert attempts["stores"] == []


def test_another_user_finds_no_key_of_a_process(attempts: dict[str, Any]) -> None:
    assert len(attempts["processes"]) >= 5, "a controller, two engines, two nannies"
    assert attempts["environments"] == []
    assert len(attempts["secrets"]) >= 2
    assert all(attempts["command lines"])
    found = [secret for secret in attempts["secrets"] if any(secret in s for s in attempts["command lines"])]
    assert found == []


def test_the_profile_of_ipython_is_neither_read_nor_written(attempts: dict[str, Any]) -> None:
    assert not attempts["mark"].exists()
    files = [path for path in attempts["profile"].rglob("*") if path.is_file()]
    assert len(files) == len(PROFILE_FILES)
