"""The errors of a cluster: it cannot do what was asked (ClusterError), or a rank failed (RankError)."""

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.stacks import StackReport

# The kind of a failure that is not an exception: the rank's process is gone.
PROCESS_DIED = "ProcessDied"

# The kind of a failure that is not an exception: no rank has made progress.
STUCK = "Stuck"

# The beginning of gloo's message where the peers do not join a collective in time.
HANG = "Timed out waiting"

# gloo's messages where a peer left the group. The text depends on what the socket happened to notice first.
LEFT = re.compile(r"Connection (closed|reset) by peer|Broken pipe")

# The characters that are shown of the message of a rank that failed later. It is only a consequence.
LINE = 100
ADDRESS = re.compile(r"\[[^\]]*\](:\d+)? ?")


class ClusterError(ValueError):
    """The cluster cannot do what was asked. The message says what would work."""


class Stopped(RuntimeError):
    """A call was stopped by `Cluster.interrupt`."""


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Attributes:
        rank: The rank that failed.
        kind: The name of the exception's type.
        message: The exception's text.
        traceback: The printed traceback of the caller's own frames, empty where the process died.
        time: The seconds since the epoch, by the clock of the rank's host.
        position: The collective and the line in which the rank failed.
        error: The cloudpickled exception, empty where it cannot be pickled.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    time: float
    position: str = ""
    error: bytes = b""

    @property
    def headline(self) -> str:
        """The type and the message."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class RankError(RuntimeError):
    """A function failed on some ranks.

    The text names the rank that failed first, and says where the others were.

    Attributes:
        rank: The rank that failed first. It is the cause.
        kind: The name of the type of its exception.
        message: The text of its exception.
        time: When it failed, in seconds since the epoch.
        cause: The exception itself, None where it could not be sent.
        victims: The ranks that failed after it.
        waiting: The ranks that had not answered when this error was raised.
        stacks: The Python stack of each rank that reported one.
        recover: A function that restarts the ranks.
        partial: What the caller had measured until the failure.
    """

    def __init__(
        self,
        failures: Sequence[Failure],
        waiting: Mapping[int, StackReport | None] | None = None,
        recover: Callable[[], None] | None = None,
        restarts: bool = False,
    ) -> None:
        """Compose the text of the error.

        Args:
            failures: The failure of each rank that failed.
            waiting: The stack report of each rank that has not answered, None where it sent no report.
            recover: A function that restarts the ranks.
            restarts: Whether the next call restarts the ranks by itself. The text says so.
        """
        waiting = waiting or {}
        # A rank that reports the loss of a peer was not first, though its report may have been earlier.
        cause, *later = sorted(failures, key=lambda failure: (_lost_a_peer(failure), failure.time))
        self.rank = cause.rank
        self.kind = cause.kind
        self.message = cause.message
        self.time = cause.time
        self.cause = _unpickle(cause.error)
        self.victims = tuple(failure.rank for failure in later)
        self.waiting = tuple(waiting)
        self.stacks = {f.rank: f.traceback for f in (cause, *later) if f.traceback}
        self.stacks |= {rank: report.stack for rank, report in waiting.items() if report}
        self.partial: Any = None
        if recover is not None:
            self.recover = recover
        others = {f.rank: _describe_later(f) for f in later}
        others |= {rank: _describe_waiting(report) for rank, report in waiting.items()}
        if HANG in cause.message:
            parts = [f"{name_ranks((cause.rank, *others))} hang: a collective did not end in its time"]
            parts.append("\n".join(_merge_lines({cause.rank: f"in {cause.position}"} | others)))
            parts += self._printed_stacks()
        elif cause.kind == STUCK:
            parts = [f"rank {cause.rank} waits in {cause.position}: {cause.message}"]
            parts += ["\n".join(_merge_lines(others)), *self._printed_stacks()]
        else:
            parts = [f"rank {cause.rank} failed first: {cause.headline}", cause.traceback.rstrip()]
            parts.append("\n".join(_merge_lines(others)))
        if waiting or cause.kind in (PROCESS_DIED, STUCK):
            parts.append(f"{'the next call' if restarts else 'cluster.recover()'} restarts the ranks")
        super().__init__("\n\n".join(part for part in parts if part))

    def _printed_stacks(self) -> list[str]:
        return [f"{ranks}\n{stack}".rstrip() for ranks, stack in _group_by_text(self.stacks)]

    def _render_traceback_(self) -> list[str]:
        # IPython calls this method. The text has the rank's own traceback; that of this process adds nothing.
        return str(self).splitlines()


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the name of some ranks: `rank 3`, `ranks 0, 2` or `ranks 0-5, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"


def _lost_a_peer(failure: Failure) -> bool:
    """Whether gloo or NCCL reports that a peer left. A pipe of the caller's own raises another type."""
    return failure.kind in ("RuntimeError", "DistBackendError") and bool(LEFT.search(failure.message))


def _describe_later(failure: Failure) -> str:
    if _lost_a_peer(failure):
        short = "a peer left"
    else:
        # Without the addresses in gloo's messages: they differ from rank to rank and explain nothing.
        text = ADDRESS.sub("", failure.headline).split(". ")[0].splitlines()[0]
        short = text if len(text) <= LINE else text[:LINE].rstrip() + "…"
    return f"failed after it{', in ' + failure.position if failure.position else ''}: {short}"


def _describe_waiting(report: StackReport | None) -> str:
    return f"still waiting, in {report.position}" if report else "still waiting, and did not report where"


def _merge_lines(texts: Mapping[int, str]) -> list[str]:
    """Return one line for all ranks that have the same text."""
    return [f"{ranks} {text}" for ranks, text in _group_by_text(texts)]


def _group_by_text(texts: Mapping[int, str]) -> list[tuple[str, str]]:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return [(name_ranks(same), text) for text, same in ranks.items()]


def _unpickle(error: bytes) -> BaseException | None:
    if not error:
        return None
    try:
        exception = pickle.loads(error)
    except Exception:  # to build an exception of the caller's own again may raise anything
        return None
    return exception if isinstance(exception, BaseException) else None
