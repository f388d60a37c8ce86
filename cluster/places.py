"""Which rank a process is, of how many, and which of those on its host; what its launcher says of it."""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from cluster.errors import ClusterError

# Deaths are told by nannies, so a machine too busy to answer for a minute need not lose an engine.
ENGINE_ARGUMENTS = ("--IPEngine.max_heartbeat_misses=120", "--IPEngine.timeout=30")


@dataclass(frozen=True)
class Place:
    """Rank `rank` of the group, and the `local_rank`-th of the `local_ranks` on its host."""

    rank: int
    local_rank: int
    local_ranks: int


@dataclass(frozen=True)
class Start:
    """What a process must know to become a rank, sent to it as JSON on its command line.

    `place` is None where the launcher (mpiexec, srun) tells each process by its environment. `owner` is the
    id and the creation time of the process to outlive by seconds only; None on hosts that do not see it.
    `stdin` says that the connection comes on the standard input, whose end is the rank's. `numa` asks for the
    cores nearest to the rank's device. `variables` are set last, over the lab's own.
    """

    place: Place | None = None
    owner: tuple[int, float] | None = None
    stdin: bool = False
    numa: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def command(self, python: str) -> list[str]:
        """Return the command line that becomes this rank."""
        return [python, "-m", "cluster.engine", json.dumps(asdict(self)), *ENGINE_ARGUMENTS]

    @classmethod
    def from_json(cls, text: str) -> "Start":
        """Return what `command` wrote."""
        said = json.loads(text)
        place = Place(**said.pop("place")) if said["place"] else said.pop("place")
        owner = said.pop("owner")
        return cls(place=place, owner=tuple(owner) if owner else None, **said)


def import_path() -> str:
    """Return a PYTHONPATH with which a process imports what this one can import."""
    entries = [entry or os.getcwd() for entry in sys.path]
    return os.pathsep.join(dict.fromkeys(entries))


def launched_place(environment: Mapping[str, str]) -> Place:
    """Return the place that mpiexec or srun gave this process. Raises ClusterError where neither did.

    mpiexec first: inside a Slurm job its processes see the job's variables too.
    """
    for names in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if all(name in environment for name in names):
            return Place(*(int(environment[name]) for name in names))
    if "SLURM_PROCID" in environment:
        counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        return Place(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_LOCALID"]),
            counts[int(environment["SLURM_NODEID"])],
        )
    raise ClusterError("neither mpiexec nor srun started this process: it cannot tell which rank it is")


def tasks_per_node(text: str) -> list[int]:
    """Return Slurm's `2(x3),1` as [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
