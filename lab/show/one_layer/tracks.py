"""The boxes of one layer on one rank: the tensors that have one, when, and their places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lab.memory.categories import CATEGORIES, HOST, MEMORIES
from lab.memory.storages import Integers
from lab.recipe.jobs import Job
from lab.show.one_layer.names import Moving, is_attention, moving, name_of
from lab.show.one_layer.packing import Interval, Slot, pack
from lab.show.one_layer.windows import MODEL_STATE, Window, members_of


@dataclass(frozen=True)
class Box:
    """A tensor of the layer; or the layer's parameters or gradients, which are freed together.

    Attributes:
        name: What it is, in two or three words.
        about: Its dtype and shape, and the operator and the module that made it.
        category: One of ``MEMORIES``. A box on the disk is drawn next to those of the host.
        bytes: Its bytes.
        first: The first frame in which it is held.
        end: The first frame in which it is no longer held.
        slot: Its place, in units of A.
    """

    name: str
    about: str
    category: str
    bytes: int
    first: int
    end: int
    slot: Slot


@dataclass(frozen=True)
class Travel:
    """Bytes that move in a frame.

    Attributes:
        kind: How they move.
        sources: The boxes that are read.
        targets: The boxes that are written.
    """

    kind: Moving
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """What one rank holds after one operator, and what the operator moves.

    Attributes:
        row: The row of the timeline.
        boxes: The boxes that are held.
        small: The bytes of the layer's tensors without a box, on the device.
        small_count: How many these are.
        outside: The device bytes of all other tensors: the model's state, and what other layers keep.
        by_category: All device bytes by category.
        host_outside: The host bytes of all tensors without a box.
        travel: What moves; None in most frames.
    """

    row: int
    boxes: tuple[int, ...]
    small: int
    small_count: int
    outside: int
    by_category: tuple[int, ...]
    host_outside: int
    travel: Travel | None


@dataclass(frozen=True)
class Lane:
    """One rank: its boxes, and its frames."""

    rank: int
    boxes: tuple[Box, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Group:
    """Storages that are drawn as one box, from the row at which the last of them is made."""

    members: Integers
    first: int
    end: int
    bytes: int


class View:
    """One rank's timeline, and what of it belongs to the layer."""

    def __init__(self, window: Window, job: Job) -> None:
        self.window, self.timeline, self.job = window, window.timeline, job
        self.members = members_of(window)
        self.groups = list(_groups(window, self.members))
        self.moves: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        for entry, row, written in self.timeline.storages.moves.tolist():
            if row in window:
                self.moves[row].append((entry, bool(written)))

    def drawn(self, least: float) -> list[Group]:
        """The groups that have a box: those of so many bytes, and those that move and are not negligible."""
        moved = {entry for moves in self.moves.values() for entry, _ in moves}
        return [
            group
            for group in self.groups
            if group.bytes >= least
            or (group.bytes >= least / 4 and not moved.isdisjoint(group.members.tolist()))
        ]

    def event_rows(self, least: float) -> list[int]:
        """The rows at which a box appears or moves or attention runs, and the ends of each phase."""
        groups = self.drawn(least)
        boxed = {int(entry): group for group in groups for entry in group.members}
        moved = {row for row, moves in self.moves.items() if any(entry in boxed for entry, _ in moves)}
        made = {group.first for group in groups if group.first in self.window}
        # A box that a collective fills appears when it is filled, and not when its memory is allocated.
        filled = {
            boxed[entry].first
            for row in moved
            for entry, written in self.moves[row]
            if written and entry in boxed and _is_next(boxed[entry].first, row, moved | made)
        }
        ends = {span[n] for span in (self.window.forward, self.window.backward) for n in (0, -1)}
        kernels = {row for row in self.window.rows if is_attention(self.window.operator(row))}
        return sorted(made - (filled - moved) | moved | kernels | ends)

    def like(self, other: View, rows: list[int]) -> list[int]:
        """The rows of this timeline at which the same operators ran as at these rows of another rank's."""
        if other is self:
            return rows
        ours = dict(zip(self.row_keys(), self.window.rows, strict=True))
        keys = dict(zip(other.window.rows, other.row_keys(), strict=True))
        found = [self.window.forward.start]
        for row in rows:
            # Where a rank has no such row, it holds what it held before.
            found.append(ours.get(keys[row], found[-1]))
        return [max(pair) for pair in pairwise([0, *found[1:]])]

    def row_keys(self) -> list[tuple[int, str, int]]:
        """A key for each row: the phase, the operator, and how many such operators came before."""
        counts: dict[tuple[int, str], int] = defaultdict(int)
        keys = []
        for row in self.window.rows:
            what = int(self.timeline.phase[row]), str(self.timeline.ops[self.timeline.op[row]])
            keys.append((*what, counts[what]))
            counts[what] += 1
        return keys


