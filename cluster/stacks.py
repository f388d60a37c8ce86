"""The Python stack of a rank, reported by a separate thread, also while the rank is stuck in a collective."""

import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from traceback import FrameSummary

from cluster.live import publish
from cluster.work import NO_WORK, Work, work_so_far

# The signal that asks a rank for a report. The engine's nanny sends it, so that it reaches every host.
ASK = signal.SIGUSR1

# Functions of torch.distributed between the caller's line and the collective itself.
WRAPPERS = {"wrapper", "_wrapper", "wait", "wait_tensor", "__call__"}

# The frames up to the last one of these files are the engine's. The frames after it are the caller's.
CALLERS = ("cluster/remote.py", "cluster/magic.py")

# A frame whose file's name contains one of these is not of the caller's own code.
LIBRARIES = ("site-packages", "<frozen", sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class StackReport:
    """Where a rank is.

    Attributes:
        collective: The name of the collective that it is in, empty where it is in none.
        function: The innermost function of the caller's own code, empty where there is none.
        place: The file and the line in that function.
        stack: The printed stack.
        work: What the rank has done so far.
    """

    collective: str
    function: str
    place: str
    stack: str
    work: Work = NO_WORK

    @property
    def position(self) -> str:
        """The collective and the line, as one line of text."""
        if self.collective and self.function:
            return f"{self.collective}, at {self.place} in {self.function}"
        return self.collective or (
            f"{self.function} ({self.place})" if self.function else "between two calls"
        )


def listen() -> None:
    """Start a thread that answers each ASK with a report of the main thread.

    Call this function before any other thread is started. It blocks the signal in this thread and in all
    threads that are started later. Otherwise Python would deliver the signal to the main thread, and a main
    thread that is stuck never handles it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    threading.Thread(target=_answer, name="stack reports", daemon=True).start()


def report(frames: Sequence[FrameSummary]) -> StackReport:
    """Return the report of a stack.

    Args:
        frames: The stack, outermost frame first. Only the frames of the caller's own code are reported.
    """
    engine = [n for n, frame in enumerate(frames) if frame.filename.endswith(CALLERS)]
    own = frames[engine[-1] + 1 :] if engine else frames
    collectives = [f.name for f in own if "torch/distributed/" in f.filename and f.name not in WRAPPERS]
    lines = [f for f in own if not any(library in f.filename for library in LIBRARIES)]
    if not collectives:
        lines = lines or list(own[-1:])
    function, place = "", ""
    if lines:
        function, place = lines[-1].name, f"{PurePath(lines[-1].filename).name}:{lines[-1].lineno}"
    stack = "".join(traceback.format_list(list(own)))
    return StackReport(collectives[-1] if collectives else "", function, place, stack)


def _answer() -> None:
    main = threading.main_thread().ident or 0
    while True:
        signal.sigwait({ASK})
        publish(replace(report(stack_of(main)), work=work_so_far()))


def stack_of(thread: int) -> list[FrameSummary]:
    """Return the stack of a thread of this process, outermost frame first.

    A frame keeps its local variables alive: memory that is measured to the byte, and process groups that
    others wait to see closed. So this function holds the frames no longer than it takes to read the numbers
    of their lines. The lines themselves are read from their files when the stack is printed.
    """
    calls = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        calls.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return [
        FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)
        for code, line in reversed(calls)
    ]
