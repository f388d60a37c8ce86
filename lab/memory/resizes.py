"""Resizes of storages, which do not cross torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_listeners: list[Callable[[torch.UntypedStorage], None]] = []
_lock = Lock()
_resize = torch.UntypedStorage.resize_


@contextmanager
def report_resizes(listener: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``listener`` with each storage that is resized in this context, after it was resized.

    The method of torch's class is replaced, because torch offers no hook; torch's own memory tracker replaces
    it too. It is replaced only while a listener exists. Contexts may overlap: one thread makes a plan while
    another measures. Each listener hears of the storages of all threads, because a backward pass on CUDA
    resizes in threads of its own.
    """
    with _lock:
        _listeners.append(listener)
        torch.UntypedStorage.resize_ = _resize_and_report  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]


def _resize_and_report(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for listener in tuple(_listeners):
        listener(storage)
    return result
