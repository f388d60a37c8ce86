"""Ranks as one Slurm job. sbatch requests the nodes, and srun starts the ranks on them."""

import shlex
from dataclasses import dataclass
from os.path import expanduser  # unlike Path.expanduser, it raises no error for an unknown user
from pathlib import Path

from cluster.errors import ClusterError
from cluster.profiles.base import NODE_RANKS, RemoteProfile, option


@dataclass(frozen=True, kw_only=True)
class Slurm(RemoteProfile):
    """Starts a batch job with one task for each rank. The time in the queue counts as time of the start.

    Attributes:
        partition: The queue.
        account: The account.
        time: The longest time of the job.
        nodes: The number of nodes.
        ranks_per_node: The ranks on each node.
        gpus_per_node: The GPUs that are requested on each node.
        options: Further options of sbatch.
        folder: The folder of the job's log.
    """

    name = "slurm"
    where = "a cluster with Slurm, from a login node or inside a job"
    program = "sbatch"
    package = "slurm-client"

    partition: str | None = option(None, "the queue; default: the site's own default")
    account: str | None = option(None, "the account that the hours are charged to; default: yours")
    time: str = option(
        "01:00:00", "the job ends after this time, hours:minutes:seconds; short jobs start sooner"
    )
    nodes: int | None = option(None, "the number of nodes; default: as few as the ranks need")
    ranks_per_node: int | None = option(
        None,
        f"default: the ranks over `nodes`, or up to {NODE_RANKS}, because most nodes have {NODE_RANKS} GPUs",
    )
    gpus_per_node: int | None = option(None, "GPUs to request on each node; default: none")
    options: tuple[str, ...] = option((), "further options of sbatch, such as '--exclusive'")
    folder: str = option(
        "~", "the folder of the job's log; every node must see it, and most see the home directory"
    )

    def layout(self, ranks: int) -> tuple[int, int]:
        """Return the number of nodes, and the number of ranks on each.

        Raises:
            ClusterError: The ranks cannot be spread evenly over the nodes.
        """
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
        """Check the number of nodes and GPUs, and the folder.

        Raises:
            ClusterError: The ranks cannot be spread evenly, need more GPUs than are requested, or there is no
                such folder.
        """
        _, per_node = self.layout(ranks)
        if self.gpus_per_node is not None and self.gpus_per_node < per_node:
            raise ClusterError(
                f"gpus_per_node={self.gpus_per_node}: {per_node} ranks on a node need a GPU each; "
                f"gpus_per_node={per_node} would work"
            )
        if not Path(self.log_folder()).is_dir():
            raise ClusterError(
                f"folder={self.folder!r}: there is no such folder; one that all nodes see would work"
            )

    def ranks_on_first_host(self, ranks: int) -> int:
        """Return how many of `ranks` share rank 0's host."""
        return self.layout(ranks)[1]

    def command(self, ranks: int, rank: int) -> list[str]:
        """Return the command line that starts the ranks inside the job."""
        # The ranks share the cores themselves. srun must not end the other ranks when one ends: they report.
        options = ["--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0", "--distribution=block"]
        return ["srun", *options, *self.engine(ranks, rank)]

    def script(self, ranks: int, log: str, name: str = "ranks") -> str:
        """Return the batch script of the job.

        Args:
            ranks: The number of ranks.
            log: The path of the job's log.
            name: The name of the job.
        """
        nodes, per_node = self.layout(ranks)
        options = {
            "job-name": name,
            # The ranks read the connection from their environment, which no other user can read.
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
        lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
        lines += [f"#SBATCH {line}" for line in self.options]
        return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(self.command(ranks, 0))}", ""])

    def log_folder(self) -> str:
        """Return the folder, which every node must see."""
        return expanduser(self.folder)
