"""When chosen operators ran: to count them, and to see what stands before what."""

from __future__ import annotations

import time
from typing import Any

from lab.memory.observing import Observer

Span = tuple[str, float, float]
"""An operator's name, and when it began and ended, in seconds of ``time.perf_counter``."""


class Spans(Observer):
    """Notes every operator inside the block whose name begins with one of ``names``, in order.

    Names are the meter's: ``aten.mm``, ``lab.to_host``. On CUDA an operator has ended when its kernels are
    queued, so what stands here is the order, not the device's time.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names
        self.found: list[Span] = []

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, and note it if it was asked for."""
        name = str(func.overloadpacket)
        if not name.startswith(self._names):
            return func(*args, **kwargs)
        start = time.perf_counter()
        result = func(*args, **kwargs)
        self.found.append((name, start, time.perf_counter()))
        return result
