"""Waiting for the ranks of one run: their records as they come, then their answers or failures."""

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import cloudpickle
from ipyparallel.error import RemoteError

from cluster.client import Published, Returned
from cluster.errors import PROCESS_DIED, Failure
from cluster.live import Stamp
from cluster.stacks import Whereabouts

OnRecord = Callable[[int, Any], None]

TICK_SECONDS = 0.5

# A process's death is seen up to 150 ms after it, by when its peers' collectives have failed; so a death
# counts as that much earlier, with room to spare.
DEATH_LAG_SECONDS = 0.5


class Run:
    """What is known of one run on `ranks`.

    `answers` holds the cloudpickled results by rank, `failures` what failed by rank, `leaving` what failed on
    a rank that has yet to leave its process group, `ended` the ranks whose records have all been delivered,
    `whereabouts` where a rank said it was. `on_record(rank, record)` is called by the thread that waits.
    """

    def __init__(self, run_id: str, ranks: Sequence[int], on_record: OnRecord | None) -> None:
        self.id = run_id
        self.ranks = tuple(ranks)
        self.on_record = on_record
        self.answers: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}
        self.leaving: dict[int, Failure] = {}
        self.ended: set[int] = set()
        self.whereabouts: dict[int, Whereabouts] = {}

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self.answers and rank not in self.failures]

    @property
    def silent(self) -> list[int]:
        """Those of them that have not said either that they failed."""
        return [rank for rank in self.waiting if rank not in self.leaving]

    @property
    def unrecorded(self) -> list[int]:
        """The ranks that answered, but whose records may not all have arrived."""
        failed = [rank for rank, failure in self.failures.items() if failure.kind != PROCESS_DIED]
        return [rank for rank in (*self.answers, *failed) if rank not in self.ended]

    def wait(
        self,
        inbox: SimpleQueue[Published | Returned],
        done: Callable[[], bool],
        seconds: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Take in what arrives until `done()`; return False if that takes longer than `seconds`.

        `check` is called every half second or so, and may raise.
        """
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        checked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            if now - checked >= TICK_SECONDS:
                check()
                checked = now
            try:
                event = inbox.get(timeout=min(TICK_SECONDS, deadline - now))
            except Empty:
                continue
            self._take(event)
        return True

    def _take(self, event: Published | Returned) -> None:
        if isinstance(event, Returned):
            if event.run == self.id:
                self._take_answer(event)
            return
        stamp, record = cloudpickle.loads(event.data)
        if stamp.run == self.id:
            self._take_record(stamp, record)

    def _take_record(self, stamp: Stamp, record: Any) -> None:
        if stamp.end:
            self.ended.add(stamp.rank)
        elif isinstance(record, Failure):
            self.leaving[stamp.rank] = record
        elif isinstance(record, Whereabouts):
            self.whereabouts[stamp.rank] = record
        elif self.on_record is not None:
            self.on_record(stamp.rank, record)

    def _take_answer(self, event: Returned) -> None:
        rank = event.rank
        try:
            answer = event.call.get(timeout=0)
        except RemoteError as error:
            if error.ename == "EngineError":
                died = time.time() - DEATH_LAG_SECONDS
                self.failures[rank] = Failure(rank, PROCESS_DIED, "its process ended", "", died)
            else:
                self.failures[rank] = Failure(rank, error.ename, error.evalue, error.traceback, time.time())
            return
        if answer.failure is not None:
            self.failures[rank] = answer.failure
        else:
            self.answers[rank] = answer.result
