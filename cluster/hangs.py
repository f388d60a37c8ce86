"""Hangs that no timeout of a collective ends: every rank is in a collective, and no rank makes progress."""

import signal
import time
from collections.abc import Callable, Iterable

from cluster.errors import HANG, Failure
from cluster.stacks import ASK, StackReport
from cluster.waiting import Call

# A hang is reported after this multiple of the timeout. The timeouts of the collectives themselves come
# first, because they leave the ranks usable, and a hang that is found here needs a restart. Groups made by
# torch's new_group have a timeout of half an hour, and no timeout of NCCL raises an error.
LATER = 1.25
# How often the ranks are asked for their stacks within that time.
LOOKS = 5

# Seconds of processor time between two stack reports. To send a report takes less.
MOVED_SECONDS = 0.05


class HangWatch:
    """Looks for a hang while a call runs.

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
        self.call, self._timeout, self._ask = call, timeout, ask
        self._asked = self._since = time.monotonic()
        self._seen: dict[int, StackReport] = {}

    def look(self) -> Failure | None:
        """Ask for new stack reports when they are due, and compare the last ones.

        Returns:
            A failure where all ranks have been in the same collectives for longer than the timeout, else
            None.
        """
        call, now = self.call, time.monotonic()
        if now - self._asked < LATER * self._timeout / LOOKS:
            return None
        reports = {rank: call.stacks[rank] for rank in call.waiting if rank in call.stacks}
        stuck = reports.keys() == set(call.waiting) and all(report.collective for report in reports.values())
        if not stuck or self._moved(reports):
            self._seen, self._since = reports, now
        elif now - self._since > LATER * self._timeout:
            rank, report = min(reports.items())
            message = f"{HANG} for {self._timeout:g} s"
            return Failure(rank, "Hang", message, report.stack, time.time(), report.position)
        self._asked = now
        self._ask(call.waiting, ASK)
        return None

    def _moved(self, reports: dict[int, StackReport]) -> bool:
        """Whether a rank has made progress since the reports before.

        A rank that waits takes no processor time. A rank that came to the same line again has taken some.
        """
        return reports.keys() != self._seen.keys() or any(
            report.position != self._seen[rank].position
            or report.busy - self._seen[rank].busy >= MOVED_SECONDS
            for rank, report in reports.items()
        )
