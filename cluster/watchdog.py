"""Every process of a cluster ends when its owner, the process that started the cluster, is gone.

`python -m cluster.watchdog PID CREATED MODULE ARGS...` runs MODULE as `python -m` would, beside a thread that
looks for the owner. An interpreter killed by SIGKILL cannot tell its engines, and they would keep their GPUs.
An engine on another host cannot see the owner: it looks for the controller, which ends with the owner.
"""

import contextlib
import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable

import psutil

POLL_SECONDS = 2.0

# One look may fail on a busy host. Three make 6 s where the port is closed, 12 s where no answer comes.
MISSES = 3

# An owner's creation time, read by two processes, differs by what the clock was corrected between.
CREATED_TOLERANCE_SECONDS = 5.0


def watched(module: str) -> list[str]:
    """Return the command line that runs `module` for as long as the calling process lives."""
    pid, created = this_process()
    return [sys.executable, "-m", "cluster.watchdog", str(pid), repr(created), module]


def this_process() -> tuple[int, float]:
    """Return the id of this process and when it was created, in seconds since the epoch."""
    owner = psutil.Process()
    return owner.pid, owner.create_time()


def is_alive(process: psutil.Process) -> bool:
    """Tell whether `process` still runs; one that only waits to be reaped does not."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_owner(pid: int, created: float) -> None:
    """Return when process `pid`, created at `created` seconds since the epoch, is gone."""
    try:
        owner = psutil.Process(pid)
        ours = abs(owner.create_time() - created) < CREATED_TOLERANCE_SECONDS
    except psutil.NoSuchProcess:
        ours = False
    while ours and is_alive(owner):
        time.sleep(POLL_SECONDS)


def wait_for_port(address: str, port: int) -> None:
    """Return when nothing has answered at `address` and `port` for MISSES looks in a row."""
    misses = 0
    while misses < MISSES:
        time.sleep(POLL_SECONDS)
        try:
            socket.create_connection((address, port), timeout=POLL_SECONDS).close()
            misses = 0
        except OSError:
            misses += 1


def wait_for_input_end() -> None:
    """Return when this process's standard input is closed by the other side."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass


def end_after(wait: Callable[[], None], clean_up: Callable[[], None] = lambda: None) -> None:
    """Once `wait()` returns, in a thread of its own: `clean_up()`, then end this process and its children.

    The processes started by this one, a nanny or a scheduler, are ended first.
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
    """Run the module named on the command line under the watch."""
    pid, created = int(sys.argv[1]), float(sys.argv[2])
    sys.argv = sys.argv[3:]
    end_after(lambda: wait_for_owner(pid, created))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
