"""Ranks that are one Slurm job."""

import subprocess
import time
from pathlib import Path
from typing import Any as AnyType

from ipyparallel.cluster.launcher import SlurmEngineSetLauncher
from traitlets import Any

from cluster.errors import ClusterError
from cluster.launchers.local import Launches
from cluster.logs import telling_line
from cluster.watchdog import this_process

# A queue is shared: asking more often burdens everyone's scheduler.
ASK_SECONDS = 2.0
RUNNING_ASK_SECONDS = 10.0
GONE_SECONDS = 20.0
COMING = ("PENDING", "CONFIGURING", "RUNNING")


class SlurmSetLauncher(Launches, SlurmEngineSetLauncher):  # type: ignore[misc]
    """Start the ranks of one cluster as one job, and end them by ending it."""

    # The job's nannies end with it, and tell nobody.
    LEAVE_SECONDS = 0.5

    profile = Any(config=True, help="the cluster.profiles.Profile that says how")
    _asked = 0.0
    _state = ("PENDING", "")

    def write_batch_script(self, n: int = 1) -> None:
        """Write the job's script into the cluster's directory."""
        self.n = n
        self.batch_file = str(Path(self.profile_dir) / "job.sh")
        start = self.profile.start(n, 0, this_process())
        engine = start.command(self.profile.interpreter())
        script = self.profile.script(n, engine, self._log(), f"ranks-{self.cluster_id}")
        Path(self.batch_file).write_text(script)

    def pids(self) -> list[int]:
        """Return nothing: Slurm's processes are not ours."""
        return []

    def kill(self) -> None:
        """End the job, and return when Slurm has it no more."""
        self.stop()

    def stop(self) -> None:
        """End the job, and return when Slurm has it no more."""
        if self.state != "running":
            return
        # At once: a rank that waits in a collective does not hear a politer signal.
        for options in (["--signal=KILL", "--full"], []):
            subprocess.run(["scancel", "--quiet", *options, self.job_id], capture_output=True)
        deadline = time.monotonic() + GONE_SECONDS
        while self._ask()[0] in (*COMING, "COMPLETING") and time.monotonic() < deadline:
            time.sleep(0.1)
        self.notify_stop({"job_id": self.job_id})

    def ended_as_a_whole(self) -> str | None:
        """Return why the job ended: cancelled or out of time, ranks and nannies go without a word."""
        return self.why_ended(RUNNING_ASK_SECONDS)

    def why_ended(self, every: float = ASK_SECONDS) -> str | None:
        """Return the line of the job's log that says why it ended, and Slurm's word for how.

        Slurm is asked once in `every` seconds at most.
        """
        if time.monotonic() - self._asked > every:
            self._state, self._asked = self._ask(), time.monotonic()
        state, reason = self._state
        if state in COMING:
            return None
        said = telling_line(self.profile_dir, Path(self._log()).name)
        return f"job {self.job_id} is {state} ({reason}): {said}"

    def waits_for(self) -> str:
        """Return what the job is waiting for, where it has not begun."""
        state, reason = self._ask()
        return f"job {self.job_id} is {state} {reason}; " if state in COMING else ""

    def _ask(self) -> tuple[str, str]:
        asked = ["squeue", "--noheader", "--states=all", f"--jobs={self.job_id}", "--format=%T %R"]
        answer = subprocess.run(asked, capture_output=True, text=True)
        if answer.returncode and "Invalid job id" not in answer.stderr:
            # Slurm is busy or away for a moment, which says nothing of the job.
            return self._state
        said = answer.stdout.split(maxsplit=1)
        return (said[0], said[-1].strip()) if said else ("GONE", "of its own accord")

    def _log(self) -> str:
        return str(Path(self.profile_dir) / "log" / f"job-{self.cluster_id}-{self.engine_set_id}.log")

    def _run_command(self, command: list[str], **kwargs: AnyType) -> str:
        done = subprocess.run(command, capture_output=True, text=True, **kwargs)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ClusterError(f"Slurm took no job: {said}")
        return str(done.stdout)
