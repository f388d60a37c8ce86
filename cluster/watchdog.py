"""End every process of a cluster when its owner, the process that started the cluster, is gone.

`python -m cluster.watchdog PID STARTED MODULE ARGS...` runs MODULE as `python -m` does, with a thread that
watches the owner. An owner that is killed by SIGKILL cannot tell its engines, and without the thread they
would keep their GPUs. An engine on another host cannot see the owner. It watches the controller, which ends
with the owner.
"""

import contextlib
import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

POLL_SECONDS = 2.0

# One attempt to connect may fail on a busy host. Three take 6 s where the port is closed, and 12 s where no
# answer comes.
MISSES = 3

# Linux only.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessId(NamedTuple):
    """A process. Its id alone does not identify it, because the system uses ids again.

    Attributes:
        pid: Its id.
        started: When it started, in ticks since the boot with the id that follows: no change of the clock
            changes it. Elsewhere than on Linux, psutil's hash of the process.
    """

    pid: int
    started: str

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessId":
        """Return the identity of a process that runs.

        Raises:
            psutil.NoSuchProcess: It has ended.
        """
        if not _BOOT_ID.exists():
            return cls(process.pid, str(hash(process)))
        try:
            # The name of the program is in parentheses, and may have spaces.
            fields = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            raise psutil.NoSuchProcess(process.pid) from None
        return cls(process.pid, f"{fields[19]} {_BOOT_ID.read_text().strip()}")

    def process(self) -> psutil.Process | None:
        """Return the process, None where it has ended."""
        try:
            process = psutil.Process(self.pid)
            same = ProcessId.of(process) == self
        except psutil.NoSuchProcess:
            return None
        return process if same and is_alive(process) else None


def watched(module: str) -> list[str]:
    """Return the command line that runs `module` for as long as the calling process lives.

    Args:
        module: The name of the module.
    """
    pid, started = this_process()
    return [sys.executable, "-P", "-m", "cluster.watchdog", str(pid), started, module]


def this_process() -> ProcessId:
    """Return the identity of this process."""
    return ProcessId.of(psutil.Process())


def is_alive(process: psutil.Process) -> bool:
    """Return whether `process` still runs. A process that has ended but was not reaped does not run."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_owner(pid: int, started: str) -> None:
    """Wait until a process is gone.

    Args:
        pid: Its id.
        started: When it started, see `ProcessId`.
    """
    while ProcessId(pid, started).process() is not None:
        time.sleep(POLL_SECONDS)


def wait_for_port(address: str, port: int) -> None:
    """Wait until MISSES attempts in a row to connect to a port have failed.

    Args:
        address: The address of the host.
        port: The port.
    """
    misses = 0
    while misses < MISSES:
        time.sleep(POLL_SECONDS)
        try:
            socket.create_connection((address, port), timeout=POLL_SECONDS).close()
            misses = 0
        except OSError:
            misses += 1


def wait_for_input_end() -> None:
    """Wait until the other side closes the standard input of this process."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass


def end_after(wait: Callable[[], None], clean_up: Callable[[], None] = lambda: None) -> None:
    """End this process and its children once `wait()` has returned. A separate thread waits.

    Args:
        wait: Returns when the process has to end.
        clean_up: Called before the process ends.
    """

    def end() -> None:
        wait()
        clean_up()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)

    threading.Thread(target=end, name="watchdog", daemon=True).start()


def main() -> None:
    """Run the module that the command line names, and end it with its owner."""
    # The controller writes its keys to files, and only then makes them private.
    os.umask(0o077)
    pid, started = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[3:]
    end_after(lambda: wait_for_owner(pid, started))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
