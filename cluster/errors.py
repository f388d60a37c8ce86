"""What can go wrong on a cluster: it cannot serve (ClusterError), or a rank failed (RankError)."""

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.stacks import Whereabouts

# The kind of a failure that is not an exception: the rank's process is gone.
PROCESS_DIED = "ProcessDied"

# How gloo's message begins when a collective's peers do not come.
HANG = "Timed out waiting"

# How it says that a peer left the group: the same event, told by what the socket happened to notice first.
LEFT = re.compile(r"Connection (closed|reset) by peer|Broken pipe")

# The characters of another rank's message that are shown: it is a consequence.
LINE = 100
ADDRESS = re.compile(r"\[[^\]]*\](:\d+)? ?")


class ClusterError(ValueError):
    """The cluster cannot do what was asked; the message says what would work."""


class Stopped(RuntimeError):
    """A call was stopped, by `Cluster.interrupt` or the kernel's; its ranks left it where they were."""


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    `kind` is the exception's type name, `traceback` the printed traceback of the caller's own frames
    (empty where the process died), `time` seconds since the epoch on the machine's clock, `doing` the line
    and the collective it was in, `error` the exception itself, cloudpickled (empty where it cannot be).
    """

    rank: int
    kind: str
    message: str
    traceback: str
    time: float
    doing: str = ""
    error: bytes = b""

    @property
    def headline(self) -> str:
        """Type and message, in one line where the message is one."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


class RankError(RuntimeError):
    """A function failed on some ranks; the text names the one that failed first, and where the others were.

    Attributes: `rank`, `kind` (the exception's type name), `message` and `time` (seconds since the epoch) of
    the cause, `cause` the exception itself where it could travel; `victims`, the ranks that failed after it;
    `waiting`, the ranks that had not answered when it was raised; `stacks`, the Python stack of each rank
    that told it; `recover`, which restarts the ranks; `kept`, what the caller measured until then.
    `restarts` says in the text that the next call does that by itself.
    """

    def __init__(
        self,
        failures: Sequence[Failure],
        waiting: Mapping[int, Whereabouts | None] | None = None,
        recover: Callable[[], None] | None = None,
        restarts: bool = False,
    ) -> None:
        waiting = waiting or {}
        # Whoever says that a peer left was not first, though it may have been faster to say it.
        cause, *later = sorted(failures, key=lambda failure: (_peer_left(failure), failure.time))
        self.rank = cause.rank
        self.kind = cause.kind
        self.message = cause.message
        self.time = cause.time
        self.cause = _loaded(cause.error)
        self.victims = tuple(failure.rank for failure in later)
        self.waiting = tuple(waiting)
        self.stacks = {f.rank: f.traceback for f in (cause, *later) if f.traceback}
        self.stacks |= {rank: where.stack for rank, where in waiting.items() if where}
        self.kept: Any = None
        if recover is not None:
            self.recover = recover
        others = {f.rank: _after(f) for f in later} | {rank: _still(where) for rank, where in waiting.items()}
        if HANG in cause.message:
            parts = [f"{name_ranks((cause.rank, *others))} hang: a collective did not end in its time"]
            parts.append("\n".join(_grouped({cause.rank: f"in {cause.doing}"} | others)))
            parts += [f"{ranks}\n{stack}".rstrip() for ranks, stack in _alike(self.stacks)]
        else:
            parts = [f"rank {cause.rank} failed first: {cause.headline}", cause.traceback.rstrip()]
            parts.append("\n".join(_grouped(others)))
        if waiting or cause.kind == PROCESS_DIED:
            parts.append(f"{'the next call' if restarts else 'cluster.recover()'} restarts the ranks")
        super().__init__("\n\n".join(part for part in parts if part))

    def _render_traceback_(self) -> list[str]:
        # Asked for by IPython: the ranks' own traceback is in the text, and this process's says nothing.
        return str(self).splitlines()


def name_ranks(ranks: Sequence[int]) -> str:
    """Say `rank 3`, `ranks 0, 2`, or `ranks 0-5, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(said)}"


def _peer_left(failure: Failure) -> bool:
    """Whether this is what gloo says of a peer that is gone; a pipe of the caller's own breaks otherwise."""
    return failure.kind in ("RuntimeError", "DistBackendError") and bool(LEFT.search(failure.message))


def _after(failure: Failure) -> str:
    if _peer_left(failure):
        short = "a peer left"
    else:
        # Without the addresses in gloo's messages, which differ from rank to rank and say nothing.
        said = ADDRESS.sub("", failure.headline).split(". ")[0].splitlines()[0]
        short = said if len(said) <= LINE else said[:LINE].rstrip() + "…"
    return f"failed after it{', in ' + failure.doing if failure.doing else ''}: {short}"


def _still(where: Whereabouts | None) -> str:
    return f"still waiting, in {where.doing}" if where else "still waiting, and not saying where"


def _grouped(said: Mapping[int, str]) -> list[str]:
    """One line for all ranks that say the same."""
    return [f"{ranks} {text}" for ranks, text in _alike(said)]


def _alike(said: Mapping[int, str]) -> list[tuple[str, str]]:
    ranks: dict[str, list[int]] = {}
    for rank, text in said.items():
        ranks.setdefault(text, []).append(rank)
    return [(name_ranks(same), text) for text, same in ranks.items()]


def _loaded(error: bytes) -> BaseException | None:
    if not error:
        return None
    try:
        found = pickle.loads(error)
    except Exception:  # whatever an exception of the caller's own does when it is put together again
        return None
    return found if isinstance(found, BaseException) else None
