"""A cluster: ranks of one process group, each in an engine of its own, that run a function together."""

import atexit
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import cloudpickle

from cluster import remote
from cluster.capacity import visible_devices
from cluster.engines import NOT_STARTED, Engines
from cluster.errors import PROCESS_DIED, ClusterError, Failure, RankError, name_ranks
from cluster.profiles import find_profile
from cluster.waiting import OnRecord, Run

GRACE_SECONDS = 1.0
RECORDS_SECONDS = 5.0
FIRST_RECORD_SECONDS = 0.25


class Cluster:
    """`ranks` engines joined in one process group: gloo on CPUs, nccl beside it where there are GPUs.

    `profile` says where they run (cluster/profiles); further keyword arguments override its fields.
    `timeout`, in seconds, bounds the start, and every collective: one whose peers do not come fails after it.
    Raises ClusterError, before anything is launched, where the ranks do not fit or the profile is not known.
    Used in a `with` statement, or between `start()` and `stop()`.
    """

    def __init__(
        self, ranks: int = 4, profile: str = "local", timeout: float = 60.0, **overrides: Any
    ) -> None:
        self.profile = find_profile(profile, **overrides)
        self.profile.check(ranks)
        self.ranks = ranks
        self.timeout = timeout
        self.device_type = "cuda" if visible_devices() else "cpu"
        self._engines: Engines | None = None
        self._broken: str | None = None
        self._busy = threading.Lock()

    @property
    def broken(self) -> bool:
        """Whether some rank is stuck or gone, so that only `recover()` or `stop()` helps."""
        return self._broken is not None

    def start(self) -> Self:
        """Launch the ranks and join them in a process group. Raises ClusterError if one does not come up."""
        if self._engines is not None:
            raise ClusterError("the cluster is started already")
        self._engines = Engines(self.ranks, self.profile, self.timeout)
        atexit.register(self.stop)
        try:
            self._engines.start()
            self._join()
        except BaseException:
            self._end(keep_logs=True)
            raise
        return self

    def stop(self) -> None:
        """End every process of the cluster, stuck ones too. Does nothing on one that is not started."""
        self._end(keep_logs=False)

    def recover(self) -> None:
        """Restart the ranks, with the same numbers, and join them in a new process group."""
        engines = self._started()
        with self._alone():
            try:
                engines.check_controller()
                engines.restart()
                self._join()
            except ClusterError:
                self.stop()
                self.start()
            self._broken = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def apply(
        self,
        fn: Callable[..., Any],
        *args: Any,
        on_record: OnRecord | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on all ranks and return their results in rank order.

        While it waits, `on_record(rank, record)` is called in this thread for each record a rank published;
        the last one before this returns. `timeout` is in seconds; None waits as long as the ranks work.

        Raises RankError naming the rank that failed first, a second at most after it failed, and ClusterError
        when the cluster is broken, is busy with another call, or did not answer in time.
        """
        engines = self._started()
        payload = cloudpickle.dumps((fn, args, kwargs))
        with self._alone():
            if self._broken is None and engines.missing():
                self._broken = f"{name_ranks(engines.missing())} ended since the last call"
            if self._broken is not None:
                raise ClusterError(
                    f"the cluster is broken: {self._broken}; cluster.recover() restarts the ranks"
                )
            run = self._run(dict.fromkeys(range(self.ranks), payload), on_record, timeout)
            if on_record is not None and not self._wait_for_records(run, RECORDS_SECONDS):
                lost = f"not all records of {name_ranks(run.unrecorded)} arrived"
                warnings.warn(lost, RuntimeWarning, stacklevel=2)
        return [cloudpickle.loads(run.answers[rank]) for rank in run.ranks]

    def _started(self) -> Engines:
        if self._engines is None:
            raise ClusterError(NOT_STARTED)
        return self._engines

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ClusterError("the cluster is busy with another call; wait for that one")
        try:
            yield
        finally:
            self._busy.release()

    def _end(self, *, keep_logs: bool) -> None:
        engines, self._engines = self._engines, None
        self._broken = None
        atexit.unregister(self.stop)
        if engines is not None:
            engines.stop(keep_logs=keep_logs)

    def _run(self, payloads: dict[int, bytes], on_record: OnRecord | None, timeout: float | None) -> Run:
        """Run one payload a rank; return when each has answered, or raise for the first failure."""
        engines = self._started()
        run = Run(secrets.token_hex(8), list(payloads), on_record)
        try:
            for rank, payload in payloads.items():
                engines.client.send(rank, payload, run.id)
            answered = run.wait(
                engines.inbox,
                lambda: bool(run.failures) or not run.waiting,
                timeout,
                engines.check_controller,
            )
            if run.failures:
                run.wait(engines.inbox, lambda: not run.waiting, GRACE_SECONDS)
                raise RankError([self._explained(failure) for failure in run.failures.values()], run.waiting)
            if not answered:
                late = name_ranks(run.waiting)
                raise ClusterError(
                    f"no answer within {timeout:g} s from {late}; cluster.recover() restarts them"
                )
        except BaseException:
            self._settle(run)
            raise
        return run

    def _explained(self, failure: Failure) -> Failure:
        code = self._started().exit_code(failure.rank) if failure.kind == PROCESS_DIED else None
        if code is None:
            return failure
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return replace(failure, message=f"{failure.message} ({how})")

    def _settle(self, run: Run) -> None:
        """After a call that failed or was interrupted: see whether the cluster can serve another."""
        run.on_record = None
        # Said first, so that it stands if this wait is interrupted too.
        self._broken = f"{name_ranks(run.waiting or run.ranks)} did not come back from a call"
        free = run.wait(self._started().inbox, lambda: not run.waiting, 0 if run.failures else GRACE_SECONDS)
        dead = [rank for rank, failure in run.failures.items() if failure.kind == PROCESS_DIED]
        if dead:
            self._broken = f"the process of {name_ranks(dead)} ended"
        elif free:
            self._broken = None

    def _wait_for_records(self, run: Run, seconds: float) -> bool:
        return run.wait(self._started().inbox, lambda: not run.unrecorded, seconds)

    def _join(self) -> None:
        """Join the ranks in a process group, and see that what they publish arrives."""
        opening = cloudpickle.dumps((remote.open_store, (self.ranks, self.timeout), {}))
        store = cloudpickle.loads(self._run({0: opening}, None, self.timeout).answers[0])
        joining = {
            rank: cloudpickle.dumps((remote.join, (rank, self.ranks, store, self.timeout), {}))
            for rank in range(self.ranks)
        }
        run = self._run(joining, None, self.timeout)
        # Known by the ranks: a login node may have no GPU where their hosts have.
        self.device_type = cloudpickle.loads(run.answers[0])
        nothing = cloudpickle.dumps((remote.nothing, (), {}))
        # A channel that is only being opened loses what is sent on it.
        for _ in range(int(self.timeout / FIRST_RECORD_SECONDS)):
            if self._wait_for_records(run, FIRST_RECORD_SECONDS):
                return
            run = self._run(dict.fromkeys(range(self.ranks), nothing), None, self.timeout)
        raise ClusterError(f"nothing that {name_ranks(run.unrecorded)} published arrived")
