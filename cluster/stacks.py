"""The Python stack of a rank, reported by a separate thread, also while the rank is stuck in a collective."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from traceback import FrameSummary

from cluster.live import publish

# The signal that asks a rank for a report. The engine's nanny sends it, so that it reaches every host.
ASK = signal.SIGUSR1

# Functions of torch.distributed between the caller's line and the collective itself.
WRAPPERS = {"wrapper", "_wrapper", "wait", "wait_tensor", "__call__"}

# The frames up to the last one of these files are the engine's. The frames after it are the caller's.
CALLERS = ("cluster/remote.py", "cluster/magic.py")


@dataclass(frozen=True)
class StackReport:
    """Where a rank is.

    Attributes:
        collective: The name of the collective that it is in, empty where it is in none.
        line: The line of the caller's own code, empty where there is none.
        stack: The printed stack.
        busy: The processor time that the main thread has taken so far, in seconds.
    """

    collective: str
    line: str
    stack: str
    busy: float = 0.0

    @property
    def position(self) -> str:
        """The collective and the line, as one line of text."""
        return ", at ".join(part for part in (self.collective, self.line) if part) or "between two calls"


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
    lines = [f for f in own if "site-packages" not in f.filename and not f.filename.startswith("<frozen")]
    line = f"{PurePath(lines[-1].filename).name}:{lines[-1].lineno} in {lines[-1].name}" if lines else ""
    stack = "".join(traceback.format_list(list(own)))
    return StackReport(collectives[-1] if collectives else "", line, stack)


def _answer() -> None:
    main = threading.main_thread().ident or 0
    clock = time.pthread_getcpuclockid(main)
    while True:
        signal.sigwait({ASK})
        frame = sys._current_frames().get(main)
        if frame is not None:
            answer = report(traceback.extract_stack(frame))
            publish(replace(answer, busy=time.clock_gettime(clock)))
        # A frame keeps its local variables alive: memory, and process groups that others wait to see closed.
        del frame
