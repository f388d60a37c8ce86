"""The clusters of this user on this machine, one file for each, so that orphaned processes can be ended."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from cluster.errors import ClusterError
from cluster.folders import state_folder, write_whole
from cluster.permissions import is_cluster_directory
from cluster.processes import end
from cluster.temporary import remove_left
from cluster.watchdog import ProcessId, this_process

PATIENCE_SECONDS = 1.0


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

    def line(self) -> str:
        """Return a line on the cluster, its owner and its processes."""
        minutes = (time.time() - self.started) / 60
        since = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
        return (
            f"{self.name}  {self.profile}, {self.ranks} ranks, {since}, "
            f"owner {self.owner.pid} {'gone' if self.orphaned else 'alive'}, "
            f"{len(self.running())} of {len(self.processes)} processes alive"
        )


def folder() -> Path:
    """Return the folder of the entries. It belongs to this user alone."""
    return state_folder() / "clusters"


def record(profile: str, ranks: int, processes: set[psutil.Process], directory: Path) -> None:
    """Write the entry of a cluster that this process owns. An earlier entry is replaced.

    The first entry is written before the cluster has keys and processes, so that what an owner leaves that is
    killed is found.

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
        owner=this_process(),
        processes=tuple(identities),
        directory=str(directory),
    )
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(_path(entry.name), json.dumps(asdict(entry)).encode())
    except OSError as error:
        raise ClusterError(
            f"{folder()} cannot be written: {error.strerror}; set XDG_STATE_HOME to a folder of your own"
        ) from error


def forget(directory: Path) -> None:
    """Remove the entry of the cluster with this directory."""
    with suppress(OSError):  # where none can be written, none was
        _path(directory.name).unlink()


def entries() -> list[Entry]:
    """Return the clusters that were started on this machine and not stopped, the oldest first."""
    return sorted(_read(), key=lambda entry: entry.started)


def clean() -> list[tuple[str, int]]:
    """End the processes of clusters whose owner is gone, and of no other cluster; remove their directories.

    The temporary folders of other processes that are gone are removed too.

    Returns:
        The name of each such cluster or folder, and how many of its processes still ran.
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
    return cleaned + [(folder.name, 0) for folder in remove_left()]


def status_text() -> str:
    """Return a text with one line for each cluster."""
    clusters = entries()
    lines = [entry.line() for entry in clusters]
    if any(entry.orphaned for entry in clusters):
        lines.append("lab cluster clean ends the clusters whose owner is gone")
    return "\n".join(lines) or "no cluster is running"


def _path(name: str) -> Path:
    return folder() / f"{name}.json"


def _read() -> Iterator[Entry]:
    for path in folder().glob("*.json"):
        # Another process may have removed the file in the meantime, or a full disk may have cut it short.
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads(path.read_text())
            # `str.strip` refuses the number that an earlier version of the lab wrote.
            identities = (values.pop("owner"), *values.pop("processes"))
            owner, *processes = (ProcessId(pid, str.strip(started)) for pid, started in identities)
            entry = Entry(owner=owner, processes=tuple(processes), **values)
            # Where a value is of another kind, its line raises an error here, and not where it is used.
            if entry.line() and entry.host == socket.gethostname():
                yield entry
