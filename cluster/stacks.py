"""Where a rank is: its Python stack, told by a thread of its own, also while it is stuck in a collective."""

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

# Sent by the engine's nanny, so it reaches engines on other machines too.
ASK = signal.SIGUSR1

# What stands between the caller's line and the collective's own name.
WRAPPERS = {"wrapper", "_wrapper", "wait", "wait_tensor", "__call__"}

# Everything up to these is the engine's; what they call is the caller's.
CALLERS = ("cluster/remote.py", "cluster/magic.py")


@dataclass(frozen=True)
class Whereabouts:
    """`collective` is the one it is in, `place` the caller's line, each empty where there is none.

    `stack` is the printed stack, `busy` the seconds of processor time that its thread has taken so far.
    """

    collective: str
    place: str
    stack: str
    busy: float = 0.0

    @property
    def doing(self) -> str:
        """All that in one line."""
        return ", at ".join(part for part in (self.collective, self.place) if part) or "between two calls"


def listen() -> None:
    """Answer, from a thread, each ASK with a published Whereabouts of the main thread.

    To be called before any other thread is started: the signal is blocked in this thread and in all that come
    after it, or Python would keep it for a main thread that is stuck and never looks.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    threading.Thread(target=_answer, name="whereabouts", daemon=True).start()


def whereabouts(frames: Sequence[FrameSummary]) -> Whereabouts:
    """Say where a stack is, outermost frame first, from the first frame that is the caller's own."""
    ours = [n for n, frame in enumerate(frames) if frame.filename.endswith(CALLERS)]
    own = frames[ours[-1] + 1 :] if ours else frames
    collectives = [f.name for f in own if "torch/distributed/" in f.filename and f.name not in WRAPPERS]
    lines = [f for f in own if "site-packages" not in f.filename and not f.filename.startswith("<frozen")]
    place = f"{PurePath(lines[-1].filename).name}:{lines[-1].lineno} in {lines[-1].name}" if lines else ""
    stack = "".join(traceback.format_list(list(own)))
    return Whereabouts(collectives[-1] if collectives else "", place, stack)


def _answer() -> None:
    main = threading.main_thread().ident or 0
    clock = time.pthread_getcpuclockid(main)
    while True:
        signal.sigwait({ASK})
        frame = sys._current_frames().get(main)
        if frame is not None:
            found = whereabouts(traceback.extract_stack(frame))
            publish(replace(found, busy=time.clock_gettime(clock)))
        # A frame keeps alive what it names: bytes that nobody counts, and collectives wait for.
        del frame
