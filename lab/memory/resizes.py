"""Storages that change their size, which does not cross the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def resizes_seen(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Report storages that are resized in the block: Python's ``resize_`` does not cross the dispatcher.

    The class is patched because there is no other seam, and only while measuring (torch's own tracker does
    the same).
    """
    inherited = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = inherited(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = inherited  # type: ignore[method-assign]
