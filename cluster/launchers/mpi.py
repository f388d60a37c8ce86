"""Ranks that one mpiexec starts."""

import psutil
from ipyparallel.cluster.launcher import MPIEngineSetLauncher
from traitlets import Any

from cluster.launchers.local import Launches
from cluster.logs import telling_line
from cluster.processes import outlive
from cluster.watchdog import is_alive, this_process

KILL_SECONDS = 10.0


class MpiSetLauncher(Launches, MPIEngineSetLauncher):  # type: ignore[misc]
    """Start the ranks of one cluster by mpiexec; without ipyparallel's --mpi, which wants mpi4py."""

    # A rank's nanny outlives it and tells the controller.
    LEAVE_SECONDS = 5.0

    profile = Any(config=True, help="the cluster.profiles.Profile that says how")

    def find_args(self) -> list[str]:
        """Return the command line."""
        start = self.profile.start(self.n, 0, this_process())
        return list(self.profile.command(self.n, 0, start.command(self.profile.interpreter())))

    def pids(self) -> list[int]:
        """Return mpiexec's process."""
        return [self.pid] if self.process else []

    def kill(self) -> None:
        """Have mpiexec end its ranks, on all hosts, and return when it has."""
        if self.process and is_alive(self.process):
            self.process.terminate()
            # Asked or killed a second time before it is through, it would leave ranks behind.
            outlive([self.process], KILL_SECONDS)

    def why_ended(self) -> str | None:
        """Return the line of mpiexec's log that says why it ended."""
        try:
            if is_alive(psutil.Process(self.pid)):
                return None
        except psutil.NoSuchProcess:
            pass
        return f"mpiexec ended: {telling_line(self.profile_dir, f'{self.identifier}.log')}"
