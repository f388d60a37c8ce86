"""Which rank a process is, of how many, and which of the ranks on its host; from its launcher."""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster.errors import ClusterError
from cluster.watchdog import ProcessId

# Nannies report deaths. An engine on a machine that is too busy to answer for a minute need not be lost.
ENGINE_ARGUMENTS = ("--IPEngine.max_heartbeat_misses=120", "--IPEngine.timeout=30")


@dataclass(frozen=True)
class Placement:
    """The place of a process among the ranks.

    Attributes:
        rank: Its rank in the group.
        local_rank: Its number among the ranks of its host, from 0.
        local_ranks: How many ranks its host has.
    """

    rank: int
    local_rank: int
    local_ranks: int


@dataclass(frozen=True)
class Start:
    """What a process must know to become a rank. It is sent as JSON on the command line.

    Attributes:
        placement: The rank to become. None where the launcher (mpiexec, srun) tells it by the environment.
        owner: The process that started the cluster. The rank ends a few seconds after it. None on another
            host, where that process cannot be seen.
        stdin: Whether the connection arrives on the standard input. The rank ends when that is closed.
        numa: Whether the rank is bound to the cores that are nearest to its device.
        variables: Environment variables. They override those that the lab sets.
        folder: Where the ranks look for modules first: that of the notebook.
    """

    placement: Placement | None = None
    owner: ProcessId | None = None
    stdin: bool = False
    numa: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str = field(default_factory=os.getcwd)

    def arguments(self) -> list[str]:
        """Return the arguments with which `cluster.engine` becomes this rank."""
        return [json.dumps(asdict(self)), *ENGINE_ARGUMENTS]

    def command(self, python: str) -> list[str]:
        """Return the command line of a process that becomes this rank."""
        return [python, "-P", "-m", "cluster.engine", *self.arguments()]

    @classmethod
    def from_json(cls, text: str) -> "Start":
        """Return the start whose JSON `command` wrote."""
        values = json.loads(text)
        placement, owner = values.pop("placement"), values.pop("owner")
        return cls(
            placement=Placement(**placement) if placement else None,
            owner=ProcessId(*owner) if owner else None,
            **values,
        )


def import_path() -> str:
    """Return a PYTHONPATH with which another process imports what this one can import.

    The current folder is the last of it. A file there may have the name of a module that Python needs to
    start, for example random.py.
    """
    entries = [*filter(None, sys.path), str(Path(__file__).parents[1]), os.getcwd()]
    return os.pathsep.join(dict.fromkeys(entries))


def launcher_placement(environment: Mapping[str, str]) -> Placement:
    """Return the placement that mpiexec or srun gave to this process.

    The variables of mpiexec are read first, because inside a Slurm job its processes have the job's variables
    too.

    Args:
        environment: The environment variables of this process.

    Raises:
        ClusterError: Neither mpiexec nor srun started this process.
    """
    for names in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if all(name in environment for name in names):
            return Placement(*(int(environment[name]) for name in names))
    if "SLURM_PROCID" in environment:
        counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        return Placement(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_LOCALID"]),
            counts[int(environment["SLURM_NODEID"])],
        )
    raise ClusterError(
        "neither mpiexec nor srun started this process, so its rank is not known; "
        "profile 'mpi' or 'slurm' starts it"
    )


def tasks_per_node(text: str) -> list[int]:
    """Return Slurm's counts as a list: [2, 2, 2, 1] for `2(x3),1`."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
