"""The loop over the tiles of a sequence, and a shorter form of it for plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lab.torch_private import detect_fake_mode

_are_short: ContextVar[bool] = ContextVar("are_short", default=False)
_repetitions: ContextVar[int] = ContextVar("repetitions", default=1)


def slices(length: int, tile: int, *, different: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each tile of a sequence: ``slices(20, 8)`` yields (0, 8), (8, 8), (16, 4).

    Args:
        length: The tokens of the sequence.
        tile: Those of a tile. If it does not divide the length, the last tile is shorter.
        different: How many tiles at the beginning may hold other bytes than those after them. A shortened
            loop runs each of these tiles.
    """
    outer = _repetitions.get()
    for start, size, times in counted_slices(length, tile, different=different):
        _repetitions.set(outer * times)
        yield start, size
        _repetitions.set(outer)


def counted_slices(length: int, tile: int, *, different: int = 1) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, tiles that it stands for) of each tile that ``slices`` yields."""
    count = -(-length // tile)
    equal = _repetitions_of_one(count, different)
    for index in range(count):
        if equal == 1 or index < different or index == count - 1:
            yield index * tile, min(tile, length - index * tile), 1
        elif index == different:
            yield index * tile, tile, equal


def causal_slices(length: int, tile: int) -> Iterator[tuple[tuple[int, int], Iterator[tuple[int, int]]]]:
    """Yield (start, length) of each tile of queries, and a loop over the tiles of keys up to this tile.

    The last tile of keys is that of the same tokens as the queries. The caller must run the inner loop before
    it takes the next tile of queries. In a shortened loop, the second tile of queries stands for tiles that
    have one, two, and more tiles of keys before them. The one tile of keys before it then stands for all of
    theirs.
    """
    second = _repetitions_of_one(-(-length // tile), different=1)
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


def _repetitions_of_one(count: int, different: int) -> int:
    """Return how many of ``count`` tiles the one after the first ``different`` stands for.

    It is 1 if the loop runs every tile.
    """
    return max(count - different - 1, 1) if _are_short.get() else 1


@contextmanager
def short_loops() -> Iterator[None]:
    """Make every loop in the block run only its first, second and last tile.

    The second tile stands for all tiles between the first and the last. This is right for fake tensors, whose
    bytes are all that a plan needs: from the second tile on, a loop that writes into memory which it has
    allocated before holds the same bytes in every tile, and only the last tile may be shorter. A loop that
    holds the same bytes from a later tile on says so, see ``slices``. Whatever is counted (operations,
    seconds) must be multiplied by ``repetitions()``.
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


@contextmanager
def repeated(times: int) -> Iterator[None]:
    """Make what runs in the block stand for itself so many times, in all."""
    outer = _repetitions.set(times)
    yield
    _repetitions.reset(outer)
