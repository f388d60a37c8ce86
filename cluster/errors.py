"""What can go wrong on a cluster: it cannot serve (ClusterError), or a rank failed (RankError)."""

from collections.abc import Sequence
from dataclasses import dataclass

# The kind of a failure that is not an exception: the rank's process is gone.
PROCESS_DIED = "ProcessDied"


class ClusterError(ValueError):
    """The cluster cannot do what was asked; the message says what would work."""


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    `kind` is the exception's type name, `traceback` the printed traceback of the caller's own frames
    (empty where the process died), `time` seconds since the epoch on the machine's clock.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    time: float

    @property
    def headline(self) -> str:
        """Type and message, in one line where the message is one."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class RankError(RuntimeError):
    """A function failed on some ranks; the text names the one that failed first.

    Attributes: `rank`, `kind` (the exception's type name) and `message` of the cause; `victims`, the ranks
    that failed after it; `waiting`, the ranks that had not answered when it was raised.
    """

    def __init__(self, failures: Sequence[Failure], waiting: Sequence[int] = ()) -> None:
        cause, *later = sorted(failures, key=lambda failure: failure.time)
        self.rank = cause.rank
        self.kind = cause.kind
        self.message = cause.message
        self.victims = tuple(failure.rank for failure in later)
        self.waiting = tuple(waiting)
        parts = [f"rank {cause.rank} failed first: {cause.headline}"]
        if cause.traceback:
            parts.append(cause.traceback.rstrip())
        if later:
            parts.append("\n".join(f"rank {f.rank} failed after it: {f.headline}" for f in later))
        if waiting:
            parts.append(f"{name_ranks(waiting)} still waiting; cluster.recover() restarts the ranks")
        super().__init__("\n\n".join(parts))


def name_ranks(ranks: Sequence[int]) -> str:
    """Say `rank 3`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
