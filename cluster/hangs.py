"""Hangs that no collective's own timeout ends: every rank in a collective, and none of them moving."""

import signal
import time
from collections.abc import Callable, Iterable

from cluster.errors import HANG, Failure
from cluster.stacks import ASK, Whereabouts
from cluster.waiting import Run

# The timeouts of collectives come first: they leave the ranks usable, this needs a restart. Groups made by
# torch's new_group have half an hour, and nccl has none that raises.
LATER = 1.25
LOOKS = 5

# Of processor time, between two looks: more than to say where it is takes.
MOVED_SECONDS = 0.05


class HangWatch:
    """Looks at the ranks of a run from time to time; `ask(ranks, ASK)` has them say where they are."""

    def __init__(
        self, run: Run, timeout: float, ask: Callable[[Iterable[int], signal.Signals], None]
    ) -> None:
        self.run, self._timeout, self._ask = run, timeout, ask
        self._asked = self._since = time.monotonic()
        self._seen: dict[int, Whereabouts] = {}

    def look(self) -> Failure | None:
        """Return what to say of a hang: all ranks where they were a timeout ago, each in a collective."""
        run, now = self.run, time.monotonic()
        if now - self._asked < LATER * self._timeout / LOOKS:
            return None
        found = {rank: run.whereabouts[rank] for rank in run.waiting if rank in run.whereabouts}
        stuck = found.keys() == set(run.waiting) and all(where.collective for where in found.values())
        if not stuck or not self._as_before(found):
            self._seen, self._since = found, now
        elif now - self._since > LATER * self._timeout:
            rank, where = min(found.items())
            message = f"{HANG} for {self._timeout:g} s"
            return Failure(rank, "Hang", message, where.stack, time.time(), where.doing)
        self._asked = now
        self._ask(run.waiting, ASK)
        return None

    def _as_before(self, found: dict[int, Whereabouts]) -> bool:
        """Whether no rank has moved: one that waits takes no processor time, one that comes by again does."""
        return found.keys() == self._seen.keys() and all(
            where.doing == self._seen[rank].doing and where.busy - self._seen[rank].busy < MOVED_SECONDS
            for rank, where in found.items()
        )
