"""Launch the controller, and ranks as processes of this machine.

Every launcher of a set of ranks has these members:

- `pids()` returns the processes of this machine that start or contain ranks.
- `kill()` ends the ranks, also those that are stuck.
- `why_ended()` returns why ranks have ended, None while all of them may still start.
- `LEAVE_SECONDS` is how long the controller may take to learn of a `kill()`. A rank whose end was not
  reported by then is removed from the controller's list.
"""

import os
import secrets
import signal
from contextlib import suppress

import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Any

from cluster.environment import share_of_cores
from cluster.errors import name_ranks
from cluster.forks import Request, fork
from cluster.host import own_cores
from cluster.logs import last_error
from cluster.placement import import_path
from cluster.watchdog import watched


class LauncherBase:
    """What all launchers share."""

    def get_output(self, remove: bool = False) -> str:
        """Return nothing, and remove nothing.

        The logs explain a start that failed. They are removed with the directory of the cluster.
        """
        return ""

    def get_env(self) -> dict[str, str]:
        """Return the environment variables that are added to those of this process."""
        return {**super().get_env(), "PYTHONPATH": import_path()}  # type: ignore[misc]

    def waiting_reason(self) -> str:
        """Return what the ranks wait for, followed by a semicolon, or nothing where it is not known."""
        return ""

    def why_all_ended(self) -> str | None:
        """Return why all ranks ended at once, None where the end of each rank is reported by itself."""
        return None


class ControllerLauncher(LauncherBase, LocalControllerLauncher):  # type: ignore[misc]
    """Starts the controller under the watchdog."""

    def get_env(self) -> dict[str, str]:
        """Return the environment variables that are added to those of this process."""
        # Without a key, ipyparallel with CURVE would not sign messages, and would show a warning in the
        # notebook.
        return {**super().get_env(), "IPP_SESSION_KEY": secrets.token_hex(32)}

    def find_args(self) -> list[str]:
        """Return the command line."""
        return [*watched("ipyparallel.controller"), *self.cluster_args, *self.controller_args]


class RankLauncher(LauncherBase, LocalEngineLauncher):  # type: ignore[misc]
    """Starts one rank. Its identifier in the set is its rank."""

    def find_args(self) -> list[str]:
        """Return the command line."""
        return list(self.parent.profile.command(self.parent.n, int(self.identifier)))


class ForkedRankLauncher(RankLauncher):
    """Starts one rank as a fork of a process that has imported torch already; see `cluster.forks`."""

    def start(self) -> int:
        """Fork the rank."""
        ranks = self.parent.n
        start = self.parent.profile.start(ranks, int(self.identifier))
        # Read when torch is imported, before there is a rank.
        threads = str(share_of_cores(start.placement, [own_cores()] * ranks))
        shared = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        variables, folder = {**os.environ, **self.get_env()}, os.path.abspath(self.work_dir)
        request = Request(start.arguments(), variables, folder, self.output_file)
        self.process = fork({**os.environ, **shared, **start.variables}, request)
        self.pid = self.process.pid
        self.notify_start(self.pid)
        self._start_waiting()
        return int(self.pid)


class RankSetLauncher(LauncherBase, LocalEngineSetLauncher):  # type: ignore[misc]
    """Starts the ranks of one cluster, each as a process of its own."""

    LEAVE_SECONDS = 5.0

    launcher_class = RankLauncher
    profile = Any(config=True, help="the cluster.profiles.Profile of the ranks")
    delay = 0.0

    def pids(self) -> list[int]:
        """Return the process ids of the ranks."""
        # A launcher whose rank is being started has none yet.
        return [launcher.pid for launcher in self.launchers.values() if launcher.pid > 0]

    def kill(self) -> None:
        """End the ranks. Their nannies stay for the moment, because they tell the controller."""
        for pid in self.pids():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGKILL)

    def why_ended(self) -> str | None:
        """Return which ranks ended, and the last error in the log of the first of them."""
        gone = [rank for rank in range(self.n) if str(rank) not in self.launchers]
        if not gone:
            return None
        log = f"ipengine-{self.cluster_id}-{self.engine_set_id}-{gone[0]}.log"
        return f"{name_ranks(gone)} ended: {last_error(self.profile_dir, log)}"


class ForkedSetLauncher(RankSetLauncher):
    """Starts the ranks of one cluster as forks of one process."""

    launcher_class = ForkedRankLauncher
