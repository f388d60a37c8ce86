"""The loop over the tiles of a sequence, and the one shortcut that a plan takes in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lab.torch_private import detect_fake_mode

_shortened: ContextVar[bool] = ContextVar("shortened", default=False)
_times: ContextVar[int] = ContextVar("times", default=1)


def slices(length: int, tile: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each tile of a sequence: ``slices(20, 8)`` gives (0, 8), (8, 8), (16, 4)."""
    count = -(-length // tile)
    alike = count - 2 if _shortened.get() and count > 3 else 1
    for index in range(count):
        if alike == 1 or index in (0, count - 1):
            yield index * tile, min(tile, length - index * tile)
        elif index == 1:
            outer = _times.set(_times.get() * alike)
            yield tile, tile
            _times.reset(outer)


@contextmanager
def shortened() -> Iterator[None]:
    """Walk only the first, second and last tile of every loop; the second stands for all between.

    For fake tensors, of which nothing is asked but their bytes: from the second tile on, a loop that writes
    into what it has allocated before holds the same with every tile, and the last one may be shorter. What is
    counted, not held (operations, seconds), is to be taken ``times()`` as often.
    """
    assert detect_fake_mode() is not None, "skipping the tiles of a real tensor would leave it unwritten"
    token, outer = _shortened.set(True), _times.set(1)
    try:
        yield
    finally:
        _shortened.reset(token)
        # Also when a loop was left halfway.
        _times.reset(outer)


def times() -> int:
    """How many tiles the one at work stands for, over all loops that are open."""
    return _times.get()
