"""The base of a profile: where ranks run, how they are started, and their environment variables."""

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from cluster.capacity import check_controller
from cluster.environment import Variable
from cluster.errors import ClusterError
from cluster.network import LOOPBACK, check_ports, outward_address
from cluster.placement import Start
from cluster.watchdog import this_process

# How many ports ipyparallel's controller opens for engines.
ENGINE_PORTS = 9
# The ranks of one node, because most nodes have so many GPUs.
NODE_RANKS = 8


def option(default: Any, why: str) -> Any:
    """Declare a field of a profile.

    Args:
        default: The default of the field.
        why: What the field does, and the reason for the default.
    """
    return field(default=default, metadata={"why": why})


@dataclass(frozen=True, kw_only=True)
class Profile(ABC):
    """Where ranks run. `Cluster(..., profile=NAME, field=value)` sets the fields.

    Attributes:
        name: The name of the profile.
        where: Where it is to be used, in one line.
        program: The program that must be installed, None where none is needed.
        package: The Debian package of that program.
        variables: Environment variables for every rank.
        numa: Whether each rank is bound to the cores of its GPU's NUMA node.
    """

    name: ClassVar[str]
    where: ClassVar[str]
    program: ClassVar[str | None] = None
    package: ClassVar[str | None] = None

    variables: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"why": "environment variables for every rank; they override those of the lab"},
    )
    numa: bool = option(
        False, "bind each rank to the cores of its GPU's NUMA node; most hosts have only one node"
    )

    @abstractmethod
    def check_ranks(self, ranks: int) -> None:
        """Check that the profile can start so many ranks.

        Raises:
            ClusterError: It cannot.
        """

    def command(self, ranks: int, rank: int) -> list[str]:
        """Return the command line that starts a rank. It runs on this machine.

        Args:
            ranks: The number of ranks.
            rank: The rank. Where mpiexec starts all ranks, the command line is that of all ranks.
        """
        return self.engine(ranks, rank)

    def check(self, ranks: int) -> None:
        """Check that the ranks can start, before any of them is launched.

        Raises:
            ClusterError: They cannot.
        """
        check_rank_count(ranks)
        check_controller(ranks)
        if self.program is not None and shutil.which(self.program) is None:
            raise ClusterError(
                f"profile {self.name!r} needs {self.program}, which is not installed here; "
                f"Debian has it in {self.package}"
            )
        self.check_ranks(ranks)

    def start(self, ranks: int, rank: int) -> Start:
        """Return what a rank has to know at its start. It ends with this process.

        Args:
            ranks: The number of ranks.
            rank: The rank.
        """
        variables = {variable.name: variable.value for variable in self.settings()}
        return Start(owner=this_process(), numa=self.numa, variables=variables)

    def engine(self, ranks: int, rank: int) -> list[str]:
        """Return the command line of the rank itself, on its own host."""
        return self.start(ranks, rank).command(self.interpreter())

    def ranks_on_first_host(self, ranks: int) -> int:
        """Return how many of `ranks` share rank 0's host."""
        return ranks

    def interpreter(self) -> str:
        """Return the path of the Python that runs the ranks."""
        return sys.executable

    def settings(self) -> list[Variable]:
        """Return the environment variables that this profile sets for every rank. The last of a name wins."""
        return [Variable(name, value, "set by the profile") for name, value in self.variables.items()]

    def controller_address(self) -> str:
        """Return the address at which the controller listens for engines.

        Raises:
            ClusterError: It cannot listen there.
        """
        return LOOPBACK

    def controller_arguments(self) -> list[str]:
        """Return further arguments of the controller: encryption by CURVE.

        On loopback, too: every user of this machine can connect to it, and without the key subscribe to what
        the ranks print and send.
        """
        return ["--IPController.enable_curve=True"]

    def store_folder(self, directory: Path) -> Path | None:
        """Return the folder for the rendezvous of the ranks, None for a TCP port.

        Args:
            directory: The private directory of the cluster, which only this host has.
        """
        return directory

    def log_folder(self) -> str | None:
        """Return the folder for the cluster's directory, None for the system's folder for temporary files."""
        return None


@dataclass(frozen=True, kw_only=True)
class RemoteProfile(Profile):
    """A profile whose ranks run on other hosts. The controller listens outside loopback, with encryption.

    Attributes:
        address: The address at which the controller listens. None chooses one.
        ports: The ports of the controller. None chooses free ones.
    """

    address: str | None = option(
        None,
        "where the controller listens; default: this host's address on the route to other networks",
    )
    ports: str | None = option(
        None,
        f"{ENGINE_PORTS} ports for the controller, such as 7000-7008, for a firewall; default: any",
    )

    def start(self, ranks: int, rank: int) -> Start:
        """Return what a rank has to know at its start, without the owner, which another host cannot see."""
        return replace(super().start(ranks, rank), owner=None)

    def controller_address(self) -> str:
        """Return the address at which the controller listens for engines, after a check of its ports."""
        address = self.address or outward_address()
        check_ports(address, self.port_list())
        return address

    def controller_arguments(self) -> list[str]:
        """Return further arguments of the controller: encryption by CURVE, and the ports."""
        ports = [f"--IPController.engine_ports={self.ports}"] if self.ports else []
        return [*super().controller_arguments(), *ports]

    def store_folder(self, directory: Path) -> Path | None:
        """Return None: the ranks are on other hosts, which do not see the directory."""
        return None

    def port_list(self) -> list[int]:
        """Return the ports of the controller, an empty list for any.

        Raises:
            ClusterError: `ports` is not a list of ports, or has too few.
        """
        ports: list[int] = []
        try:
            for part in (self.ports or "").split(",") if self.ports else []:
                first, _, last = part.partition("-")
                ports += range(int(first), int(last or first) + 1)
        except ValueError:
            ports = []
        if self.ports and (len(set(ports)) < ENGINE_PORTS or not all(0 < port < 2**16 for port in ports)):
            raise ClusterError(
                f"ports={self.ports!r}: {ENGINE_PORTS} ports are needed; '7000-7008' would work"
            )
        return ports


def check_rank_count(ranks: int) -> None:
    """Check that `ranks` is a whole number from 1 to 2^31 - 1, as MPI and Slurm count.

    Raises:
        ClusterError: It is not.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ClusterError(f"ranks={ranks!r}: a whole number of ranks is needed, at least 1")
    if ranks >= 2**31:
        raise ClusterError(f"ranks={str(ranks)[:20]}...: 2147483647 is the largest number of ranks")
