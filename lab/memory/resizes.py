"""Storages that change their size, which does not cross the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_listening: list[Callable[[torch.UntypedStorage], None]] = []
_changing = Lock()
_resize = torch.UntypedStorage.resize_


@contextmanager
def resizes_seen(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Report storages that are resized in the block: Python's ``resize_`` does not cross the dispatcher.

    The class is patched because there is no other seam, and only while anybody measures (torch's own tracker
    does the same). Blocks may overlap: a plan is made in one thread while a cell measures in another. Each
    hears of all storages, for a backward pass on CUDA resizes in threads of its own.
    """
    with _changing:
        _listening.append(resized)
        torch.UntypedStorage.resize_ = _told  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _changing:
            _listening.remove(resized)
            if not _listening:
                torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]


def _told(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for resized in tuple(_listening):
        resized(storage)
    return result
