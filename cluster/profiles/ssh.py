"""Ranks over ssh, with one connection for each, on hosts that accept a key."""

import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, replace
from os.path import expanduser  # unlike Path.expanduser, it raises no error for an unknown user
from pathlib import Path

from cluster.errors import ClusterError
from cluster.permissions import mode
from cluster.placement import Placement, Start, import_path
from cluster.profiles.base import RemoteProfile, option

_HOST = re.compile(
    r"(?P<host>(?:[^@:*\s-][^@:*\s]*@)?[^@:*\s-][^@:*\s]*)(?::(?P<port>\d+))?(?:\*(?P<slots>[1-9]\d*))?"
)


@dataclass(frozen=True, kw_only=True)
class Ssh(RemoteProfile):
    """Starts rank k on the k-th slot of the hosts.

    The keys of the connection are sent through ssh and are not written to the disks of the hosts.

    Attributes:
        hosts: The hosts, as `user@host:port*slots`.
        python: The path of the Python on those hosts.
        key: The path of the private key.
        options: Further arguments of ssh.
    """

    name = "ssh"
    where = "a few hosts that ssh logs in to with a key"
    program = "ssh"
    package = "openssh-client"

    hosts: tuple[str, ...] = option(
        (), "`user@host:port*slots` each; user, port and slots may be left out, and slots is then 1"
    )
    python: str | None = option(
        None,
        "a Python with the lab on those hosts; default: the path of this one, for hosts that share the disk",
    )
    key: str | None = option(None, "the file of the private key; default: ssh chooses")
    options: tuple[str, ...] = option((), "further arguments of ssh, such as '-J', 'gateway'")

    def slots(self) -> list[tuple[str, str | None]]:
        """Return the pair (user@host, port) of each slot.

        Raises:
            ClusterError: An entry of `hosts` does not name a host.
        """
        slots: list[tuple[str, str | None]] = []
        for entry in self.hosts:
            parts = _HOST.fullmatch(entry)
            if parts is None:
                raise ClusterError(f"hosts: {entry!r} names no host; 'user@host:22*8' would work")
            slots += [(parts["host"], parts["port"])] * int(parts["slots"] or 1)
        return slots

    def check_ranks(self, ranks: int) -> None:
        """Check the number of slots, and the key.

        Raises:
            ClusterError: The hosts have too few slots, or other users can read the key.
        """
        slots = len(self.slots())
        if ranks > slots:
            raise ClusterError(
                f"ranks={ranks}: hosts={self.hosts!r} have {slots} slots; hosts=('node1*{ranks}',) would work"
            )
        if self.key is not None:
            check_key(Path(expanduser(self.key)))

    def start(self, ranks: int, rank: int) -> Start:
        """Return what a rank has to know at its start, with its placement."""
        slots = self.slots()[:ranks]
        before = Counter(slots[:rank])[slots[rank]]
        placement = Placement(rank, before, Counter(slots)[slots[rank]])
        return replace(super().start(ranks, rank), placement=placement, stdin=True)

    def ranks_on_first_host(self, ranks: int) -> int:
        """Return how many of `ranks` share rank 0's host."""
        self.check_ranks(ranks)
        return Counter(self.slots()[:ranks])[self.slots()[0]]

    def command(self, ranks: int, rank: int) -> list[str]:
        """Return the command line of ssh for a rank."""
        host, port = self.slots()[rank]
        # Another Python has libraries of its own. The same Python finds those of this process on a shared
        # disk.
        shared = [] if self.python else ["env", f"PYTHONPATH={import_path()}"]
        return [
            *("ssh", "-T", "-x"),
            # Nobody can type a password. Without a valid key, ssh must fail at once.
            *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
            *(["-i", expanduser(self.key), "-o", "IdentitiesOnly=yes"] if self.key else []),
            *(["-p", port] if port else []),
            *self.options,
            host,
            shlex.join([*shared, *self.engine(ranks, rank)]),
        ]

    def interpreter(self) -> str:
        """Return the path of the Python that runs the ranks."""
        return self.python or sys.executable


def check_key(path: Path) -> None:
    """Check that there is a private key at `path`, and that only its owner can read it.

    Raises:
        ClusterError: There is none, or other users can read it.
    """
    try:
        own = mode(path)
    except OSError as error:
        raise ClusterError(f"key={str(path)!r}: {error.strerror}") from None
    if own & 0o077:
        raise ClusterError(f"key={str(path)!r} can be read by others (mode {own:04o}); chmod 600 would work")
