"""Launch ranks by one mpiexec."""

from ipyparallel.cluster.launcher import MPIEngineSetLauncher
from traitlets import Any

from cluster.launchers.local import LauncherBase
from cluster.logs import last_error
from cluster.processes import wait_for_end
from cluster.watchdog import is_alive

KILL_SECONDS = 10.0


class MpiSetLauncher(LauncherBase, MPIEngineSetLauncher):  # type: ignore[misc]
    """Starts the ranks of one cluster by mpiexec, without ipyparallel's `--mpi`, which needs mpi4py."""

    # A rank's nanny lives longer than the rank and tells the controller.
    LEAVE_SECONDS = 5.0

    profile = Any(config=True, help="the cluster.profiles.Profile of the ranks")

    def find_args(self) -> list[str]:
        """Return the command line."""
        return list(self.profile.command(self.n, 0))

    def pids(self) -> list[int]:
        """Return the process id of mpiexec, or nothing before the start."""
        return [self.pid] if self.process else []

    def kill(self) -> None:
        """Ask mpiexec to end its ranks on all hosts, and wait until it has ended."""
        if self.process and is_alive(self.process):
            self.process.terminate()
            # A second signal before it has finished would leave ranks behind.
            wait_for_end([self.process], KILL_SECONDS)

    def why_ended(self) -> str | None:
        """Return the last error in the log of mpiexec, None while mpiexec runs."""
        if is_alive(self.process):
            return None
        return f"mpiexec ended: {last_error(self.profile_dir, f'{self.identifier}.log')}"
