"""The controller and the ranks of this machine, as its processes.

A set of ranks, whatever launches it, has `pids()` (the processes here that carry ranks), `kill()` (end the
ranks, whatever they do), `why_ended()` (None while all of them may still come up) and `LEAVE_SECONDS`: how
long after `kill()` the controller may take to hear of it; a rank that does not tell is taken off its list.
"""

import secrets
import signal
from contextlib import suppress

import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Any

from cluster.errors import name_ranks
from cluster.logs import telling_line
from cluster.places import import_path
from cluster.watchdog import this_process, watched


class Launches:
    """What all launchers share. Logs stay where they are: a start that failed is explained there."""

    def get_output(self, remove: bool = False) -> str:
        """Return nothing, and remove nothing; the cluster's directory goes as a whole."""
        return ""

    def get_env(self) -> dict[str, str]:
        """Return the variables added to this process's own."""
        return {**super().get_env(), "PYTHONPATH": import_path()}  # type: ignore[misc]

    def waits_for(self) -> str:
        """Return what the ranks are waiting for, where it is known, with a semicolon after it."""
        return ""

    def ended_as_a_whole(self) -> str | None:
        """Return why all ranks ended at once and cannot tell, None where each death is told."""
        return None


class ControllerLauncher(Launches, LocalControllerLauncher):  # type: ignore[misc]
    """Start the controller under the watchdog."""

    def get_env(self) -> dict[str, str]:
        """Return the variables added to this process's own."""
        # With CURVE on, ipyparallel would leave messages unsigned, and warn of that in the notebook.
        return {**super().get_env(), "IPP_SESSION_KEY": secrets.token_hex(32)}

    def find_args(self) -> list[str]:
        """Return the command line."""
        return [*watched("ipyparallel.controller"), *self.cluster_args, *self.controller_args]


class RankLauncher(Launches, LocalEngineLauncher):  # type: ignore[misc]
    """Start one rank; its place in the set, which names it, is its number."""

    def find_args(self) -> list[str]:
        """Return the command line."""
        profile, ranks, rank = self.parent.profile, self.parent.n, int(self.identifier)
        start = profile.start(ranks, rank, this_process())
        return list(profile.command(ranks, rank, start.command(profile.interpreter())))


class RankSetLauncher(Launches, LocalEngineSetLauncher):  # type: ignore[misc]
    """Start the ranks of one cluster, each by a process of its own."""

    LEAVE_SECONDS = 5.0

    launcher_class = RankLauncher
    profile = Any(config=True, help="the cluster.profiles.Profile that says how")
    delay = 0.0

    def pids(self) -> list[int]:
        """Return the ranks' processes."""
        return [launcher.pid for launcher in self.launchers.values()]

    def kill(self) -> None:
        """End the ranks; their nannies stay for the moment, for they tell the controller."""
        for pid in self.pids():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGKILL)

    def why_ended(self) -> str | None:
        """Return which ranks ended, and the line of the first one's log that says why."""
        gone = [rank for rank in range(self.n) if str(rank) not in self.launchers]
        if not gone:
            return None
        log = f"ipengine-{self.cluster_id}-{self.engine_set_id}-{gone[0]}.log"
        return f"{name_ranks(gone)} ended: {telling_line(self.profile_dir, log)}"
