"""Ranks as one Slurm job: sbatch asks for the nodes, srun starts the ranks on them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from cluster.profiles.base import ReachingProfile, option

NODE_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Slurm(ReachingProfile):
    """A batch job with one task a rank. The start waits in the queue, for `timeout` seconds at most."""

    name = "slurm"
    where = "a cluster with Slurm, from a login node or inside a job"
    program = "sbatch"
    package = "slurm-client"

    partition: str | None = option(None, "the queue; default: the site's own default")
    account: str | None = option(None, "whom the hours are charged to; default: yours")
    time: str = option("01:00:00", "the job ends after it, hours:minutes:seconds; short jobs start sooner")
    nodes: int | None = option(None, "default: as few as hold the ranks")
    ranks_per_node: int | None = option(
        None, f"default: the ranks over `nodes`, or up to {NODE_RANKS}, for most nodes have as many GPUs"
    )
    gpus_per_node: int | None = option(None, "GPUs asked for on each node; default: none is asked for")
    options: tuple[str, ...] = option((), "further lines of the job, such as '--exclusive'")
    folder: str = option(
        "~", "where the job's log goes; every node must see it, which a home directory mostly fulfils"
    )

    def layout(self, ranks: int) -> tuple[int, int]:
        """Return the nodes and the ranks on each. Raises ClusterError where they do not come out even."""
        per_node = self.ranks_per_node or (-(-ranks // self.nodes) if self.nodes else min(ranks, NODE_RANKS))
        nodes = self.nodes or -(-ranks // per_node)
        if ranks != nodes * per_node:
            fits = nodes * per_node
            raise ClusterError(
                f"ranks={ranks}: {nodes} node(s) of {per_node} ranks give {fits}; ranks={fits} would work, "
                "or other nodes= and ranks_per_node="
            )
        return nodes, per_node

    def check_ranks(self, ranks: int) -> None:
        """Raise ClusterError where the ranks do not come out even, or need more GPUs than are asked for."""
        _, per_node = self.layout(ranks)
        if self.gpus_per_node is not None and self.gpus_per_node < per_node:
            raise ClusterError(
                f"gpus_per_node={self.gpus_per_node}: {per_node} ranks on a node need a GPU each; "
                f"gpus_per_node={per_node} would work"
            )
        if not Path(self.log_folder()).is_dir():
            raise ClusterError(f"folder={self.folder!r} is no folder here; one that all nodes see would work")

    def ranks_on_first_host(self, ranks: int) -> int:
        """Return how many of `ranks` share rank 0's host."""
        return self.layout(ranks)[1]

    def command(self, ranks: int, rank: int, engine: Sequence[str]) -> list[str]:
        """Return the command that all nodes' tasks are started with, inside the job."""
        # The ranks share out the cores themselves; one that ends leaves the others to say what they saw.
        return [
            "srun",
            "--cpu-bind=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--distribution=block",
            *engine,
        ]

    def script(self, ranks: int, engine: Sequence[str], log: str, name: str = "ranks") -> str:
        """Return the batch script of the job."""
        nodes, per_node = self.layout(ranks)
        asked = {
            "job-name": name,
            # The connection reaches the ranks in their environment, which no other user can read.
            "export": "ALL",
            "output": log,
            "open-mode": "append",
            "nodes": nodes,
            "ntasks": ranks,
            "ntasks-per-node": per_node,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "gpus-per-node": self.gpus_per_node,
        }
        lines = [f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None]
        lines += [f"#SBATCH {line}" for line in self.options]
        return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(self.command(ranks, 0, engine))}", ""])

    def log_folder(self) -> str:
        """Return the folder that the nodes see too."""
        return str(Path(self.folder).expanduser())
