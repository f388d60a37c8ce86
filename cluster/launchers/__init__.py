"""Launchers for ipyparallel. Rank k is the engine with the id k, also after a restart of the engines."""

from cluster.launchers.batch import SlurmSetLauncher
from cluster.launchers.local import ControllerLauncher, ForkedSetLauncher, RankSetLauncher
from cluster.launchers.mpi import MpiSetLauncher
from cluster.launchers.remote_shell import SshSetLauncher

# The launcher of each profile, by the name of the profile.
LAUNCHERS = {
    "local": ForkedSetLauncher,
    "node8": RankSetLauncher,
    "ssh": SshSetLauncher,
    "mpi": MpiSetLauncher,
    "slurm": SlurmSetLauncher,
}

__all__ = ["LAUNCHERS", "ControllerLauncher"]
