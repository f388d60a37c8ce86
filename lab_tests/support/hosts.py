"""Other hosts: network namespaces with an address, a name and an sshd each, and Slurm on them."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from cluster.processes import kill
from lab_tests.support.on_ranks import wait_until

SSH_PORT = 2222
NAMES = ("one", "two")
SBIN = "/usr/sbin"


def needs(*programs: str) -> None:
    """Skip the test, saying what is missing."""
    lacking = [name for name in programs if find(name) is None]
    if lacking:
        pytest.skip(f"not installed: {', '.join(lacking)}")


def find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:{SBIN}")


class Host:
    """A network namespace: processes started in it have another address and another name."""

    def __init__(self, name: str, address: str, namespace: str) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace

    def start(self, *command: str, log: Path) -> subprocess.Popen[bytes]:
        # Not `ip netns exec`, which mounts a /sys of its own and hides the control groups from slurmd.
        within = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts"]
        within += ["sh", "-c", f'hostname {self.name} && exec "$@"', "-"]
        with log.open("ab") as out:
            return subprocess.Popen(
                [*within, find(command[0]) or command[0], *command[1:]],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    def processes(self) -> set[psutil.Process]:
        result = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        processes = set()
        for pid in result.stdout.split():
            try:
                processes.add(psutil.Process(int(pid)))
            except psutil.NoSuchProcess:
                continue
        return processes


class Hosts:
    """Two other hosts on a network of their own; `address` is this host's address on it."""

    def __init__(self) -> None:
        number = os.getpid() % 200 + 20
        self.bridge = f"lab{number}"
        self.address = f"10.77.{number}.1"
        self.port = 16000 + number
        self.hosts = [
            Host(name, f"10.77.{number}.{11 + place}", f"{self.bridge}-{name}")
            for place, name in enumerate(NAMES)
        ]

    def up(self) -> None:
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for host in self.hosts:
            outside, inside = f"{self.bridge}{host.name}", ["ip", "-n", host.namespace]
            run("ip", "netns", "add", host.namespace)
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            run("ip", "link", "set", outside, "master", self.bridge, "up")
            run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            run(*inside, "link", "set", "eth0", "up")
            run(*inside, "link", "set", "lo", "up")

    def down(self) -> None:
        for host in self.hosts:
            # Where a test failed, what it left would keep the namespace alive under no name.
            kill(host.processes())
            subprocess.run(["ip", "link", "del", f"{self.bridge}{host.name}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


@contextmanager
def network() -> Iterator[Hosts]:
    """Two hosts; skips where this machine may not make them."""
    needs("ip", "nsenter", "unshare")
    hosts = Hosts()
    try:
        try:
            hosts.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.down()


@contextmanager
def daemons() -> Iterator[tuple[Path, ExitStack]]:
    """A folder with a path short enough for sockets, and a stack that ends what is put on it."""
    with tempfile.TemporaryDirectory(prefix="lab-", dir="/tmp") as folder, ExitStack() as stack:
        yield Path(folder), stack


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def sshd(hosts: Hosts) -> Iterator[Path]:
    """An sshd on each host, with a host key, a user key and a port of its own; yields the folder of keys."""
    needs("sshd", "ssh", "ssh-keygen")
    Path("/run/sshd").mkdir(exist_ok=True)
    with daemons() as (folder, stack):
        for name in ("host", "key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        shutil.copy(folder / "key.pub", folder / "authorized")
        public = (folder / "host.pub").read_text()
        known = [f"[{host.address}]:{SSH_PORT} {public}" for host in hosts.hosts]
        (folder / "known").write_text("".join(known))
        for host in hosts.hosts:
            config = folder / f"sshd-{host.name}"
            config.write_text(
                f"Port {SSH_PORT}\nListenAddress {host.address}\nHostKey {folder}/host\n"
                f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n"
                f"PasswordAuthentication no\nPidFile none\n"
            )
            server = host.start("sshd", "-D", "-e", "-f", str(config), log=folder / f"{host.name}.log")
            stack.callback(end_process, server)
        for host in hosts.hosts:
            wait_until(lambda host=host: listens(host.address, SSH_PORT), f"sshd on {host.name}")
        yield folder


@contextmanager
def slurm(hosts: Hosts) -> Iterator[dict[str, str]]:
    """Slurm with a node on each host; yields the variables with which its commands find it."""
    needs("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue")
    with daemons() as (folder, stack):
        here, log = socket.gethostname(), folder / "daemons.log"
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        nodes = "".join(
            f"NodeName={h.name} NodeAddr={h.address} CPUs=2 RealMemory=4000\n" for h in hosts.hosts
        )
        config = folder / "slurm.conf"
        config.write_text(
            SLURM.format(folder=folder, here=here, address=hosts.address, port=hosts.port, nodes=nodes)
        )
        for name in ("state", *(f"spool-{name}" for name in NAMES)):
            (folder / name).mkdir()
        with log.open("ab") as out:
            for command in (
                ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
                 f"--socket={folder}/munge", f"--pid-file={folder}/munge.pid",
                 f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"],
                ["slurmctld", "-D", "-f", str(config)],
            ):  # fmt: skip
                started = subprocess.Popen([find(command[0]) or "", *command[1:]], stdout=out, stderr=out)
                stack.callback(end_process, started)
        for host in hosts.hosts:
            node = host.start("slurmd", "-D", "-N", host.name, "-f", str(config), log=log)
            stack.callback(end_process, node)
        variables = {"SLURM_CONF": str(config)}

        def idle() -> bool:
            command = ["sinfo", "--noheader", "--format=%T %D"]
            result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
            return result.stdout.split() == ["idle", "2"]

        wait_until(idle, "Slurm's two nodes", lambda: log.read_text()[-2000:])
        yield variables


SLURM = """
ClusterName=lab
SlurmctldHost={here}({address})
SlurmctldPort={port}
SlurmdPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=2
MinJobAge=10
SchedulerParameters=sched_interval=2,batch_sched_delay=1
{nodes}
PartitionName=lab Nodes=ALL Default=YES OverSubscribe=FORCE:4 State=UP MaxTime=60
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True
