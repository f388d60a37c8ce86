"""The times at which chosen operators ran: to count them, and to see their order."""

from __future__ import annotations

import time
from typing import Any

from lab.memory.observer import Observer, name_of

Span = tuple[str, float, float]
"""An operator's name, its start and its end, in seconds of ``time.perf_counter``."""


class Spans(Observer):
    """Records the operators that run inside it and whose name begins with one of ``names``.

    The names are those of the meter: ``aten.mm``, ``lab.to_host``. On CUDA an operator ends when its kernels
    are queued, so the spans show the order of operators and not the time of the device.

    Attributes:
        all: The spans, in order.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names
        self.all: list[Span] = []

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, and record its span if its name was chosen."""
        name = name_of(func)
        if not name.startswith(self._names):
            return func(*args, **kwargs)
        start = time.perf_counter()
        result = func(*args, **kwargs)
        self.all.append((name, start, time.perf_counter()))
        return result