class Track:
    """The boxes of one rank, before they have places.

    Args:
        view: The rank's timeline.
        rows: The rows of the frames.
        least: The bytes from which on a tensor has a box.
    """

    def __init__(self, view: View, rows: list[int], least: float) -> None:
        self.view, self.rows = view, rows
        self.groups: list[Group] = []
        self.boxes: list[Box] = []
        self._box_of: dict[int, int] = {}
        for group in view.drawn(least):
            first, end = (int(n) for n in np.searchsorted(rows, (group.first, group.end)))
            if first < end:
                self._box_of |= dict.fromkeys(group.members.tolist(), len(self.boxes))
                self.groups.append(group)
                self.boxes.append(_box(view.window, group, first, end))

    def intervals(self, unit: int, *, host: bool) -> dict[int, Interval]:
        """Return when each box of the device or of the host is held, and its size in A."""
        return {
            n: Interval(box.first, box.end, box.bytes / unit)
            for n, box in enumerate(self.boxes)
            if (box.category not in CATEGORIES) == host
        }

    def slots(self, unit: int, shelves: int, width: float, host_width: float) -> list[Slot]:
        """Return the place of each box."""
        slots: dict[int, Slot] = {}
        for host, room in ((False, width), (True, host_width)):
            intervals = self.intervals(unit, host=host)
            places = pack(list(intervals.values()), shelves, room)
            assert places is not None, "the room was made for all ranks"
            slots |= dict(zip(intervals, places, strict=True))
        return [slots[n] for n in range(len(self.boxes))]

    def frames(self) -> Iterator[Frame]:
        """Yield what the rank holds at each row."""
        timeline, storages = self.view.timeline, self.view.timeline.storages
        belongs = np.zeros(len(storages), dtype=bool)
        belongs[self.view.members] = True
        for number, row in enumerate(self.rows):
            boxes = tuple(n for n, box in enumerate(self.boxes) if box.first <= number < box.end)
            boxed = np.zeros(len(storages), dtype=bool)
            for box in boxes:
                boxed[self.groups[box].members] = True
            held = storages.held_at(row)
            on_host = storages.category[held] >= HOST
            size, ours = storages.size[held], belongs[held]
            small = ours & ~boxed[held] & ~on_host
            yield Frame(
                row=row,
                boxes=boxes,
                small=int(size[small].sum()),
                small_count=int(small.sum()),
                outside=int(size[~ours & ~on_host].sum()),
                by_category=tuple(timeline.device[row].tolist()),
                host_outside=int(size[~(ours & boxed[held]) & on_host].sum()),
                travel=self._travel(row),
            )

    def _travel(self, row: int) -> Travel | None:
        """What moves at a row."""
        moves = [
            (self._box_of[entry], written)
            for entry, written in self.view.moves.get(row, [])
            if entry in self._box_of
        ]
        if not moves:
            return None
        timeline = self.view.timeline
        kind = moving(timeline.ops[timeline.op[row]], self.view.job.recipe.ring)
        boxes: tuple[list[int], list[int]] = ([], [])
        for box, written in moves:
            boxes[written].append(box)
        return Travel(kind, *map(tuple, boxes))


def find_room(tracks: Sequence[Track], unit: int) -> tuple[int, float, float]:
    """Return how many shelves there are, and their widths on the device and on the host, in A."""
    intervals = [list(track.intervals(unit, host=False).values()) for track in tracks]
    most = max((_most(one) for one in intervals), default=1.0)
    shelves = min(max(round(most / 8), 1), 4)
    width = _narrowest(intervals, shelves, most)
    host = [list(track.intervals(unit, host=True).values()) for track in tracks]
    return shelves, width, _narrowest(host, shelves, max(_most(one) for one in host)) if any(host) else 0.0


def _most(intervals: list[Interval]) -> float:
    """Return the most that is held at once."""
    ends = {interval.first for interval in intervals}
    return max((sum(i.size for i in intervals if i.first <= t < i.end) for t in ends), default=0.0)


def _narrowest(intervals: Sequence[list[Interval]], shelves: int, most: float) -> float:
    """Return the width of a shelf at which all ranks' boxes have places."""
    widest = max((i.size for one in intervals for i in one), default=1.0)
    width = max(widest, most / shelves)
    while any(pack(one, shelves, width) is None for one in intervals):
        width *= 1.04
    return width


def _is_next(row: int, later: int, rows: set[int]) -> bool:
    """Return whether no other of these rows is between two rows."""
    return row < later and not any(row < between < later for between in rows)


def _groups(window: Window, members: Integers) -> Iterator[Group]:
    """Yield each tensor; the layer's parameters and gradients that are freed together are one."""
    storages = window.timeline.storages
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for n in members.tolist():
        category, end = int(storages.category[n]), int(storages.end[n])
        alone = () if category in MODEL_STATE and window.kind(n).name else (n,)
        together[category, end, *alone].append(n)
    for group in together.values():
        index = np.array(group)
        first, size = storages.first[index].max(), storages.size[index].sum()
        yield Group(index, int(first), int(storages.end[index[0]]), int(size))


def _box(window: Window, group: Group, first: int, end: int) -> Box:
    n = int(group.members[0])
    kind, several = window.kind(n), len(group.members)
    what = f"{several} tensors" if several > 1 else f"{kind.dtype} {'x'.join(map(str, kind.shape))}"
    return Box(
        name=name_of(window, group.members),
        about=f"{what} · {kind.op} in {window.module(n) or 'the step'}",
        category=MEMORIES[int(window.timeline.storages.category[n])],
        bytes=group.bytes,
        first=first,
        end=end,
        slot=Slot(0, 0.0),
    )
