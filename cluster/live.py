"""Records a running rank publishes, for the one who waits for its result.

A record is stamped with the run it belongs to. A thread started during a run belongs to that run: what it
publishes after the run's end is dropped, not credited to the next. An end marker follows a run's last record.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

DATA_KEY = "cluster"


@dataclass(frozen=True)
class Stamp:
    """Whose record it is: the run's id, the rank, and whether it is the run's end marker."""

    run: str
    rank: int
    end: bool = False


_current: Stamp | None = None
_overdue: WeakSet[threading.Thread] = WeakSet()
_lock = threading.Lock()


def publish(record: object) -> None:
    """Send `record` (anything cloudpickle takes) to the caller of `Cluster.apply`.

    Does nothing outside a run, so that the same function can be called on no cluster at all. May be called
    from any thread that the run started.
    """
    with _lock:
        if _current is not None and threading.current_thread() not in _overdue:
            _send(_current, record)


@contextmanager
def recording(run: str, rank: int) -> Iterator[None]:
    """Let `publish` credit its records to `run` on this rank, and mark their end."""
    global _current
    earlier = set(threading.enumerate())
    _current = Stamp(run, rank)
    try:
        yield
    finally:
        with _lock:
            _current = None
            _overdue.update(thread for thread in threading.enumerate() if _belongs_to_run(thread, earlier))
            _send(Stamp(run, rank, end=True), None)


def _belongs_to_run(thread: threading.Thread, earlier: set[threading.Thread]) -> bool:
    # Threads not started by Python, such as autograd's, are first seen during a run but serve later ones too.
    return thread not in earlier and not isinstance(thread, threading._DummyThread)


def _send(stamp: Stamp, record: object) -> None:
    import cloudpickle
    from ipyparallel.engine.datapub import publish_data

    publish_data({DATA_KEY: cloudpickle.dumps((stamp, record))})
