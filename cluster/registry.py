"""The clusters of this user on this machine, one file for each, so that orphaned processes can be ended."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs
import psutil

from cluster.errors import ClusterError
from cluster.permissions import cluster_directories, is_cluster_directory
from cluster.processes import end
from cluster.watchdog import CREATED_TOLERANCE_SECONDS, is_alive

PATIENCE_SECONDS = 1.0

# The file in a cluster's directory that names the process that made it.
OWNER = "owner.json"


@dataclass(frozen=True)
class ProcessId:
    """A process. Its id alone does not identify it, because the system uses ids again.

    Attributes:
        pid: Its id.
        created: Its creation time, in seconds since the epoch.
    """

    pid: int
    created: float

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessId":
        """Return the identity of a process that runs."""
        return cls(process.pid, process.create_time())

    def process(self) -> psutil.Process | None:
        """Return the process, None where it has ended."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < CREATED_TOLERANCE_SECONDS
        except psutil.NoSuchProcess:
            return None
        return process if same and is_alive(process) else None


@dataclass(frozen=True)
class Entry:
    """One cluster.

    Attributes:
        name: The name of its directory.
        profile: The name of its profile.
        ranks: The number of its ranks.
        host: The name of the host that it was started on.
        started: When it was started, in seconds since the epoch.
        owner: The process that started it.
        processes: Its processes on this machine.
        directory: The directory of its connection files and logs.
    """

    name: str
    profile: str
    ranks: int
    host: str
    started: float
    owner: ProcessId
    processes: tuple[ProcessId, ...]
    directory: str

    @property
    def orphaned(self) -> bool:
        """Whether the process that started the cluster is gone."""
        return self.owner.process() is None

    def running(self) -> list[psutil.Process]:
        """Return the processes of the cluster that still run."""
        return [process for one in self.processes if (process := one.process()) is not None]


def folder() -> Path:
    """Return the folder of the entries. It belongs to this user alone."""
    return platformdirs.user_state_path("longcontext-lab") / "clusters"


def record(profile: str, ranks: int, processes: set[psutil.Process], directory: Path) -> None:
    """Write the entry of a cluster that this process owns. An earlier entry is replaced.

    Args:
        profile: The name of the cluster's profile.
        ranks: The number of its ranks.
        processes: Its processes on this machine.
        directory: Its directory.

    Raises:
        ClusterError: The folder cannot be written, for example because the disk is full.
    """
    identities = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            identities.append(ProcessId.of(process))
    entry = Entry(
        name=directory.name,
        profile=profile,
        ranks=ranks,
        host=socket.gethostname(),
        started=time.time(),
        owner=ProcessId.of(psutil.Process()),
        processes=tuple(identities),
        directory=str(directory),
    )
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        # Under another name first, so that the folder never has an entry that is half written.
        part = _path(entry.name).with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(entry)))
        part.replace(_path(entry.name))
    except OSError as error:
        raise ClusterError(f"{folder()} cannot be written: {error.strerror}") from error


def claim(directory: Path) -> None:
    """Write into a cluster's directory that this process owns it, before its cluster has an entry.

    Raises:
        ClusterError: The file cannot be written.
    """
    owner = {"host": socket.gethostname(), **asdict(ProcessId.of(psutil.Process()))}
    try:
        (directory / OWNER).write_text(json.dumps(owner))
    except OSError as error:
        raise ClusterError(f"{directory} cannot be written: {error.strerror}") from error


def forget(directory: Path) -> None:
    """Remove the entry of the cluster with this directory."""
    _path(directory.name).unlink(missing_ok=True)


def entries() -> list[Entry]:
    """Return the clusters that were started on this machine and not stopped, the oldest first."""
    return sorted(_read(), key=lambda entry: entry.started)


def clean() -> list[tuple[str, int]]:
    """End the processes of clusters whose owner is gone, and of no other cluster; remove their directories.

    Returns:
        The name of each such cluster, and how many of its processes still ran.
    """
    cleaned = []
    for entry in entries():
        if entry.orphaned:
            processes = entry.running()
            end(processes, PATIENCE_SECONDS)
            # An entry is a file that anything may have written: it removes no other directory.
            if is_cluster_directory(Path(entry.directory)):
                shutil.rmtree(entry.directory, ignore_errors=True)
            _path(entry.name).unlink(missing_ok=True)
            cleaned.append((entry.name, len(processes)))
    for directory in _abandoned():
        shutil.rmtree(directory, ignore_errors=True)
        cleaned.append((directory.name, 0))
    return cleaned


def status_text() -> str:
    """Return a text with one line for each cluster."""
    clusters = entries()
    lines = [
        f"{entry.name}  {entry.profile}, {entry.ranks} ranks, {_since(entry.started)}, "
        f"owner {entry.owner.pid} {'gone' if entry.orphaned else 'alive'}, "
        f"{len(entry.running())} of {len(entry.processes)} processes alive"
        for entry in clusters
    ]
    if any(entry.orphaned for entry in clusters):
        lines.append("lab cluster clean ends the clusters whose owner is gone")
    return "\n".join(lines) or "no cluster is running"


def _abandoned() -> Iterator[Path]:
    """Yield the directories of clusters whose owner was killed before it wrote an entry."""
    for directory in cluster_directories():
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((directory / OWNER).read_text())
            here = values.pop("host") == socket.gethostname()
            if here and not _path(directory.name).exists() and ProcessId(**values).process() is None:
                yield directory


def _path(name: str) -> Path:
    return folder() / f"{name}.json"


def _read() -> Iterator[Entry]:
    for path in folder().glob("*.json"):
        # Another process may have removed the file in the meantime, or a full disk may have cut it short.
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads(path.read_text())
            owner, processes = (
                ProcessId(**values.pop("owner")),
                tuple(ProcessId(**one) for one in values.pop("processes")),
            )
            entry = Entry(owner=owner, processes=processes, **values)
            # Numbers of another kind raise an error here, and not where they are used.
            _since(entry.started)
            for one in (owner, *processes):
                one.process()
            if entry.host == socket.gethostname():
                yield entry


def _since(started: float) -> str:
    minutes = (time.time() - started) / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
