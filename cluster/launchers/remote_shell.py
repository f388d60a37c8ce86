"""Ranks over ssh: one connection a rank, which carries the controller's address in and the rank's log out."""

from contextlib import suppress
from subprocess import PIPE, STDOUT, Popen

import psutil

from cluster.launchers.local import RankLauncher, RankSetLauncher

# How ssh says that it failed itself, or that the program was ended by a signal.
SSH_FAILED = 255


class SshRankLauncher(RankLauncher):
    """Start one rank on the other host, and hold its standard input: when that closes, the rank ends."""

    def start(self) -> int:
        """Start ssh and hand over the connection."""
        with open(self.output_file, "ab") as log:
            started = Popen(self.args, stdin=PIPE, stdout=log, stderr=STDOUT, start_new_session=True)
        self._popen_process = started
        assert started.stdin is not None
        self._input = started.stdin
        with suppress(BrokenPipeError):
            self._input.write(self.environment["IPP_CONNECTION_INFO"].encode() + b"\n")
            self._input.flush()
        self.pid = started.pid
        self.process = psutil.Process(started.pid)
        self.on_stop(lambda data: self.close_input())
        self.notify_start(self.pid)
        self._start_waiting()
        return self.pid

    def close_input(self) -> None:
        """End the rank, wherever it is."""
        with suppress(BrokenPipeError):
            self._input.close()


class SshSetLauncher(RankSetLauncher):
    """Start the ranks of one cluster over ssh."""

    # Its nanny ends with a rank, and tells nobody.
    LEAVE_SECONDS = 0.5

    launcher_class = SshRankLauncher

    def kill(self) -> None:
        """End the ranks."""
        for launcher in list(self.launchers.values()):
            launcher.close_input()

    def _notice_engine_stopped(self, data: dict[str, object]) -> None:
        if data["exit_code"] == SSH_FAILED:
            data = {**data, "exit_code": None}
        super()._notice_engine_stopped(data)
