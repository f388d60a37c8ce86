"""The memory that all-to-alls read and write, as ranges of addresses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lab.memory.observer import Observer


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of this rank.

    Attributes:
        sent: The addresses that it read.
        received: The addresses that it wrote.
    """

    sent: range
    received: range


class Exchanges(Observer):
    """Records every all-to-all that runs inside: ``with Exchanges() as exchanges: ...; exchanges.all``.

    An address that occurs twice is memory that was used twice. Either a technique kept the buffer, or the
    allocator returned the same memory again.

    Attributes:
        all: The all-to-alls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Exchange] = []

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, and record its addresses if it is an all-to-all."""
        if "alltoall_base" in str(func):
            received, sent = args[:2]
            self.all.append(Exchange(_addresses(sent), _addresses(received)))
        return func(*args, **kwargs)


def memory_ranges(exchanges: Iterable[Exchange]) -> list[range]:
    """Return the memory that all-to-alls read or write: disjoint ranges of addresses, in ascending order."""
    ranges: list[range] = []
    for one in sorted((r for e in exchanges for r in (e.sent, e.received)), key=lambda r: r.start):
        if ranges and one.start <= ranges[-1].stop:
            ranges[-1] = range(ranges[-1].start, max(ranges[-1].stop, one.stop))
        else:
            ranges.append(one)
    return ranges


def _addresses(x: Tensor) -> range:
    return range(x.data_ptr(), x.data_ptr() + x.nbytes)
