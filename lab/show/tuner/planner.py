"""The plans of a tuner: those that are known at once, and those that other processes make meanwhile.

A plan joins a process group, and takes Python's lock for seconds: a thread that plans would disturb the next
cell of the notebook.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from multiprocessing.connection import Connection
from threading import Lock, Thread

from cluster.watchdog import ProcessId, end_after, this_process, wait_for_owner
from lab.errors import LabError
from lab.planning.plan import Plan, known_plan, plan_job
from lab.recipe.jobs import Job, Machine

Question = tuple[Job, Machine]
"""What a plan is asked for. The machine has no device memory, which does not change the plan."""

KEPT = 64
"""The plans that stay in memory, those made last: all knobs of about eight states, of a few MiB each."""

THREAD = "plans of a tuner"
"""The name of the threads that wait for plans."""

_POLL_SECONDS = 0.05

_kept: dict[Question, Plan | LabError] = {}


def known(question: Question) -> Plan | LabError | None:
    """Return the plan, or why there is none, if that is known at once; else None."""
    if question not in _kept and (plan := known_plan(*question)) is not None:
        _keep(question, plan)
    return _kept.get(question)


def plan_now(question: Question) -> None:
    """Make a plan in this process, if it is not known."""
    if known(question) is None:
        try:
            _keep(question, plan_job(*question))
        except LabError as error:
            _keep(question, error)


def plan_in_process(question: Question, wanted: Callable[[], bool]) -> Plan | LabError | None:
    """Return the plan that another process makes, or why there is none.

    The process is forked from a server that has imported everything; both end with this process.

    Args:
        question: What is planned.
        wanted: Asked while the process plans. If it returns False, the process is ended, and the result is
            None.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_plan, args=(*question, sender, this_process()), daemon=True)
    try:
        # Jupyter interrupts a kernel and its children, but the reader has interrupted a cell. The processes
        # inherit this mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except (EOFError, OSError) as error:
        return LabError(f"no process that plans could be started: {error!r}")
    sender.close()
    try:
        while wanted():
            if receiver.poll(_POLL_SECONDS):
                answer: Plan | LabError = receiver.recv()
                return answer
        return None
    except EOFError:
        process.join()
        return LabError(f"the process that planned ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send_plan(job: Job, machine: Machine, sender: Connection, owner: ProcessId) -> None:
    end_after(partial(wait_for_owner, *owner))
    try:
        answer: Plan | LabError = plan_job(job, machine)
    except LabError as error:
        answer = error
    except Exception as error:  # No cell would show it.
        answer = LabError(f"{type(error).__name__}: {error}")
    with suppress(BrokenPipeError):
        sender.send(answer)


def _keep(question: Question, answer: Plan | LabError) -> None:
    _kept[question] = answer
    for oldest in list(_kept)[:-KEPT]:
        del _kept[oldest]


class Planner:
    """Makes plans one after the other in the background, and keeps them.

    Args:
        on_answer: Called, in another thread, after each plan.
    """

    def __init__(self, on_answer: Callable[[], None]) -> None:
        self._on_answer = on_answer
        self._lock = Lock()
        self._waiting: list[Question] = []
        self._thread: Thread | None = None

    def ask(self, questions: Sequence[Question]) -> None:
        """Make these plans in this order, in place of those that are asked for.

        A plan that is being made goes on if it is the first of them.
        """
        # The thread runs in this context, so that its output goes to the cell or page that asked for it.
        context = copy_context()
        with self._lock:
            self._waiting = list(questions)
            if self._waiting and self._thread is None:
                self._thread = Thread(target=lambda: context.run(self._work), name=THREAD, daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is asked for."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (question := self._next()) is not None:
            answer = plan_in_process(question, partial(self._is_first, question))
            if answer is not None:
                _keep(question, answer)
                self._on_answer()

    def _next(self) -> Question | None:
        with self._lock:
            self._waiting = [question for question in self._waiting if question not in _kept]
            if not self._waiting:
                self._thread = None
                return None
            return self._waiting[0]

    def _is_first(self, question: Question) -> bool:
        return self._waiting[:1] == [question]
