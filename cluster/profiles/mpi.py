"""Ranks that Open MPI's mpiexec starts, on this host or on the hosts of a host file."""

from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from cluster.profiles.base import RemoteProfile, option


@dataclass(frozen=True, kw_only=True)
class Mpi(RemoteProfile):
    """Starts and ends all ranks by one mpiexec. The ranks themselves do not use MPI.

    Attributes:
        hostfile: The path of the host file.
        options: Further arguments of mpiexec.
    """

    name = "mpi"
    where = "hosts on which mpiexec already starts programs"
    program = "mpiexec"
    package = "openmpi-bin"

    hostfile: str | None = option(
        None, "a file with a line for each host, such as `node1 slots=8`; default: this host alone"
    )
    options: tuple[str, ...] = option((), "further arguments of mpiexec, such as --allow-run-as-root")

    def check_ranks(self, ranks: int) -> None:
        """Check that the host file has enough slots.

        Raises:
            ClusterError: It is missing, or has too few slots.
        """
        if self.hostfile is None:
            return
        try:
            text = Path(self.hostfile).read_text()
        except OSError as error:
            raise ClusterError(f"hostfile={self.hostfile!r}: {error.strerror}") from None
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        slots = sum(
            int(next((word[6:] for word in line if word.startswith("slots=")), "1")) for line in lines if line
        )
        if ranks > slots:
            raise ClusterError(
                f"ranks={ranks}: {self.hostfile} has {slots} slots; ranks={slots} would work, or more slots"
            )

    def command(self, ranks: int, rank: int) -> list[str]:
        """Return the command line of mpiexec."""
        return [
            *("mpiexec", "-n", str(ranks)),
            *(["--hostfile", self.hostfile] if self.hostfile else ["--oversubscribe"]),
            # The ranks share the cores themselves. mpiexec would bind each rank to one core.
            *("--bind-to", "none"),
            # The lab reports a rank that ends. mpiexec would end the other ranks before they report.
            *("--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"),
            # By name, because everyone on the host can read the values on a command line.
            *("-x", "IPP_CONNECTION_INFO", "-x", "PYTHONPATH"),
            *self.options,
            *self.engine(ranks, rank),
        ]
