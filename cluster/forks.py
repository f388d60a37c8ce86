"""Ranks of this machine as forks of one process, which imports for all of them what takes seconds.

`python -m cluster.forks` reads a line of JSON for each rank from its standard input, forks the rank, and
writes a line when it has started and one when it has ended. It ends with the process that started it.
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue

import psutil

from cluster.errors import ClusterError
from cluster.host import own_cores
from cluster.placement import import_path

# What ranks import themselves, and what a training step imports of torch and transformers. What is not
# installed is left out.
PRELOADED = (
    "ipyparallel.engine.app",
    "cluster.remote",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
)

# pytest sets it anew for each test.
IGNORED_VARIABLES = {"PYTEST_CURRENT_TEST"}


@dataclass(frozen=True)
class Request:
    """A rank to start. It is sent as JSON.

    Attributes:
        arguments: The arguments of `cluster.engine`.
        variables: The environment variables of the rank.
        folder: The folder in which it starts.
        log: The file to which its output is appended.
    """

    arguments: Sequence[str]
    variables: Mapping[str, str]
    folder: str
    log: str


class ForkedProcess:
    """A forked rank, as a launcher of ipyparallel uses a process.

    It is not a child of this process. The process that was forked says when the rank ends, and with which
    exit code.

    Attributes:
        pid: Its id.
    """

    def __init__(self, pid: int) -> None:
        """Describe the process with this id, which may have ended."""
        self.pid = pid
        self._process: psutil.Process | None = None
        self._ended = threading.Event()
        self._code: int | None = None
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)

    def end(self, code: int | None) -> None:
        """Note the end of the process; `code` is None where nobody can tell it any more."""
        self._code = code
        self._ended.set()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.send_signal(number)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the process.

        Returns:
            Its exit code, negative for a signal, None where it is not known.

        Raises:
            psutil.TimeoutExpired: The process has not ended in time.
        """
        if not self._ended.wait(timeout):
            raise psutil.TimeoutExpired(timeout or 0.0, self.pid)
        if self._code is None and self._process is not None:
            return self._process.wait(timeout)
        return self._code


class Forks:
    """The process that is forked, seen from the process that owns the ranks.

    Attributes:
        variables: The environment variables of its start. Those that are read by an import hold for every
            rank.
        cores: The cores that it may use, and each rank with it.
    """

    def __init__(self, variables: Mapping[str, str], cores: Set[int]) -> None:
        """Start the process. It imports while this process goes on.

        Args:
            variables: Its environment variables.
            cores: The cores that this process may use.
        """
        self.variables, self.cores = dict(variables), cores
        self._process = self._start()
        self._ranks: dict[int, ForkedProcess] = {}
        self._new: SimpleQueue[ForkedProcess | None] = SimpleQueue()
        threading.Thread(target=self._read, name="forked ranks", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process can still be forked."""
        return self._process.poll() is None

    def fork(self, request: Request) -> ForkedProcess:
        """Start a rank, and return its process.

        Raises:
            ClusterError: The process that is forked has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            self._process.stdin.flush()
        process = self._new.get()
        if process is None:
            self._new.put(None)  # for the next call
            raise ClusterError(f"the process that is forked into ranks ended with {self._process.wait()}")
        return process

    def close(self) -> None:
        """Let the process end, once its ranks have ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "cluster.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.variables,
            start_new_session=True,
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as lines:
                for line in lines:
                    told = json.loads(line)
                    if "code" in told:
                        self._ranks.pop(told["pid"]).end(told["code"])
                    else:
                        rank = self._ranks[told["pid"]] = ForkedProcess(told["pid"])
                        self._new.put(rank)
            self._process.wait()
        finally:
            self._new.put(None)
            for rank in self._ranks.values():
                rank.end(None)


_forks: Forks | None = None
_one_at_a_time = threading.Lock()


def fork(imported: Mapping[str, str], request: Request) -> ForkedProcess:
    """Start a rank as a fork of this program's process for it; see `Forks.fork`.

    A new process is started where what an import can depend on has changed: the variables, the import path,
    or the cores.

    Args:
        imported: The environment variables of the imports.
        request: The rank.

    Raises:
        ClusterError: The process that is forked has ended.
    """
    global _forks
    wanted = {name: value for name, value in imported.items() if name not in IGNORED_VARIABLES}
    wanted["PYTHONPATH"], cores = import_path(), own_cores()
    with _one_at_a_time:
        if _forks is None or not _forks.alive or (_forks.variables, _forks.cores) != (wanted, cores):
            if _forks is not None:
                _forks.close()
            _forks = Forks(wanted, cores)
        return _forks.fork(request)


def main() -> None:
    """Serve until the standard input is closed. In a fork, become the rank that was asked for."""
    # What an import prints is none of what this process tells.
    told = os.dup(1)
    os.dup2(2, 1)
    # What is imported stays. To search it for garbage takes a fifth of the time of the imports.
    gc.disable()
    for name in PRELOADED:
        # A rank that needs the module raises the error itself, where it can be read.
        with suppress(Exception):
            importlib.import_module(name)
    # Nor do ranks search it, after each call that made process groups.
    gc.freeze()
    serve(told)


def serve(told: int) -> None:
    """Fork for each request, and return once all ranks have ended. In a fork, become the rank.

    Args:
        told: The descriptor of the file to which starts and ends are written.
    """
    request = _serve(told)
    if request is not None:
        _become(request)


def _serve(told: int) -> Request | None:
    """Fork for each request. Return the request in the fork, and None once all ranks have ended.

    Args:
        told: The descriptor of the file to which starts and ends are written.
    """
    ended, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    rest = b""
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _report_ended(told, os.WNOHANG)
        if 0 not in ready:
            continue
        text = os.read(0, 2**16)
        if not text:
            # They end with the owner, if it is gone.
            _report_ended(told, 0)
            return None
        *lines, rest = (rest + text).split(b"\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (told, ended, wakes):
                    os.close(descriptor)
                return Request(**json.loads(line))
            _tell(told, pid=pid)


def _report_ended(told: int, options: int) -> None:
    """Tell the exit code of each child that has ended; without WNOHANG, wait for all of them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, options)
            if pid == 0:
                return
            _tell(told, pid=pid, code=os.waitstatus_to_exitcode(status))


def _tell(told: int, **said: int) -> None:
    with suppress(BrokenPipeError):  # the owner is gone
        os.write(told, json.dumps(said).encode() + b"\n")


def _become(request: Request) -> None:
    """Take what a new process would have of the arguments and variables, and run the rank."""
    os.setsid()
    output = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request.variables)
    os.chdir(request.folder)
    added = request.variables["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = dict.fromkeys([request.folder, *added, *sys.path])
    importlib.invalidate_caches()
    sys.argv[1:] = request.arguments
    import numpy
    import torch

    from cluster import engine

    # As a new process has them: other random numbers on each rank.
    numpy.random.seed()
    torch.default_generator.seed()
    engine.main()


if __name__ == "__main__":
    main()
