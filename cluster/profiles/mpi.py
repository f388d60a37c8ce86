"""Ranks started by Open MPI's mpiexec, on this host or on those of a host file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from cluster.profiles.base import ReachingProfile, option


@dataclass(frozen=True, kw_only=True)
class Mpi(ReachingProfile):
    """One mpiexec starts all ranks. They do not speak MPI: it only starts and ends them."""

    name = "mpi"
    where = "hosts on which mpiexec already starts programs"
    program = "mpiexec"
    package = "openmpi-bin"

    hostfile: str | None = option(None, "a line a host, as `node1 slots=8`; default: this host alone")
    options: tuple[str, ...] = option((), "further arguments of mpiexec, such as --allow-run-as-root")

    def check_ranks(self, ranks: int) -> None:
        """Raise ClusterError where the host file is missing or has too few slots."""
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

    def command(self, ranks: int, rank: int, engine: Sequence[str]) -> list[str]:
        """Return the command line of mpiexec."""
        return [
            *("mpiexec", "-n", str(ranks)),
            *(["--hostfile", self.hostfile] if self.hostfile else ["--oversubscribe"]),
            # The ranks share out the cores themselves; bound to one core each, they would find only that.
            *("--bind-to", "none"),
            # A rank that ends is named by the lab, and leaves the others to say what they saw.
            *("--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"),
            # By name: values on a command line can be read by everyone on the host.
            *("-x", "IPP_CONNECTION_INFO", "-x", "PYTHONPATH"),
            *self.options,
            *engine,
        ]
