"""A cluster: ranks of one process group, each in an engine of its own, that run a function together."""

import atexit
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import cloudpickle

from cluster import remote
from cluster.calling import Caller
from cluster.capacity import visible_devices
from cluster.engines import NOT_STARTED, Engines
from cluster.errors import ClusterError, RankError, name_ranks
from cluster.profiles import find_profile
from cluster.timeouts import DEFAULT_SECONDS, check_timeout
from cluster.waiting import OnRecord

RECORDS_SECONDS = 5.0
FIRST_RECORD_SECONDS = 0.25


class Cluster:
    """`ranks` engines joined in one process group: gloo on CPUs, nccl beside it where there are GPUs.

    `profile` says where they run (cluster/profiles); further keyword arguments override its fields.
    `timeout`, in seconds, bounds every collective: one whose peers do not come fails after it, and a call in
    whose collectives nothing moves is given up. By default it is 60 s with gloo and 600 s with nccl, whose
    collectives are enqueued long before they run. `start_timeout` bounds the start and each restart.
    Raises ClusterError, before anything is launched, where the ranks do not fit, the profile is not known or
    a collective could not take so long.
    Used in a `with` statement, or between `start()` and `stop()`.
    """

    def __init__(
        self,
        ranks: int = 4,
        profile: str = "local",
        timeout: float | None = None,
        start_timeout: float = 60.0,
        **overrides: Any,
    ) -> None:
        self.profile = find_profile(profile, **overrides)
        self.profile.check(ranks)
        check_timeout(timeout)
        self.ranks = ranks
        self._timeout = timeout
        self.start_timeout = start_timeout
        self.device_type = "cuda" if visible_devices() else "cpu"
        self._engines: Engines | None = None
        self._caller: Caller | None = None
        self._busy = threading.Lock()

    @property
    def timeout(self) -> float:
        """The seconds that a collective may take in a call that says nothing else."""
        return DEFAULT_SECONDS[self.device_type] if self._timeout is None else self._timeout

    @property
    def started(self) -> bool:
        """Whether there are ranks: from `start()` to `stop()`."""
        return self._engines is not None

    @property
    def broken(self) -> bool:
        """Whether some rank is stuck or gone, so that the ranks have to be restarted: see `apply`."""
        return self._caller is not None and self._caller.broken is not None

    def start(self) -> Self:
        """Launch the ranks and join them in a process group. Raises ClusterError if one does not come up."""
        if self._engines is not None:
            raise ClusterError("the cluster is started already")
        self._engines = Engines(self.ranks, self.profile, self.start_timeout)
        self._caller = Caller(self._engines, self.recover)
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
        """Join the ranks in a new process group; first restart them, with the same numbers, if one is stuck
        or gone.
        """
        engines, caller = self._started()
        with self._alone():
            self._restart(engines, caller)

    def interrupt(self) -> None:
        """End the call that is running, from another thread: `apply` then raises Stopped.

        Its ranks raise KeyboardInterrupt where they are. Does nothing where no call is running.
        """
        if self._caller is not None:
            self._caller.interrupt()

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
        answer_timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on all ranks and return their results in rank order.

        While it waits, `on_record(rank, record)` is called in this thread for each record a rank published;
        the last one before this returns.

        `timeout`, in seconds, is that of this call's collectives, in the process groups that it makes too;
        None stands for the cluster's. With `answer_timeout` the whole call may take so many seconds; None
        waits as long as the ranks work.

        Raises RankError naming the rank that failed first, two seconds at most after it failed, Stopped after
        `interrupt`, and ClusterError when the cluster is broken, is busy with another call, or did not answer
        in time. After an error all ranks that answered have left their process group, and the next call joins
        them again; a rank that did not, is gone, or cannot join again leaves the cluster broken. With gloo it
        stays so until `recover()`. With nccl, where the peers of a rank that fails wait in a kernel, the next
        call restarts the ranks.
        """
        engines, caller = self._started()
        check_timeout(timeout)
        seconds = self.timeout if timeout is None else timeout
        payload = cloudpickle.dumps((remote.within, (seconds, fn, args, kwargs), {}))
        with self._alone():
            if caller.broken is None and engines.missing():
                caller.broken = f"{name_ranks(engines.missing())} ended since the last call"
            if caller.broken is None and caller.left:
                with suppress(RankError):  # the cluster is broken then
                    self._join()
            if caller.broken is not None and caller.restarts:
                self._restart(engines, caller)
                engines, caller = self._started()
            if caller.broken is not None:
                raise ClusterError(
                    f"the cluster is broken: {caller.broken}; cluster.recover() restarts the ranks"
                )
            run = caller.run(dict.fromkeys(range(self.ranks), payload), on_record, seconds, answer_timeout)
            if on_record is not None and not caller.wait_for_records(run, RECORDS_SECONDS):
                lost = f"not all records of {name_ranks(run.unrecorded)} arrived"
                warnings.warn(lost, RuntimeWarning, stacklevel=2)
        return [cloudpickle.loads(run.answers[rank]) for rank in run.ranks]

    def _started(self) -> tuple[Engines, Caller]:
        if self._engines is None or self._caller is None:
            raise ClusterError(NOT_STARTED)
        return self._engines, self._caller

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ClusterError("the cluster is busy with another call; wait for that one")
        try:
            yield
        finally:
            self._busy.release()

    def _end(self, *, keep_logs: bool) -> None:
        engines, self._engines, self._caller = self._engines, None, None
        atexit.unregister(self.stop)
        if engines is not None:
            engines.stop(keep_logs=keep_logs)

    def _restart(self, engines: Engines, caller: Caller) -> None:
        try:
            engines.check_controller()
            if caller.broken is None and not engines.missing():
                with suppress(RankError):  # the cluster is broken then
                    self._join()
                    return
            engines.restart()
            self._join()
        except ClusterError:
            self.stop()
            self.start()

    def _join(self) -> None:
        """Join the ranks in a process group, and see that what they publish arrives."""
        _, caller = self._started()
        opening = cloudpickle.dumps((remote.open_store, (self.ranks, self.start_timeout), {}))
        limits = self.timeout, self.start_timeout
        store = cloudpickle.loads(caller.run({0: opening}, None, *limits).answers[0])
        joining = {
            rank: cloudpickle.dumps((remote.join, (rank, self.ranks, store, self.start_timeout), {}))
            for rank in range(self.ranks)
        }
        try:
            run = caller.run(joining, None, *limits)
        except RankError as error:
            # What only a rank's own host can know.
            if error.kind != ClusterError.__name__:
                # After an error in a CUDA kernel, nothing but a new process can use the GPU again.
                why = f"{error.kind}: {error.message}".splitlines()[0]
                caller.broken = f"rank {error.rank} cannot join the others again: {why}"
                raise
            raise ClusterError(f"rank {error.rank}: {error.message}") from None
        # Known by the ranks: a login node may have no GPU where their hosts have.
        self.device_type = cloudpickle.loads(run.answers[0])
        caller.kernels_wait = self.device_type == "cuda"
        nothing = cloudpickle.dumps((remote.nothing, (), {}))
        # A channel that is only being opened loses what is sent on it.
        for _ in range(int(self.start_timeout / FIRST_RECORD_SECONDS)):
            if caller.wait_for_records(run, FIRST_RECORD_SECONDS):
                caller.broken, caller.left = None, False
                return
            run = caller.run(dict.fromkeys(range(self.ranks), nothing), None, *limits)
        raise ClusterError(f"nothing that {name_ranks(run.unrecorded)} published arrived")
