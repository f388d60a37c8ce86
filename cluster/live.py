"""Records that a rank publishes during a call, for the process that waits for the call's results.

A record carries a stamp: the call and the rank that it belongs to. A thread that was started during a call
belongs to that call. What such a thread publishes after the end of its call is dropped, so that it is not
taken for a record of the next call. An end marker follows the last record of a call.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

DATA_KEY = "cluster"


@dataclass(frozen=True)
class Stamp:
    """Where a record comes from.

    Attributes:
        call_id: The id of the call.
        rank: The rank that published the record.
        end: Whether this is the call's end marker instead of a record.
    """

    call_id: str
    rank: int
    end: bool = False


@dataclass(frozen=True)
class Note:
    """A sentence for the user of the cluster, which `Cluster.apply` prints on stderr when it arrives.

    Attributes:
        text: The sentence.
    """

    text: str


_current: Stamp | None = None
_overdue: WeakSet[threading.Thread] = WeakSet()
_lock = threading.Lock()


def publish(record: object) -> None:
    """Send a record to the caller of `Cluster.apply`.

    Any thread that the call started may publish. Outside a call nothing is sent, so that the same function
    also runs without a cluster.

    Args:
        record: Any object that cloudpickle can pickle.
    """
    with _lock:
        if _current is not None and threading.current_thread() not in _overdue:
            _send(_current, record)


def notify(text: str) -> None:
    """Print a sentence on stderr: on a rank during a call, on that of the caller of `Cluster.apply`.

    Args:
        text: The sentence, for example what this process waits for.
    """
    if _current is None:
        print(text, file=sys.stderr, flush=True)
    else:
        publish(Note(text))


@contextmanager
def recording(call_id: str, rank: int) -> Iterator[None]:
    """Stamp the records that are published inside the `with` block, and send the end marker after it.

    Args:
        call_id: The id of the call that runs inside the block.
        rank: The rank of this process.
    """
    global _current
    earlier = set(threading.enumerate())
    _current = Stamp(call_id, rank)
    try:
        yield
    finally:
        with _lock:
            _current = None
            _overdue.update(thread for thread in threading.enumerate() if _belongs_to_call(thread, earlier))
            _send(Stamp(call_id, rank, end=True), None)


def _belongs_to_call(thread: threading.Thread, earlier: set[threading.Thread]) -> bool:
    # Threads that Python did not start, such as autograd's, first appear during a call but serve later ones
    # too.
    return thread not in earlier and not isinstance(thread, threading._DummyThread)


def _send(stamp: Stamp, record: object) -> None:
    import cloudpickle
    from ipyparallel.engine.datapub import publish_data

    publish_data({DATA_KEY: cloudpickle.dumps((stamp, record))})
