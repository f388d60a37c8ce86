"""What clusters this user has on this machine, a file each: what was orphaned can be found and ended."""

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
from cluster.processes import end
from cluster.watchdog import CREATED_TOLERANCE_SECONDS, is_alive

PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Mark:
    """A process: its id and when it was created, for an id alone may have a new bearer."""

    pid: int
    created: float

    @classmethod
    def of(cls, process: psutil.Process) -> "Mark":
        """The mark of a process that lives."""
        return cls(process.pid, process.create_time())

    def living(self) -> psutil.Process | None:
        """The process, if it still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < CREATED_TOLERANCE_SECONDS
        except psutil.NoSuchProcess:
            return None
        return process if same and is_alive(process) else None


@dataclass(frozen=True)
class Entry:
    """One cluster: whose it is, what runs for it on this machine, where its logs are."""

    name: str
    profile: str
    ranks: int
    host: str
    started: float
    owner: Mark
    processes: tuple[Mark, ...]
    directory: str

    @property
    def orphaned(self) -> bool:
        """Whether the process that started it is gone."""
        return self.owner.living() is None

    def living(self) -> list[psutil.Process]:
        """Its processes that still run."""
        return [found for mark in self.processes if (found := mark.living()) is not None]


def folder() -> Path:
    """Where the entries are, for this user only."""
    return platformdirs.user_state_path("longcontext-lab") / "clusters"


def record(profile: str, ranks: int, processes: set[psutil.Process], directory: Path) -> None:
    """Write the entry of a cluster that this process owns, or write it anew.

    Raises:
        ClusterError: the folder cannot be written, which a full disk does.
    """
    marks = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            marks.append(Mark.of(process))
    entry = Entry(
        name=directory.name,
        profile=profile,
        ranks=ranks,
        host=socket.gethostname(),
        started=time.time(),
        owner=Mark.of(psutil.Process()),
        processes=tuple(marks),
        directory=str(directory),
    )
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        # Under another name first: whoever reads the folder finds whole files only.
        part = _path(entry.name).with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(entry)))
        part.replace(_path(entry.name))
    except OSError as error:
        raise ClusterError(f"{folder()} cannot be written: {error.strerror}") from error


def forget(directory: Path) -> None:
    """Remove the entry of the cluster that had this directory."""
    _path(directory.name).unlink(missing_ok=True)


def entries() -> list[Entry]:
    """Every cluster that was recorded on this machine and not stopped, the oldest first."""
    return sorted(_read(), key=lambda entry: entry.started)


def clean() -> list[tuple[Entry, int]]:
    """End what is left of clusters whose owner is gone, and of no other; say how many processes each had."""
    cleaned = []
    for entry in entries():
        if entry.orphaned:
            living = entry.living()
            end(living, PATIENCE_SECONDS)
            shutil.rmtree(entry.directory, ignore_errors=True)
            _path(entry.name).unlink(missing_ok=True)
            cleaned.append((entry, len(living)))
    return cleaned


def status_text() -> str:
    """One line a cluster."""
    found = entries()
    lines = [
        f"{entry.name}  {entry.profile}, {entry.ranks} ranks, {_since(entry.started)}, "
        f"owner {entry.owner.pid} {'gone' if entry.orphaned else 'alive'}, "
        f"{len(entry.living())} of {len(entry.processes)} processes alive"
        for entry in found
    ]
    if any(entry.orphaned for entry in found):
        lines.append("lab cluster clean ends what has no owner")
    return "\n".join(lines) or "no cluster is running"


def _path(name: str) -> Path:
    return folder() / f"{name}.json"


def _read() -> Iterator[Entry]:
    for path in folder().glob("*.json"):
        # One that another process has just removed, or was cut short by a full disk, is none.
        with suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(path.read_text())
            owner, processes = Mark(**facts.pop("owner")), tuple(Mark(**m) for m in facts.pop("processes"))
            entry = Entry(owner=owner, processes=processes, **facts)
            if entry.host == socket.gethostname():
                yield entry


def _since(started: float) -> str:
    minutes = (time.time() - started) / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
