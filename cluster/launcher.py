"""ipyparallel launchers for which rank == engine id == device, also after a restart of the engines."""

import os
import sys

from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Unicode

from cluster.profiles import find_profile
from cluster.watchdog import watched


def import_path() -> str:
    """Return a PYTHONPATH with which a process imports what this one can import."""
    entries = [entry or os.getcwd() for entry in sys.path]
    return os.pathsep.join(dict.fromkeys(entries))


class KeepsLogs:
    """Leaves a process's log where it is: a start that failed is explained there."""

    def get_output(self, remove: bool = False) -> str:
        """Return nothing, and remove nothing; the cluster's directory goes as a whole."""
        return ""


class ControllerLauncher(KeepsLogs, LocalControllerLauncher):  # type: ignore[misc]
    """Start the controller under the watchdog."""

    def get_env(self) -> dict[str, str]:
        """Return the variables added to this process's own."""
        return {**super().get_env(), "PYTHONPATH": import_path()}

    def find_args(self) -> list[str]:
        """Return the command line."""
        return [*watched("ipyparallel.controller"), *self.cluster_args, *self.controller_args]


class RankLauncher(KeepsLogs, LocalEngineLauncher):  # type: ignore[misc]
    """Start one engine under the watchdog; its place in the set, which names it, is its id."""

    def get_env(self) -> dict[str, str]:
        """Return the variables added to this process's own."""
        variables = find_profile(self.parent.profile).environment(int(self.identifier), self.parent.n)
        return {**super().get_env(), **variables, "PYTHONPATH": import_path()}

    def find_args(self) -> list[str]:
        """Return the command line."""
        asked = f"--IPEngine.id={int(self.identifier)}"
        return [*watched("ipyparallel.engine"), *self.cluster_args, *self.engine_args, asked]


class RankSetLauncher(LocalEngineSetLauncher):  # type: ignore[misc]
    """Start the engines of one cluster, ranks 0 to n-1."""

    launcher_class = RankLauncher
    profile = Unicode("local", config=True, help="the profile, by name, that gives each rank its environment")
    delay = 0.0
