"""All ranks on this machine: the cores shared out, one GPU a rank where there are GPUs, loopback only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.capacity import check_capacity
from cluster.places import Place, Start
from cluster.profiles.base import Profile


@dataclass(frozen=True, kw_only=True)
class Local(Profile):
    """Ranks as processes of this machine."""

    name = "local"
    where = "a laptop, or a machine with GPUs or none"

    def check_ranks(self, ranks: int) -> None:
        """Raise ClusterError unless this machine has the memory, or the GPUs."""
        check_capacity(ranks)

    def command(self, ranks: int, rank: int, engine: Sequence[str]) -> list[str]:
        """Return the command line of rank `rank`."""
        return list(engine)

    def start(self, ranks: int, rank: int, owner: tuple[int, float]) -> Start:
        """Return what rank `rank` is told."""
        return replace(super().start(ranks, rank, owner), place=Place(rank, rank, ranks))
