"""The state of one call, and waiting for it: records as they arrive, then answers or failures."""

import sys
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import cloudpickle
from ipyparallel.error import RemoteError

from cluster.client import AnswerMessage, Message, OutputMessage
from cluster.errors import PROCESS_DIED, Failure
from cluster.live import Note, Stamp
from cluster.stacks import StackReport

OnRecord = Callable[[int, Any], None]

TICK_SECONDS = 0.5

# The end of a process is noticed up to 150 ms later. By then the collectives of its peers have failed. The
# time of a death is therefore set this much earlier, with a margin.
DEATH_LAG_SECONDS = 0.5


class Call:
    """What is known of one call.

    Attributes:
        id: The id of the call, which its messages carry.
        ranks: The ranks that run it.
        on_record: Called as `on_record(rank, record)` in the thread that waits. None ignores the records.
        answers: The cloudpickled results, by rank.
        failures: The failures, by rank.
        leaving: The failures of ranks that have not left their process group yet, by rank.
        ended: The ranks whose records have all arrived.
        stacks: The last stack report of each rank that sent one.
        heard: When a rank last sent something other than a stack report, by `time.monotonic`.
    """

    def __init__(self, call_id: str, ranks: Sequence[int], on_record: OnRecord | None) -> None:
        self.id = call_id
        self.ranks = tuple(ranks)
        self.on_record = on_record
        self.answers: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}
        self.leaving: dict[int, Failure] = {}
        self.ended: set[int] = set()
        self.stacks: dict[int, StackReport] = {}
        self.heard = time.monotonic()

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.ranks if rank not in self.answers and rank not in self.failures]

    @property
    def silent(self) -> list[int]:
        """The ranks that have neither answered nor reported a failure."""
        return [rank for rank in self.waiting if rank not in self.leaving]

    @property
    def dead(self) -> list[int]:
        """The ranks whose process ended."""
        return [rank for rank, failure in self.failures.items() if failure.kind == PROCESS_DIED]

    @property
    def unrecorded(self) -> list[int]:
        """The ranks that have answered, but whose records may not all have arrived."""
        return [rank for rank in (*self.answers, *self.failures) if rank not in {*self.ended, *self.dead}]

    def wait(
        self,
        inbox: SimpleQueue[Message],
        done: Callable[[], bool],
        seconds: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Take messages from `inbox` until `done()` is true.

        Args:
            inbox: The messages of the ranks.
            done: Says whether the wait is over.
            seconds: The longest time to wait. None waits without a limit.
            check: Called about every half second. An error that it raises ends the wait.

        Returns:
            False where `seconds` passed before `done()` was true.
        """
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        last_check = time.monotonic()
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            if now - last_check >= TICK_SECONDS:
                check()
                last_check = now
            try:
                message = inbox.get(timeout=min(TICK_SECONDS, deadline - now))
            except Empty:
                continue
            self._take(message)
        return True

    def _take(self, message: Message) -> None:
        if isinstance(message, OutputMessage):
            self.heard = time.monotonic()
            return
        if isinstance(message, AnswerMessage):
            if message.call_id == self.id:
                self._take_answer(message)
            return
        stamp, record = cloudpickle.loads(message.data)
        if stamp.call_id == self.id:
            self._take_record(stamp, record)

    def _take_record(self, stamp: Stamp, record: Any) -> None:
        if stamp.end:
            self.ended.add(stamp.rank)
        elif isinstance(record, Failure):
            self.leaving[stamp.rank] = record
        elif isinstance(record, StackReport):
            self.stacks[stamp.rank] = record
        elif isinstance(record, Note):
            self.heard = time.monotonic()
            print(f"rank {stamp.rank}: {record.text}", file=sys.stderr, flush=True)
        else:
            self.heard = time.monotonic()
            if self.on_record is not None:
                self.on_record(stamp.rank, record)

    def _take_answer(self, message: AnswerMessage) -> None:
        rank = message.rank
        self.heard = time.monotonic()
        try:
            answer = message.result.get(timeout=0)
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
