"""Ranks over ssh, one connection each, on hosts that let you log in with a key."""

import re
import shlex
import stat
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import ClusterError
from cluster.places import Place, Start, import_path
from cluster.profiles.base import ReachingProfile, option

_HOST = re.compile(
    r"(?P<host>(?:[^@:*\s-][^@:*\s]*@)?[^@:*\s-][^@:*\s]*)(?::(?P<port>\d+))?(?:\*(?P<slots>[1-9]\d*))?"
)


@dataclass(frozen=True, kw_only=True)
class Ssh(ReachingProfile):
    """Rank k on the k-th slot. The connection's secrets travel inside ssh and never reach the other disk."""

    name = "ssh"
    where = "a few hosts that ssh logs in to with a key"
    program = "ssh"
    package = "openssh-client"

    hosts: tuple[str, ...] = option((), "`user@host:port*slots`; user, port and slots (one) may be left out")
    python: str | None = option(
        None, "a Python with the lab on those hosts; default: this one's path, for hosts that share the disk"
    )
    key: str | None = option(None, "the private key's file; default: ssh's own choice")
    options: tuple[str, ...] = option((), "further arguments of ssh, such as '-J', 'gateway'")

    def slots(self) -> list[tuple[str, str | None]]:
        """Return the (user@host, port) of each rank in turn. Raises ClusterError for what names no host."""
        found: list[tuple[str, str | None]] = []
        for entry in self.hosts:
            parts = _HOST.fullmatch(entry)
            if parts is None:
                raise ClusterError(f"hosts: {entry!r} names no host; 'user@host:22*8' would work")
            found += [(parts["host"], parts["port"])] * int(parts["slots"] or 1)
        return found

    def check_ranks(self, ranks: int) -> None:
        """Raise ClusterError where the hosts have too few slots, or the key is open to others."""
        slots = len(self.slots())
        if ranks > slots:
            raise ClusterError(
                f"ranks={ranks}: hosts={self.hosts!r} give {slots}; hosts=('node1*{ranks}',) would be enough"
            )
        if self.key is not None:
            check_key(Path(self.key).expanduser())

    def start(self, ranks: int, rank: int, owner: tuple[int, float]) -> Start:
        """Return what rank `rank` is told."""
        slots = self.slots()[:ranks]
        before = Counter(slots[:rank])[slots[rank]]
        place = Place(rank, before, Counter(slots)[slots[rank]])
        return replace(super().start(ranks, rank, owner), place=place, stdin=True)

    def ranks_on_first_host(self, ranks: int) -> int:
        """Return how many of `ranks` share rank 0's host."""
        self.check_ranks(ranks)
        return Counter(self.slots()[:ranks])[self.slots()[0]]

    def command(self, ranks: int, rank: int, engine: Sequence[str]) -> list[str]:
        """Return the command line of rank `rank`."""
        host, port = self.slots()[rank]
        # Another Python has its own libraries; this one's may find those of this project on a shared disk.
        shared = [] if self.python else ["env", f"PYTHONPATH={import_path()}"]
        return [
            *("ssh", "-T", "-x"),
            # Nobody is there to type a password: without a key that works, say so at once.
            *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
            *(["-i", str(Path(self.key).expanduser()), "-o", "IdentitiesOnly=yes"] if self.key else []),
            *(["-p", port] if port else []),
            *self.options,
            host,
            shlex.join([*shared, *engine]),
        ]

    def interpreter(self) -> str:
        """Return the Python that the ranks run under."""
        return self.python or sys.executable


def check_key(path: Path) -> None:
    """Raise ClusterError unless the private key at `path` is there and only its owner can read it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ClusterError(f"key={str(path)!r}: {error.strerror}") from None
    if mode & 0o077:
        raise ClusterError(f"key={str(path)!r} can be read by others (mode {mode:04o}); chmod 600 would work")
