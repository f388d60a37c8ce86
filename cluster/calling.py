"""One call on the ranks, from the sending to the last answer: who failed first, who is stuck."""

import secrets
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from cluster.engines import Engines
from cluster.errors import PROCESS_DIED, ClusterError, Failure, RankError, Stopped, name_ranks
from cluster.hangs import HangWatch
from cluster.stacks import ASK
from cluster.waiting import OnRecord, Run

# A call's failure is told within two seconds once its rank has left: the others have one to answer, and half
# of one to say where they are.
GRACE_SECONDS = 1.0
TELL_SECONDS = 0.5
# To leave its process group takes a rank some tenths of a second, more on a busy machine.
LEAVE_SECONDS = 5.0
# An import, which an interrupt waits for, takes seconds.
INTERRUPT_SECONDS = 8.0
AGAIN_SECONDS = 0.25


class Caller:
    """Runs payloads on the ranks of `engines`, one call at a time.

    `recover` is what an error offers to its reader. `broken` says why no call can be served, `stopped`
    whether that is since a call was interrupted, `left` whether ranks have left their process group in an
    error. `kernels_wait` says that ranks wait for their peers in kernels, as NCCL's do: they do not come back
    when one of them fails, and the next call restarts them.
    """

    def __init__(self, engines: Engines, recover: Callable[[], None]) -> None:
        self.broken: str | None = None
        self.stopped = False
        self.left = False
        self.kernels_wait = False
        self._engines, self._recover = engines, recover
        self._current: Run | None = None
        self._interrupted: float | None = None

    @property
    def restarts(self) -> bool:
        """Whether the next call restarts ranks that are stuck or gone, and nobody has to ask for it."""
        # Whoever stopped a call wants the next one, and has read no error that offers a recover.
        return self.stopped or self.kernels_wait

    def run(
        self,
        payloads: dict[int, bytes],
        on_record: OnRecord | None,
        timeout: float,
        answer_timeout: float | None = None,
    ) -> Run:
        """Run one payload a rank; return when each has answered, or raise for the first failure.

        `timeout` is that of the ranks' collectives, `answer_timeout` that of the whole call, in seconds.
        """
        inbox = self._engines.inbox
        self._current = run = Run(secrets.token_hex(8), list(payloads), on_record)
        self._interrupted = None
        hangs = HangWatch(run, timeout, self._signal)
        try:
            for rank, payload in payloads.items():
                self._engines.client.send(rank, payload, run.id)
            answered = run.wait(
                inbox,
                lambda: bool(run.failures or run.leaving) or not run.waiting,
                answer_timeout,
                lambda: self._check(hangs),
            )
            if run.failures or run.leaving:
                raise self._failed(run)
            if not answered:
                late = name_ranks(run.waiting)
                raise ClusterError(
                    f"no answer within {answer_timeout:g} s from {late}; cluster.recover() restarts them"
                )
        except BaseException as error:
            self._settle(run, error)
            raise
        finally:
            self._current = None
        return run

    def interrupt(self) -> None:
        """End the call that is running, from another thread."""
        if self._current is not None:
            self._interrupted = time.monotonic()
            self._signal(self._current.waiting, signal.SIGINT)

    def wait_for_records(self, run: Run, seconds: float) -> bool:
        """Whether all that the ranks published arrived within `seconds`."""
        return run.wait(self._engines.inbox, lambda: not run.unrecorded, seconds)

    def _check(self, hangs: HangWatch) -> None:
        self._engines.check_controller()
        if self._interrupted is not None:
            raise self._failed(hangs.run)
        stuck = hangs.look()
        if stuck is not None:
            run = hangs.run
            others = {rank: run.whereabouts.get(rank) for rank in run.waiting if rank != stuck.rank}
            raise RankError([stuck], others, self._recover, self.restarts)

    def _failed(self, run: Run) -> Exception:
        """Hear the others out, and say who failed first and where the rest is."""
        if self._interrupted is not None:
            self._chase(run)
            return Stopped("the call was stopped")
        inbox = self._engines.inbox
        # First those that failed have left: only then are their peers free to answer.
        run.wait(inbox, lambda: run.waiting == run.silent, LEAVE_SECONDS)
        if not run.wait(inbox, lambda: not run.silent, GRACE_SECONDS):
            self._signal(run.silent, ASK)
            run.wait(inbox, lambda: run.whereabouts.keys() >= set(run.silent), TELL_SECONDS)
        run.wait(inbox, lambda: run.waiting == run.silent, LEAVE_SECONDS)
        stuck = {rank: run.whereabouts.get(rank) for rank in run.silent}
        failures = {**run.leaving, **run.failures}.values()
        explained = [self._explained(failure) for failure in failures]
        return RankError(explained, stuck, self._recover, self.restarts)

    def _explained(self, failure: Failure) -> Failure:
        code = self._engines.exit_code(failure.rank) if failure.kind == PROCESS_DIED else None
        if code is None:
            return failure
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return replace(failure, message=f"{failure.message} ({how})")

    def _chase(self, run: Run) -> None:
        """Interrupt what still runs, again and again: an interrupt within a destructor is lost."""
        deadline = (self._interrupted or time.monotonic()) + INTERRUPT_SECONDS
        while run.silent and time.monotonic() < deadline:
            self._signal(run.silent, signal.SIGINT)
            run.wait(self._engines.inbox, lambda: not run.silent, AGAIN_SECONDS)
        run.wait(self._engines.inbox, lambda: run.waiting == run.silent, LEAVE_SECONDS)

    def _signal(self, ranks: Iterable[int], number: signal.Signals) -> None:
        for rank in set(ranks) - set(self._engines.missing()):
            self._engines.client.signal(rank, number)

    def _settle(self, run: Run, error: BaseException) -> None:
        """After a call that failed or was interrupted: see whether the ranks can serve another."""
        # Said first, so that it stands if this wait is interrupted too.
        self.broken = f"{name_ranks(run.waiting or run.ranks)} did not come back from a call"
        self.left = True
        self.stopped = isinstance(error, Stopped | KeyboardInterrupt)
        if isinstance(error, KeyboardInterrupt):
            self._chase(run)
        elif not isinstance(error, RankError | Stopped):
            run.on_record = None  # whose error it may be
            run.wait(self._engines.inbox, lambda: not run.waiting, GRACE_SECONDS)
        if run.on_record is not None:
            self.wait_for_records(run, TELL_SECONDS)
        dead = [rank for rank, failure in run.failures.items() if failure.kind == PROCESS_DIED]
        if dead:
            self.broken = f"the process of {name_ranks(dead)} ended"
        elif not run.waiting:
            self.broken = None
