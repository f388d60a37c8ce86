"""Where in memory all-to-alls read and write: addresses of what was sent and of what was received."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lab.memory.observing import Observer


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of this rank: the addresses that it read, and those that it wrote."""

    sent: range
    received: range


class Exchanges(Observer):
    """Notes every all-to-all that runs inside: ``with Exchanges() as seen: ...; seen.all``.

    An address that comes back says that memory was used again, whether a technique kept the buffer or the
    allocator handed out the same place: both are what a rank's memory sees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Exchange] = []

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator; note the addresses if it is an all-to-all."""
        if "alltoall_base" in str(func):
            received, sent = args[:2]
            self.all.append(Exchange(_addresses(sent), _addresses(received)))
        return func(*args, **kwargs)


def touched(exchanges: Iterable[Exchange]) -> list[range]:
    """The memory that these all-to-alls read or wrote: disjoint ranges of addresses, ascending."""
    found: list[range] = []
    for one in sorted((r for e in exchanges for r in (e.sent, e.received)), key=lambda r: r.start):
        if found and one.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, one.stop))
        else:
            found.append(one)
    return found


def _addresses(x: Tensor) -> range:
    return range(x.data_ptr(), x.data_ptr() + x.nbytes)
