"""The loop over the tiles of a sequence, and a shorter form of it for plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lab.torch_private import detect_fake_mode

_are_short: ContextVar[bool] = ContextVar("are_short", default=False)
_repetitions: ContextVar[int] = ContextVar("repetitions", default=1)


def slices(length: int, tile: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each tile of a sequence: ``slices(20, 8)`` yields (0, 8), (8, 8), (16, 4)."""
    count = -(-length // tile)
    equal = _repetitions_of_second(count)
    for index in range(count):
        if equal == 1 or index in (0, count - 1):
            yield index * tile, min(tile, length - index * tile)
        elif index == 1:
            outer = _repetitions.set(_repetitions.get() * equal)
            yield tile, tile
            _repetitions.reset(outer)


def causal_slices(length: int, tile: int) -> Iterator[tuple[tuple[int, int], Iterator[tuple[int, int]]]]:
    """Yield (start, length) of each tile of queries, and a loop over the tiles of keys up to this tile.

    The last tile of keys is that of the same tokens as the queries. The caller must run the inner loop before
    it takes the next tile of queries. In a shortened loop, the second tile of queries stands for tiles that
    have one, two, and more tiles of keys before them. The one tile of keys before it then stands for all of
    theirs.
    """
    second = _repetitions_of_second(-(-length // tile))
    for start, size in slices(length, tile):
        yield (start, size), _slices_up_to(start, size, tile, second)


def _slices_up_to(start: int, size: int, tile: int, second: int) -> Iterator[tuple[int, int]]:
    """Yield the tiles before ``start``, and the one from ``start``.

    ``second`` is the number of tiles of queries that the second one stands for.
    """
    outer = _repetitions.get()
    if start == tile:
        # n tiles have 1 to n tiles before them: n * (n + 1) / 2 in all. The factor n is in ``outer`` already.
        _repetitions.set(outer * (second + 1) // 2)
    yield from slices(start, tile)
    _repetitions.set(outer)
    yield start, size


def _repetitions_of_second(count: int) -> int:
    """Return how many of ``count`` tiles the second one stands for: 1 if the loop runs every tile."""
    return count - 2 if _are_short.get() and count > 3 else 1


@contextmanager
def short_loops() -> Iterator[None]:
    """Make every loop in the block run only its first, second and last tile.

    The second tile stands for all tiles between the first and the last. This is right for fake tensors, whose
    bytes are all that a plan needs: from the second tile on, a loop that writes into memory which it has
    allocated before holds the same bytes in every tile, and only the last tile may be shorter. Whatever is
    counted (operations, seconds) must be multiplied by ``repetitions()``.
    """
    assert detect_fake_mode() is not None, "skipping the tiles of a real tensor would leave it unwritten"
    token, outer = _are_short.set(True), _repetitions.set(1)
    try:
        yield
    finally:
        _are_short.reset(token)
        # A loop that was left early has not reset it.
        _repetitions.reset(outer)


def repetitions() -> int:
    """Return how many tiles the current tile stands for: the product over all loops that run now."""
    return _repetitions.get()
