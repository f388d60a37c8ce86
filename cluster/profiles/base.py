"""What a profile is: where ranks run, how each is started, and what each finds in its environment."""

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cluster.errors import ClusterError
from cluster.network import LOOPBACK, check_free, outward_address
from cluster.places import Start

# The ports at which ipyparallel's controller serves engines.
ENGINE_PORTS = 9


def option(default: Any, why: str) -> Any:
    """A profile's field, with what it does and why its default is what it is."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"why": why})
    return field(default=default, metadata={"why": why})


@dataclass(frozen=True, kw_only=True)
class Profile(ABC):
    """A place for ranks. Its fields are what `Cluster(..., profile=NAME, field=value)` overrides.

    `name` is what it is called, `where` says in a line where it belongs, `program` what it needs installed
    and `package` where Debian has that.
    """

    name: ClassVar[str]
    where: ClassVar[str]
    program: ClassVar[str | None] = None
    package: ClassVar[str | None] = None

    variables: Mapping[str, str] = option({}, "environment variables for every rank, over the lab's own")
    numa: bool = option(False, "bind each rank to the cores of its GPU's NUMA node; most hosts have only one")

    @abstractmethod
    def check_ranks(self, ranks: int) -> None:
        """Raise ClusterError unless the profile can give so many."""

    @abstractmethod
    def command(self, ranks: int, rank: int, engine: Sequence[str]) -> list[str]:
        """Return the command line, run here, by which `engine` becomes rank `rank`.

        Where mpiexec or srun starts them all, it becomes every rank.
        """

    def check(self, ranks: int) -> None:
        """Raise ClusterError, before anything is launched, for what would not come up."""
        check_whole(ranks)
        if self.program is not None and shutil.which(self.program) is None:
            raise ClusterError(
                f"profile {self.name!r} needs {self.program}, which is not installed here; "
                f"Debian has it in {self.package}"
            )
        self.check_ranks(ranks)

    def start(self, ranks: int, rank: int, owner: tuple[int, float]) -> Start:
        """Return what rank `rank` is told; `owner` is the process whose end is its end."""
        return Start(owner=owner, numa=self.numa, variables=self.settings())

    def interpreter(self) -> str:
        """Return the Python that the ranks run under."""
        return sys.executable

    def settings(self) -> dict[str, str]:
        """Return the variables that every rank gets from this profile."""
        return dict(self.variables)

    def reasons(self) -> dict[str, str]:
        """Return why the profile sets a variable, for those it sets itself."""
        return {}

    def controller_address(self) -> str:
        """Return the address at which the controller serves the engines. Raises ClusterError if it cannot."""
        return LOOPBACK

    def controller_arguments(self) -> list[str]:
        """Return what the controller is told besides its address."""
        # Loopback is not encrypted: who can listen there can read this process's memory as well.
        return []

    def log_folder(self) -> str | None:
        """Return the folder for the cluster's directory and logs, None for the system's temporary one."""
        return None


@dataclass(frozen=True, kw_only=True)
class ReachingProfile(Profile):
    """A profile whose ranks are on other hosts: the controller leaves loopback, and is encrypted there."""

    address: str | None = option(
        None, "where the controller serves engines; default: this host's address on the way outward"
    )
    ports: str | None = option(
        None,
        f"{ENGINE_PORTS} of them for the controller, as 7000-7008, for firewalls; default: any",
    )

    def start(self, ranks: int, rank: int, owner: tuple[int, float]) -> Start:
        """Return what rank `rank` is told: on another host the owner's process id means nothing."""
        return Start(numa=self.numa, variables=self.settings())

    def controller_address(self) -> str:
        """Return the address at which the controller serves the engines."""
        address = self.address or outward_address()
        check_free(address, self.port_list())
        return address

    def controller_arguments(self) -> list[str]:
        """Return what the controller is told besides its address: CURVE on, and the ports."""
        curve = ["--IPController.enable_curve=True"]
        return [*curve, f"--IPController.engine_ports={self.ports}"] if self.ports else curve

    def ranks_on_first_host(self, ranks: int) -> int:
        """Return how many of `ranks` share rank 0's host."""
        return ranks

    def port_list(self) -> list[int]:
        """Return the ports asked for. Raises ClusterError where they are no such list, or too few."""
        found: list[int] = []
        try:
            for part in (self.ports or "").split(",") if self.ports else []:
                first, _, last = part.partition("-")
                found += range(int(first), int(last or first) + 1)
        except ValueError:
            found = []
        if self.ports and (len(set(found)) < ENGINE_PORTS or not all(0 < port < 2**16 for port in found)):
            raise ClusterError(
                f"ports={self.ports!r}: {ENGINE_PORTS} ports are needed; '7000-7008' would work"
            )
        return found


def check_whole(ranks: int) -> None:
    """Raise ClusterError unless `ranks` is a whole number of ranks."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ClusterError(f"ranks={ranks!r}: a whole number of ranks is needed, at least 1")
