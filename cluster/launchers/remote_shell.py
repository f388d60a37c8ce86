"""Launch ranks over ssh. Each rank has one connection, for the controller's address and the rank's log."""

from contextlib import suppress
from subprocess import PIPE, STDOUT, Popen

import psutil

from cluster.launchers.local import RankLauncher, RankSetLauncher

# The exit code of ssh where ssh itself failed, or where a signal ended the program.
SSH_FAILED = 255


class SshRankLauncher(RankLauncher):
    """Starts one rank on another host, and keeps its standard input open. Closing that ends the rank."""

    def start(self) -> int:
        """Start ssh and send the connection to the controller."""
        with open(self.output_file, "ab") as log:
            process = Popen(self.args, stdin=PIPE, stdout=log, stderr=STDOUT, start_new_session=True)
        self._popen_process = process
        assert process.stdin is not None
        self._input = process.stdin
        with suppress(BrokenPipeError):
            self._input.write(self.environment["IPP_CONNECTION_INFO"].encode() + b"\n")
            self._input.flush()
        self.pid = process.pid
        self.process = psutil.Process(process.pid)
        self.on_stop(lambda _data: self.close_input())
        self.notify_start(self.pid)
        self._start_waiting()
        return self.pid

    def close_input(self) -> None:
        """End the rank by closing its standard input."""
        with suppress(BrokenPipeError):
            self._input.close()


class SshSetLauncher(RankSetLauncher):
    """Starts the ranks of one cluster over ssh."""

    # A rank's nanny ends with the rank and does not tell the controller.
    LEAVE_SECONDS = 0.5

    launcher_class = SshRankLauncher

    def kill(self) -> None:
        """End the ranks by closing their standard inputs."""
        for launcher in list(self.launchers.values()):
            launcher.close_input()

    def _notice_engine_stopped(self, data: dict[str, object]) -> None:
        if data["exit_code"] == SSH_FAILED:
            data = {**data, "exit_code": None}
        super()._notice_engine_stopped(data)
