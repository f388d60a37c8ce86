"""ipyparallel launchers for which rank == engine id == device, also after a restart of the engines."""

from cluster.launchers.batch import SlurmSetLauncher
from cluster.launchers.local import ControllerLauncher, RankSetLauncher
from cluster.launchers.mpi import MpiSetLauncher
from cluster.launchers.remote_shell import SshSetLauncher

# By the profile's name.
LAUNCHERS = {
    "local": RankSetLauncher,
    "node8": RankSetLauncher,
    "ssh": SshSetLauncher,
    "mpi": MpiSetLauncher,
    "slurm": SlurmSetLauncher,
}

__all__ = ["LAUNCHERS", "ControllerLauncher"]
