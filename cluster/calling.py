"""One call on the ranks, from sending it to the last answer. Finds who failed first and who is stuck."""

import secrets
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from cluster.engines import Engines
from cluster.errors import PROCESS_DIED, ClusterError, Failure, RankError, Stopped, name_ranks
from cluster.hangs import HangWatch
from cluster.stacks import ASK
from cluster.waiting import Call, OnRecord

# A failure is reported at most two seconds after its rank has left the process group. The other ranks have
# one second to answer, and half a second to report where they are.
GRACE_SECONDS = 1.0
REPORT_SECONDS = 0.5
# A rank takes some tenths of a second to leave its process group, and more on a busy machine.
LEAVE_SECONDS = 5.0
# An interrupt waits for the end of an import, which takes seconds.
INTERRUPT_SECONDS = 8.0
AGAIN_SECONDS = 0.25
# How much later than its end a rank's exit code may be known.
CODE_SECONDS = 1.0


class Caller:
    """Runs payloads on the ranks, one call at a time.

    Attributes:
        engines: The processes of the ranks.
        broken: Why no call can be served, None where one can.
        stopped: Whether the last call was interrupted.
        left_group: Whether ranks have left their process group after an error, so that they have to join
            again.
        kernels_wait: Whether ranks wait for their peers in kernels, as with NCCL. Such ranks do not come back
            when one of them fails, and the next call restarts them.
    """

    def __init__(self, engines: Engines, recover: Callable[[], None]) -> None:
        """Make a caller for the ranks of `engines`.

        Args:
            engines: The processes of the ranks.
            recover: The function that a `RankError` offers to its reader.
        """
        self.broken: str | None = None
        self.stopped = False
        self.left_group = False
        self.kernels_wait = False
        self.engines, self._recover = engines, recover
        self._current: Call | None = None
        self._failed: Call | None = None
        self._interrupted: float | None = None

    @property
    def restarts(self) -> bool:
        """Whether the next call restarts ranks that are stuck or gone, without a call of `recover`."""
        # A user who stopped a call wants the next one to run, and has read no error that offers recover().
        return self.stopped or self.kernels_wait

    def run(
        self,
        payloads: dict[int, bytes],
        on_record: OnRecord | None,
        timeout: float,
        answer_timeout: float | None = None,
    ) -> Call:
        """Run one payload on each rank, and return when every rank has answered.

        Args:
            payloads: The cloudpickled function and arguments, by rank.
            on_record: Called for each record, or None.
            timeout: The timeout of each collective, in seconds.
            answer_timeout: The timeout of the whole call, in seconds. None sets no limit.

        Returns:
            The call, with an answer of every rank.

        Raises:
            RankError: A rank failed, or no rank makes progress.
            ClusterError: The call took longer than `answer_timeout`, or the controller is gone.
            Stopped: `interrupt` ended the call.
        """
        inbox = self.engines.inbox
        self._failed = self._interrupted = None
        self._current = call = Call(secrets.token_hex(8), list(payloads), on_record)
        hangs = HangWatch(call, timeout, self._signal)
        try:
            for rank, payload in payloads.items():
                self.engines.client.send(rank, payload, call.id)
            in_time = call.wait(
                inbox,
                lambda: bool(call.failures or call.leaving) or not call.waiting,
                answer_timeout,
                lambda: self._check(hangs),
            )
            if call.failures or call.leaving:
                raise self._error_of(call)
            if not in_time:
                late = name_ranks(call.waiting)
                raise ClusterError(
                    f"no answer within {answer_timeout:g} s from {late}; cluster.recover() restarts them"
                )
        except BaseException as error:
            self._note_state(call, error)
            raise
        finally:
            self._current = None
        return call

    def interrupt(self) -> None:
        """End the call that is running. Another thread calls this method."""
        if self._current is not None:
            self._interrupted = time.monotonic()
            self._signal(self._current.waiting, signal.SIGINT)

    def wait_for_late_answers(self) -> None:
        """Wait once for ranks that had not answered when the last call failed. Some are not stuck, only slow.

        Raises:
            ClusterError: The controller is gone.
            Stopped: `interrupt` ended the wait.
        """
        call, self._failed = self._failed, None
        if call is None or not call.waiting or call.dead:
            return

        def check() -> None:
            self.engines.check_controller()
            if self._interrupted is not None:
                self.stopped = True
                raise self._error_of(call)

        self._interrupted, self._current = None, call
        try:
            call.wait(self.engines.inbox, lambda: bool(call.dead) or not call.waiting, LEAVE_SECONDS, check)
            # The rank may have answered the stop before the next look.
            check()
        except KeyboardInterrupt:
            self.stopped = True
            raise
        finally:
            self._current = None
            self._note_answers(call)

    def cannot_serve(self, why: str) -> None:
        """Note why no call can be served until the ranks are restarted."""
        self.broken, self._failed = why, None

    def wait_for_records(self, call: Call, seconds: float) -> bool:
        """Wait until all records of `call` have arrived, and return whether they did within `seconds`."""
        return call.wait(self.engines.inbox, lambda: not call.unrecorded, seconds)

    def _check(self, hangs: HangWatch) -> None:
        self.engines.check_controller()
        if self._interrupted is not None:
            raise self._error_of(hangs.call)
        hang = hangs.look()
        if hang is not None:
            call = hangs.call
            others = {rank: call.stacks.get(rank) for rank in call.waiting if rank != hang.rank}
            raise RankError([hang], others, self._recover, self.restarts)

    def _error_of(self, call: Call) -> Exception:
        """Wait for the other ranks for a moment, and return the error to raise."""
        if self._interrupted is not None:
            self._interrupt_again(call)
            return Stopped("the call was stopped")
        inbox = self.engines.inbox
        # The ranks that failed must leave first: only then can their peers answer.
        call.wait(inbox, lambda: call.waiting == call.silent, LEAVE_SECONDS)
        if not call.wait(inbox, lambda: not call.silent, GRACE_SECONDS):
            self._signal(call.silent, ASK)
            call.wait(inbox, lambda: call.stacks.keys() >= set(call.silent), REPORT_SECONDS)
        call.wait(inbox, lambda: call.waiting == call.silent, LEAVE_SECONDS)
        stuck = {rank: call.stacks.get(rank) for rank in call.silent}
        failures = {**call.leaving, **call.failures}.values()
        deadline = time.monotonic() + CODE_SECONDS
        return RankError(
            [self._with_exit_code(failure, deadline) for failure in failures],
            stuck,
            self._recover,
            self.restarts,
        )

    def _with_exit_code(self, failure: Failure, deadline: float) -> Failure:
        code = self.engines.exit_code(failure.rank, deadline) if failure.kind == PROCESS_DIED else None
        if code is None:
            return failure
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return replace(failure, message=f"{failure.message} ({how})")

    def _interrupt_again(self, call: Call) -> None:
        """Interrupt the ranks that still run, repeatedly: Python drops an interrupt inside a destructor."""
        deadline = (self._interrupted or time.monotonic()) + INTERRUPT_SECONDS
        while call.silent and time.monotonic() < deadline:
            self._signal(call.silent, signal.SIGINT)
            call.wait(self.engines.inbox, lambda: not call.silent, AGAIN_SECONDS)
        call.wait(self.engines.inbox, lambda: call.waiting == call.silent, LEAVE_SECONDS)

    def _signal(self, ranks: Iterable[int], number: signal.Signals) -> None:
        for rank in set(ranks) - set(self.engines.missing()):
            self.engines.client.signal(rank, number)

    def _note_state(self, call: Call, error: BaseException) -> None:
        """Find out whether the ranks can serve another call, after this one failed or was interrupted."""
        self.left_group = True
        self.stopped = isinstance(error, Stopped | KeyboardInterrupt)
        try:
            if isinstance(error, KeyboardInterrupt):
                self._interrupt_again(call)
            elif not isinstance(error, RankError | Stopped):
                call.on_record = None  # it may have raised the error
                call.wait(self.engines.inbox, lambda: not call.waiting, GRACE_SECONDS)
            if call.on_record is not None:
                self.wait_for_records(call, REPORT_SECONDS)
        finally:
            # Also where the wait is interrupted, or where `on_record` raises an error.
            call.on_record, self._failed = None, call
            self._note_answers(call)

    def _note_answers(self, call: Call) -> None:
        self.broken = None
        if call.dead:
            self.broken = f"the process of {name_ranks(call.dead)} ended"
        elif call.waiting:
            self.broken = f"{name_ranks(call.waiting)} did not come back from a call"
