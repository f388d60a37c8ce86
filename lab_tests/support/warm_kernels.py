"""Kernels as forks of one process, which has imported what the notebooks import.

These imports, in a kernel and in the process whose forks are its ranks, would be a third of the time of the
small notebooks. Where the stored notebooks are executed, each kernel is a process of its own.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from cluster import forks

PRELOADED = (
    *forks.PRELOADED, "ipykernel.kernelapp", "ipywidgets", "lab.show", "lab.planning", "lab.training",
)  # fmt: skip
CLIENT = """
import json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as kernel:
    kernel.connect(sys.argv[1])
    kernel.sendall(json.dumps([sys.argv[2], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    kernel.recv(1)
"""


@contextmanager
def warm_kernels() -> Iterator[Path]:
    """Start the process. Yield a folder for ``JUPYTER_PATH``, whose kernel ``python3`` is a fork of it."""
    with TemporaryDirectory(prefix="lab-") as folder:
        path = f"{folder}/socket"
        kernels = Path(folder, "kernels", "python3")
        kernels.mkdir(parents=True)
        start = [sys.executable, "-I", "-S", "-c", CLIENT, path, "{connection_file}"]
        spec = {"argv": start, "display_name": "Python 3", "language": "python"}
        (kernels / "kernel.json").write_text(json.dumps(spec))
        serving = [sys.executable, __file__, path]
        with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            yield Path(folder)


def serve(path: str) -> socket.socket | None:
    """Fork for each client. Return the client in the fork, and None once the standard input is closed."""
    for name in PRELOADED:
        import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([0, listening], [], [])
            if 0 in ready:
                return None
            client, _ = listening.accept()
            if os.fork() == 0:
                return client
            client.close()


def become_kernel(client: socket.socket) -> None:
    """Run the kernel that the client asks for. It ends with the client, and with the process of the tests."""
    connection_file, folder, variables = json.loads(client.makefile().readline())
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    del sys.path[0]
    process = fork_for_ranks(client)
    starts_new = forks.Forks

    class Started(starts_new):
        def _start(self):
            forks.Forks = starts_new
            return process

    forks.Forks = Started

    def end_with_client() -> None:
        client.recv(1)
        os._exit(1)

    threading.Thread(target=end_with_client, daemon=True).start()
    sys.argv[1:] = ["-f", connection_file, f"--IPKernelApp.parent_handle={os.getppid()}"]
    import_module("ipykernel.kernelapp").launch_new_instance()


@dataclass
class Process:
    """The process whose forks are ranks, as ``Forks`` uses it."""

    pid: int
    stdin: BinaryIO
    stdout: BinaryIO

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_for_ranks(client: socket.socket) -> Process:
    asked, asks = os.pipe()
    told, tells = os.pipe()
    pid = os.fork()
    if pid:
        os.close(asked)
        os.close(tells)
        return Process(pid, open(asks, "wb"), open(told, "rb"))
    client.close()
    for descriptor in (asks, told):
        os.close(descriptor)
    os.dup2(asked, 0)
    forks.serve(tells)
    raise SystemExit


if __name__ == "__main__":
    asking = serve(sys.argv[1])
    if asking is not None:
        become_kernel(asking)
