"""The profiles by name. A profile says where ranks run.

where you are                          profile   first command
-------------------------------------  --------  ---------------------------------------------------------
a laptop, or a machine with GPUs       local     Cluster(ranks=4)
logged in to one node of 8 GPUs        node8     Cluster(ranks=8, profile="node8")
a few hosts, ssh logs in with a key    ssh       Cluster(ranks=2, profile="ssh", hosts=("node1", "node2"))
hosts where mpiexec starts programs    mpi       Cluster(ranks=16, profile="mpi", hostfile="hosts.txt")
a login node of a Slurm cluster        slurm     Cluster(ranks=16, profile="slurm", gpus_per_node=8,
                                                         start_timeout=600)

`lab cluster show NAME` prints a profile: each field with its default and the reason for it, the environment
variables of rank 0, and the command or the batch script that would run. Every field is a keyword argument of
`Cluster`.

local and node8 use the loopback interface only. With the other profiles the controller listens at `address`
for the hosts of the ranks, and encrypts with CURVE. Its key is sent over the standard input of ssh, by
mpiexec or by Slurm, and never stands on a command line. gloo and NCCL do not encrypt what the ranks send to
each other: use networks that you trust.

The lab must be installed on every host, at the same path as here unless `python=` (ssh) names another one.
Behind a firewall, `ports="7000-7008"` sets the ports of the controller. The ranks choose the ports between
themselves. When the process that started a cluster is gone, its ranks end within 20 seconds on every host.
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
    """Return a profile.

    Args:
        name: The name of the profile.
        **overrides: Values for its fields, in place of the defaults.

    Raises:
        ClusterError: The profile or a field is not known, or a text is set where a tuple is needed.
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
