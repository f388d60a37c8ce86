"""Every process of a cluster ends when its owner, the process that started the cluster, is gone.

`python -m cluster.watchdog PID CREATED MODULE ARGS...` runs MODULE as `python -m` would, beside a thread that
looks for the owner. An interpreter killed by SIGKILL cannot tell its engines, and they would keep their GPUs.
"""

import contextlib
import os
import runpy
import sys
import threading
import time

import psutil

from cluster import whereabouts

POLL_SECONDS = 2.0

# An owner's creation time, read by two processes, differs by what the clock was corrected between.
CREATED_TOLERANCE_SECONDS = 5.0


def watched(module: str) -> list[str]:
    """Return the command line that runs `module` for as long as the calling process lives."""
    owner = psutil.Process()
    return [sys.executable, "-m", "cluster.watchdog", str(owner.pid), repr(owner.create_time()), module]


def is_alive(process: psutil.Process) -> bool:
    """Tell whether `process` still runs; one that only waits to be reaped does not."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_with_owner(pid: int, created: float) -> None:
    """Wait until process `pid`, created at `created` seconds since the epoch, is gone; then end this one.

    The processes started by this one, a nanny or a scheduler, are ended first.
    """
    try:
        owner = psutil.Process(pid)
        ours = abs(owner.create_time() - created) < CREATED_TOLERANCE_SECONDS
    except psutil.NoSuchProcess:
        ours = False
    while ours and is_alive(owner):
        time.sleep(POLL_SECONDS)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def main() -> None:
    """Run the module named on the command line under the watch."""
    pid, created = int(sys.argv[1]), float(sys.argv[2])
    sys.argv = sys.argv[3:]
    if sys.argv[0] == "ipyparallel.engine":
        whereabouts.listen()
    threading.Thread(target=end_with_owner, args=(pid, created), name="watchdog", daemon=True).start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
