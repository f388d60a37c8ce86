"""Storages that change their size, which does not cross the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_listening: tuple[Callable[[torch.UntypedStorage], None], ...] = ()
_changing = Lock()
_resize = torch.UntypedStorage.resize_


@contextmanager
def resizes_seen(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Report storages that are resized in the block: Python's ``resize_`` does not cross the dispatcher.

    The class is patched because there is no other seam, and only while anybody measures (torch's own tracker
    does the same). Blocks may overlap: a plan is made in one thread while a cell measures in another. Each
    hears of all storages, for a backward pass on CUDA resizes in threads of its own.
    """
    _listen((resized,))
    try:
        yield
    finally:
        _listen((), but=resized)


def _listen(more: tuple[Callable[[torch.UntypedStorage], None], ...], but: Any = None) -> None:
    global _listening
    with _changing:
        _listening = (*(one for one in _listening if one is not but), *more)
        torch.UntypedStorage.resize_ = _told if _listening else _resize  # type: ignore[method-assign, assignment]


def _told(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for resized in _listening:
        resized(storage)
    return result
