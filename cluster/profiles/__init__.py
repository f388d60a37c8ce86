"""The places ranks can run, by name.

where you are                          profile   first command
-------------------------------------  --------  ---------------------------------------------------------
a laptop, or a machine with GPUs       local     Cluster(ranks=4)
logged in to one node of 8 GPUs        node8     Cluster(ranks=8, profile="node8")
a few hosts, ssh logs in with a key    ssh       Cluster(ranks=2, profile="ssh", hosts=("node1", "node2"))
hosts where mpiexec starts programs    mpi       Cluster(ranks=16, profile="mpi", hostfile="hosts.txt")
a login node of a Slurm cluster        slurm     Cluster(ranks=16, profile="slurm", gpus_per_node=8,
                                                         start_timeout=600)

`lab cluster show NAME` prints a profile: its fields, each with its default and why, what rank 0 finds in its
environment, and the command or batch script that would run. Every field is a keyword argument of `Cluster`.

local and node8 stay on loopback. The others open the controller to the ranks' hosts at `address`, with CURVE
encryption; its key travels over ssh's standard input, by mpiexec or by Slurm, never on a command line.
What the ranks say to each other over gloo or NCCL is not encrypted by anyone: use networks that you trust.
The hosts need the lab installed, at the same path unless `python=` (ssh) names another. Where a firewall
stands between, `ports="7000-7008"` says which ports the controller takes; ranks choose their own among
themselves. When the process that started a cluster is gone, so are its ranks, within 20 seconds, anywhere.
"""

from dataclasses import fields, replace
from typing import Any

from cluster.errors import ClusterError
from cluster.profiles.base import Profile
from cluster.profiles.local import Local
from cluster.profiles.mpi import Mpi
from cluster.profiles.node8 import Node8
from cluster.profiles.slurm import Slurm
from cluster.profiles.ssh import Ssh

PROFILES: dict[str, Profile] = {
    profile.name: profile for profile in (Local(), Node8(), Ssh(), Mpi(), Slurm())
}


def find_profile(name: str, **overrides: Any) -> Profile:
    """Return the profile called `name`, with these fields in place of its own.

    Raises ClusterError that lists the known profiles, or the profile's fields.
    """
    if name not in PROFILES:
        raise ClusterError(f"profile {name!r} is not known; known are: {', '.join(sorted(PROFILES))}")
    known = [field.name for field in fields(PROFILES[name])]
    unknown = [key for key in overrides if key not in known]
    if unknown:
        raise ClusterError(
            f"profile {name!r} has no {', '.join(unknown)}; it has: {', '.join(sorted(known))}"
        )
    for key, value in overrides.items():
        if isinstance(getattr(PROFILES[name], key), tuple) and isinstance(value, str):
            raise ClusterError(f"{key}={value!r}: a tuple is needed; {key}=({value!r},) would work")
    return replace(PROFILES[name], **overrides)
