"""Places for boxes on shelves: a box keeps its place as long as it is held."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """A box: it is held in the frames ``first`` to ``end - 1``, and is ``size`` wide."""

    first: int
    end: int
    size: float


class Slot(NamedTuple):
    """The place of a box: its shelf, and its left edge on it."""

    shelf: int
    left: float


_ROUNDING = 1e-9


def pack(boxes: list[Interval], shelves: int, width: float) -> list[Slot] | None:
    """Return the place of each box, the first that is free for its whole life.

    Boxes get their places in the order in which they appear; of those that appear together, the one that is
    held longest comes first.

    Returns:
        None if a box finds no place.
    """
    slots: dict[int, Slot] = {}
    placed: list[list[int]] = [[] for _ in range(shelves)]
    for n in sorted(range(len(boxes)), key=lambda n: (boxes[n].first, -boxes[n].end, -boxes[n].size)):
        box = boxes[n]
        for shelf, others in enumerate(placed):
            left = 0.0
            # From the left: behind each box that is held at the same time, if the gap before it is too small.
            for other in sorted(others, key=lambda m: slots[m].left):
                if boxes[other].end <= box.first:
                    continue
                if slots[other].left >= left + box.size - _ROUNDING:
                    break
                left = max(left, slots[other].left + boxes[other].size)
            if left + box.size <= width + _ROUNDING:
                slots[n] = Slot(shelf, left)
                others.append(n)
                break
        else:
            return None
    return [slots[n] for n in range(len(boxes))]
