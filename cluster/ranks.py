"""A cluster: the ranks of one process group, each in an engine of its own, that run a function together."""

import atexit
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Self

import cloudpickle

from cluster import remote
from cluster.calling import Caller
from cluster.capacity import visible_devices
from cluster.engines import NOT_STARTED, Engines
from cluster.errors import ClusterError, RankError, name_ranks
from cluster.permissions import make_again
from cluster.profiles import find_profile
from cluster.progress import progress
from cluster.timeouts import DEFAULT_SECONDS, check_timeout
from cluster.waiting import OnRecord

RECORDS_SECONDS = 5.0
FIRST_RECORD_SECONDS = 0.25


class Cluster:
    """Engines that form one process group: gloo on CPUs, and NCCL as well where there are GPUs.

    A cluster is used in a `with` statement, or between `start()` and `stop()`.

    Attributes:
        ranks: The number of ranks.
        profile: The profile that says where they run.
        start_timeout: How long the start and each restart may take, in seconds.
        device_type: The type of the device that the ranks work on, `cuda` or `cpu`.
    """

    def __init__(
        self,
        ranks: int = 4,
        profile: str = "local",
        timeout: float | None = None,
        start_timeout: float = 60.0,
        **overrides: Any,
    ) -> None:
        """Describe a cluster. Nothing is started.

        Args:
            ranks: The number of ranks.
            profile: The name of a profile. It says where the ranks run, see `cluster.profiles`.
            timeout: How long one collective may take, in seconds. A collective whose peers do not join it
                fails after this time. A call is given up when none of its ranks has made progress for 1.25
                times as long, see `cluster.hangs.HangWatch`. The default is 60 s with gloo. It is 600 s with
                NCCL, whose collectives are enqueued long before they run.
            start_timeout: How long the start and each restart may take, in seconds.
            **overrides: Values for fields of the profile.

        Raises:
            ClusterError: The ranks do not fit on this machine, the profile is not known, or a timeout is no
                number of seconds from 0.01 to 30 days.
        """
        self.profile = find_profile(profile, **overrides)
        self.profile.check(ranks)
        if timeout is not None:
            check_timeout(timeout)
        check_timeout(start_timeout, "start_timeout")
        self.ranks = ranks
        self._timeout = timeout
        self.start_timeout = start_timeout
        self.device_type = "cuda" if visible_devices() else "cpu"
        self._caller: Caller | None = None
        self._busy = threading.Lock()

    @property
    def timeout(self) -> float:
        """The timeout of a collective, in seconds, in a call that sets no timeout of its own."""
        return DEFAULT_SECONDS[self.device_type] if self._timeout is None else self._timeout

    @property
    def started(self) -> bool:
        """Whether the cluster has been started and not stopped since."""
        return self._caller is not None

    @property
    def broken(self) -> bool:
        """Whether a rank was gone, or had not answered, when a call last failed. See `apply`."""
        return self._caller is not None and self._caller.broken is not None

    def start(self) -> Self:
        """Launch the ranks and join them in a process group.

        Returns:
            This cluster.

        Raises:
            ClusterError: The cluster is started already, or a rank does not start.
        """
        if self._caller is not None:
            raise ClusterError("the cluster is started already; cluster.stop() ends it")
        engines = Engines(self.ranks, self.profile, self.start_timeout)
        self._caller = Caller(engines, self.recover)
        atexit.register(self.stop)
        try:
            with progress(f"starting {self.ranks} ranks"):
                engines.start()
                self._join()
        except BaseException:
            self._end(keep_logs=True)
            raise
        return self

    def stop(self) -> None:
        """End every process of the cluster, also those that are stuck. Does nothing before the start."""
        self._end(keep_logs=False)

    def recover(self) -> None:
        """Join the ranks in a new process group.

        Where a rank is stuck or gone, all ranks are restarted first, with the same numbers.

        Raises:
            ClusterError: The cluster is not started, is busy with a call, or a rank does not start.
        """
        caller = self._started()
        with self._one_call(), progress(f"joining {self.ranks} ranks again"):
            self._restart(caller)

    def interrupt(self) -> None:
        """End the call that is running. Another thread calls this method.

        Each rank raises KeyboardInterrupt where it is, and `apply` raises `Stopped`. Does nothing while no
        call is running.
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
        """Run `fn(*args, **kwargs)` on all ranks.

        After an error, every rank that answered has left its process group, and the next call joins the ranks
        again. A rank that did not answer, or is gone, leaves the cluster broken. With gloo the next call
        waits up to five seconds for the ranks that did not answer. If one still does not, or is gone, the
        cluster stays broken until `recover()` is called. With NCCL the next call restarts the ranks, because
        the peers of a rank that fails always wait in a kernel.

        Args:
            fn: The function. It is sent to the ranks by cloudpickle.
            *args: Its arguments.
            on_record: Called as `on_record(rank, record)` in this thread, for each record that a rank
                publishes. The last record arrives before this method returns.
            timeout: The timeout of this call's collectives, in seconds, also in process groups that the call
                makes. A function that waits longer than this without any progress needs a longer timeout.
                None stands for the timeout of the cluster.
            answer_timeout: The timeout of the whole call, in seconds. None sets no limit.
            **kwargs: Its keyword arguments.

        Returns:
            The results of the ranks, in the order of the ranks.

        Raises:
            RankError: A rank failed, or no rank makes progress. The error names the rank that failed first,
                at most two seconds after it failed.
            Stopped: `interrupt` ended the call.
            ClusterError: The cluster is broken, is busy with another call, or did not answer in time, or a
                timeout is no number of seconds from 0.01 to 30 days.
        """
        caller = self._started()
        if timeout is not None:
            check_timeout(timeout)
        if answer_timeout is not None:
            check_timeout(answer_timeout, "answer_timeout")
        seconds = self.timeout if timeout is None else timeout
        payload = cloudpickle.dumps((seconds, fn, args, kwargs))
        # Who takes the records shows what goes on.
        name = getattr(fn, "__name__", "a function").lstrip("_")
        line = nullcontext() if on_record is not None else progress(f"{self.ranks} ranks run {name}")
        with self._one_call(), line:
            if not caller.restarts:
                caller.wait_for_late_answers()
            if caller.broken is None and (missing := caller.engines.missing()):
                caller.broken = f"{name_ranks(missing)} ended since the last call"
            if caller.broken is None and caller.left_group:
                with suppress(RankError):  # the cluster is broken then
                    self._join()
            if caller.broken is not None and caller.restarts:
                self._restart(caller)
                caller = self._started()
            if caller.broken is not None:
                raise ClusterError(
                    f"the cluster is broken: {caller.broken}; cluster.recover() restarts the ranks"
                )
            call = caller.run(dict.fromkeys(range(self.ranks), payload), on_record, seconds, answer_timeout)
            if on_record is not None and not caller.wait_for_records(call, RECORDS_SECONDS):
                message = f"not all records of {name_ranks(call.unrecorded)} arrived"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        return [cloudpickle.loads(call.answers[rank]) for rank in call.ranks]

    def _started(self) -> Caller:
        if self._caller is None:
            raise ClusterError(NOT_STARTED)
        return self._caller

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ClusterError("the cluster is busy with another call; wait for the end of that call")
        try:
            yield
        finally:
            self._busy.release()

    def _end(self, *, keep_logs: bool) -> None:
        caller, self._caller = self._caller, None
        atexit.unregister(self.stop)
        if caller is not None:
            caller.engines.stop(keep_logs=keep_logs)

    def _restart(self, caller: Caller) -> None:
        try:
            caller.engines.check_controller()
            caller.engines.check_files()
            if caller.broken is None and not caller.engines.missing():
                with suppress(RankError):  # the cluster is broken then
                    self._join()
                    return
            caller.engines.restart()
            self._join()
        except ClusterError:
            self.stop()
            self.start()

    def _join(self) -> None:
        """Join the ranks in a process group, and wait until their records arrive."""
        caller = self._started()
        make_again(caller.engines.directory)
        folder = self.profile.store_folder(caller.engines.directory)
        opening = cloudpickle.dumps((None, remote.open_store, (self.ranks, self.start_timeout, folder), {}))
        # The collectives of a call may have seconds only. A rank that starts may wait longer for a peer.
        limits = self.start_timeout, self.start_timeout
        store = cloudpickle.loads(caller.run({0: opening}, None, *limits).answers[0])
        joining = {
            rank: cloudpickle.dumps((None, remote.join, (rank, self.ranks, store, self.start_timeout), {}))
            for rank in range(self.ranks)
        }
        try:
            call = caller.run(joining, None, *limits)
        except RankError as error:
            # Only the rank's own host can find such an error.
            if error.kind != ClusterError.__name__:
                # After an error in a CUDA kernel, nothing but a new process can use the GPU again.
                why = f"{error.kind}: {error.message}".splitlines()[0]
                caller.cannot_serve(f"rank {error.rank} cannot join the others again: {why}")
                raise
            raise ClusterError(f"rank {error.rank}: {error.message}") from None
        # The ranks report it, because a login node may have no GPU although their hosts have GPUs.
        self.device_type = cloudpickle.loads(call.answers[0])
        caller.kernels_wait = self.device_type == "cuda"
        nothing = cloudpickle.dumps((None, remote.do_nothing, (), {}))
        # A channel loses the messages that are sent while it is being opened.
        for _ in range(int(self.start_timeout / FIRST_RECORD_SECONDS)):
            if caller.wait_for_records(call, FIRST_RECORD_SECONDS):
                caller.broken, caller.left_group = None, False
                return
            call = caller.run(dict.fromkeys(range(self.ranks), nothing), None, *limits)
        raise ClusterError(
            f"no record of {name_ranks(call.unrecorded)} arrived within {self.start_timeout:g} s; "
            "a longer start_timeout may work"
        )
