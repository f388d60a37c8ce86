"""Hangs that no timeout of a collective ends: ranks wait, and none of them makes progress."""

import signal
import time
from collections.abc import Callable, Iterable

from cluster.errors import HANG, STUCK, Failure
from cluster.stacks import ASK, StackReport
from cluster.waiting import Call

# A hang is reported after this multiple of the timeout. The timeouts of the collectives themselves come
# first, because they leave the ranks usable, and a hang that is found here needs a restart. Groups made by
# torch's new_group have a timeout of half an hour, and no timeout of NCCL raises an error.
LATER = 1.25
# How often the ranks are asked for their stacks within that time.
LOOKS = 5

# A rank works if it takes so much processor time: a share of one core, and at least so many seconds. The
# engine's own threads take about 0.2% of a core, and so does a loop that looks for a file every 10 ms.
WORKING_SHARE = 0.01
WORKING_SECONDS = 0.05


class HangWatch:
    """Looks for a hang while a call runs.

    A call hangs where no rank that has yet to answer makes progress for LATER times the timeout. A rank makes
    progress where

    - its Python stack changes,
    - it takes more than WORKING_SHARE of a core, with its child processes, for instance a compiler,
    - it or a child process reads from a disk or writes to it,
    - it prints, publishes a record, or answers.

    What a rank waits for has no meaning: a collective, a lock, a socket or `time.sleep`. A rank that sends no
    stack report is not known to wait, and the call goes on. That is so while it runs C code that keeps
    Python's interpreter lock, and while its answer is on its way.

    Attributes:
        call: The call that is watched.
    """

    def __init__(
        self, call: Call, timeout: float, ask: Callable[[Iterable[int], signal.Signals], None]
    ) -> None:
        """Start to watch `call`.

        Args:
            call: The call.
            timeout: The timeout of its collectives, in seconds.
            ask: Called as `ask(ranks, ASK)`, to have these ranks send a stack report.
        """
        self.call, self._limit, self._timeout, self._ask = call, LATER * timeout, timeout, ask
        self._asked = self._moved = time.monotonic()
        # The report with which each rank last made progress, and when it arrived.
        self._last: dict[int, tuple[StackReport, float]] = {}

    def look(self) -> Failure | None:
        """Ask for new stack reports when they are due, and compare them with those before.

        Returns:
            A failure where no rank has made progress for longer than the limit, else None.
        """
        call, now = self.call, time.monotonic()
        if now - self._asked < self._limit / LOOKS:
            return None
        for rank, report in call.stacks.items():
            if self._has_moved(rank, report, now):
                self._last[rank], self._moved = (report, now), now
        reported = call.stacks.keys() >= set(call.waiting)
        if reported and now - max(self._moved, call.heard) > self._limit:
            return self._failure()
        self._asked = now
        # A report of a rank that sends no other one says nothing about the time after it.
        call.stacks.clear()
        self._ask(call.waiting, ASK)
        return None

    def _has_moved(self, rank: int, report: StackReport, now: float) -> bool:
        if rank not in self._last:
            return True
        before, when = self._last[rank]
        # The sum falls where a child process ends and its time is not handed to this rank.
        seconds = abs(report.work.seconds - before.work.seconds)
        return (
            report.stack != before.stack
            or report.work.disk != before.work.disk
            or seconds >= max(WORKING_SECONDS, WORKING_SHARE * (now - when))
        )

    def _failure(self) -> Failure:
        reports = {rank: self.call.stacks[rank] for rank in self.call.waiting}
        outside = [rank for rank, report in reports.items() if not report.collective]
        if outside:
            kind, message = STUCK, f"no rank has made progress for {self._limit:g} s"
        else:
            kind, message = "Hang", f"{HANG} for {self._timeout:g} s"
        rank = min(outside or reports)
        return Failure(rank, kind, message, reports[rank].stack, time.time(), reports[rank].position)
