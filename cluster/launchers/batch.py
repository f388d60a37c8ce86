"""Launch ranks as one Slurm job."""

import subprocess
import time
from pathlib import Path
from typing import Any as AnyType

from ipyparallel.cluster.launcher import SlurmEngineSetLauncher
from traitlets import Any

from cluster.errors import ClusterError
from cluster.launchers.local import LauncherBase
from cluster.logs import last_error

# Many users share the scheduler: more frequent questions would slow it down for all.
ASK_SECONDS = 2.0
RUNNING_ASK_SECONDS = 10.0
GONE_SECONDS = 20.0
# The states of a job that has not ended.
ACTIVE = ("PENDING", "CONFIGURING", "RUNNING")


class SlurmSetLauncher(LauncherBase, SlurmEngineSetLauncher):  # type: ignore[misc]
    """Starts the ranks of one cluster as one job, and ends them by ending the job."""

    # The nannies end with the job and do not tell the controller.
    LEAVE_SECONDS = 0.5

    profile = Any(config=True, help="the cluster.profiles.Profile of the ranks")
    _asked = 0.0
    _state = ("PENDING", "")

    def write_batch_script(self, n: int = 1) -> None:
        """Write the script of the job into the directory of the cluster."""
        self.n = n
        self.batch_file = str(Path(self.profile_dir) / "job.sh")
        Path(self.batch_file).write_text(self.profile.script(n, self._log(), f"ranks-{self.cluster_id}"))

    def pids(self) -> list[int]:
        """Return nothing: the processes of the job belong to Slurm."""
        return []

    def kill(self) -> None:
        """End the job, and wait until Slurm has removed it."""
        self.stop()

    def stop(self) -> None:
        """End the job, and wait until Slurm has removed it."""
        if self.state != "running":
            return
        # SIGKILL, because a rank that waits in a collective does not react to SIGTERM.
        for options in (["--signal=KILL", "--full"], []):
            subprocess.run(["scancel", "--quiet", *options, self.job_id], capture_output=True)
        deadline = time.monotonic() + GONE_SECONDS
        while self._ask()[0] in (*ACTIVE, "COMPLETING") and time.monotonic() < deadline:
            time.sleep(0.1)
        self.notify_stop({"job_id": self.job_id})

    def why_all_ended(self) -> str | None:
        """Return why the job ended, None while it runs.

        Where a job is cancelled or runs out of time, its ranks and nannies report nothing.
        """
        return self.why_ended(RUNNING_ASK_SECONDS)

    def why_ended(self, every: float = ASK_SECONDS) -> str | None:
        """Return why the job ended, None while it waits or runs.

        Args:
            every: Slurm is asked at most once in so many seconds.

        Returns:
            The state of the job, and the last error in its log.
        """
        if time.monotonic() - self._asked > every:
            self._state, self._asked = self._ask(), time.monotonic()
        state, reason = self._state
        if state in ACTIVE:
            return None
        error = last_error(self.profile_dir, Path(self._log()).name)
        return f"job {self.job_id} is {state} ({reason}): {error}"

    def waiting_reason(self) -> str:
        """Return why the job has not started the ranks yet, followed by a semicolon, or nothing."""
        state, reason = self._ask()
        return f"job {self.job_id} is {state} {reason}; " if state in ACTIVE else ""

    def _ask(self) -> tuple[str, str]:
        command = ["squeue", "--noheader", "--states=all", f"--jobs={self.job_id}", "--format=%T %R"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode and "Invalid job id" not in answer.stderr:
            # Slurm is busy or not reachable for a moment. The state of the job is not known.
            return self._state
        words = answer.stdout.split(maxsplit=1)
        return (words[0], words[-1].strip()) if words else ("GONE", "Slurm does not know it any more")

    def _log(self) -> str:
        return str(Path(self.profile_dir) / "log" / f"job-{self.cluster_id}-{self.engine_set_id}.log")

    def _run_command(self, command: list[str], **kwargs: AnyType) -> str:
        process = subprocess.run(command, capture_output=True, text=True, **kwargs)
        if process.returncode:
            reason = (process.stderr.strip().splitlines() or ["it gave no reason"])[-1]
            raise ClusterError(f"Slurm refused the job: {reason}")
        return str(process.stdout)
