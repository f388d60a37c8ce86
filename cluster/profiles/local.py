"""All ranks on this machine. They share the cores; where there are GPUs, each rank has one of them."""

from dataclasses import dataclass, replace

from cluster.capacity import check_capacity
from cluster.placement import Placement, Start
from cluster.profiles.base import Profile


@dataclass(frozen=True, kw_only=True)
class Local(Profile):
    """Runs the ranks as processes of this machine, on the loopback interface."""

    name = "local"
    where = "a laptop, or a machine with GPUs or none"

    def check_ranks(self, ranks: int) -> None:
        """Check that this machine has enough memory, or enough GPUs.

        Raises:
            ClusterError: It has not.
        """
        check_capacity(ranks)

    def start(self, ranks: int, rank: int) -> Start:
        """Return what a rank has to know at its start, with its placement."""
        return replace(super().start(ranks, rank), placement=Placement(rank, rank, ranks))
