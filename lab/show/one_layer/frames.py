"""One layer's step as frames: which tensors are held, which move, and what is said of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from lab.memory.categories import CATEGORIES, HOST, MEMORIES
from lab.memory.storages import Integers, Storages
from lab.memory.timeline import Timeline
from lab.planning.shrinking import hidden_state_bytes
from lab.recipe.jobs import Job
from lab.show.one_layer.names import Moving, is_attention, moving, name_of
from lab.show.one_layer.packing import Interval, Slot, pack
from lab.show.one_layer.windows import MODEL_STATE, Window, members_of, window_of
from lab.units import format_operator

MOST_FRAMES = 160
"""The most frames of one layer: where there are more, more tensors are too small to have a box."""

_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1.0, 2.0)
"""The parts of A below which a tensor has no box: the first that gives few enough frames."""


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
        host_small: The host bytes of the layer's tensors without a box.
        host_outside: The host bytes of other layers.
        travel: What moves; None in most frames.
    """

    row: int
    boxes: tuple[int, ...]
    small: int
    small_count: int
    outside: int
    by_category: tuple[int, ...]
    host_small: int
    host_outside: int
    travel: Travel | None


@dataclass(frozen=True)
class Caption:
    """What is said of a frame.

    Attributes:
        phase: Forward or backward.
        stage: The stage of UPipe, counted from 1, and how many there are; None outside of them.
        text: What happens.
        module: The module that runs, without the layer.
    """

    phase: str
    stage: tuple[int, int] | None
    text: str
    module: str


@dataclass(frozen=True)
class Lane:
    """One rank: its boxes, and its frames."""

    rank: int
    boxes: tuple[Box, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class LayerFrames:
    """The frames of one layer's forward and backward.

    Attributes:
        title: What was planned or run, and the layer.
        note: What a reader must know of the ranks.
        ranks: The ranks of the job.
        layer: The number of the layer.
        unit: A, the bytes of one hidden state of the rank: b x s x E elements.
        share: Tensors of less than this many A have no box.
        ulysses: The ranks of a group that exchanges sequence for heads.
        ring: The ranks of a ring.
        lanes: The ranks.
        captions: What is said of each frame.
        backward: The first frame of backward.
        width: A shelf of the device's boxes, in A.
        shelves: How many shelves there are.
        host_width: The width of the host's boxes, in A; 0 if there are none.
    """

    title: str
    note: str
    ranks: int
    layer: int
    unit: int
    share: float
    ulysses: int
    ring: int
    lanes: tuple[Lane, ...]
    captions: tuple[Caption, ...]
    backward: int
    width: float
    shelves: int
    host_width: float

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def stages(self) -> int:
        """The stages in which attention runs; 0 without UPipe."""
        return max((caption.stage[1] for caption in self.captions if caption.stage), default=0)


class HasJobAndTimeline(Protocol):
    """A plan or a rehearsal."""

    @property
    def timeline(self) -> Timeline: ...

    @property
    def job(self) -> Job: ...


class HasJobAndTimelines(Protocol):
    """A run."""

    @property
    def timelines(self) -> tuple[Timeline, ...]: ...

    @property
    def job(self) -> Job: ...


def layer_frames(
    result: HasJobAndTimeline | HasJobAndTimelines, layer: int | None, ranks: int
) -> LayerFrames:
    """Return the frames of one layer of a plan, a rehearsal or a run.

    Args:
        result: What has the timelines.
        layer: The number of the layer; None for the one in the middle.
        ranks: The most ranks that are shown.

    Raises:
        ResultError: There is no such layer, or no tensors were recorded.
    """
    job = result.job
    timelines: Sequence[Timeline] = getattr(result, "timelines", None) or (result.timeline,)  # type: ignore[union-attr]
    of_one_rank = len(timelines) == 1
    first = timelines[0]
    window = window_of(first, layer)
    unit = hidden_state_bytes(first, job)
    views = [_View(timeline, window_of(timeline, window.layer), job) for timeline in timelines[:ranks]]
    share = _share(views[0], unit)
    rows = views[0].event_rows(share * unit)
    tracks = [view.track(view.like(views[0], rows), share * unit) for view in views]
    shelves, width, host_width = _room(tracks, unit)
    shown = min(ranks, job.ranks) if of_one_rank else len(views)
    lanes = [track.lane(rank, unit, shelves, width, host_width) for rank, track in enumerate(tracks)]
    if of_one_rank:
        # The others hold the same, or what is left of an uneven division.
        lanes = [replace(lanes[0], rank=rank) for rank in range(shown)]
    note = f"{shown} of {job.ranks} ranks" if shown < job.ranks else ""
    if of_one_rank and job.ranks > 1:
        note = ", ".join(filter(None, (note, "the step of one rank, drawn for all")))
    return LayerFrames(
        title=f"{job.title} · layer {window.layer}",
        note=note,
        ranks=job.ranks,
        layer=window.layer,
        unit=unit,
        share=share,
        ulysses=job.recipe.ulysses,
        ring=job.recipe.ring,
        lanes=tuple(lanes),
        captions=tuple(views[0].captions(rows, tracks[0])),
        backward=sum(row in window.forward for row in rows),
        width=width,
        shelves=shelves,
        host_width=host_width,
    )


def _share(view: _View, unit: int) -> float:
    for share in _SHARES:
        if len(view.event_rows(share * unit)) <= MOST_FRAMES:
            return share
    return _SHARES[-1]


@dataclass(frozen=True)
class _Group:
    """Storages that are drawn as one box, from the row at which the last of them is made."""

    members: Integers
    first: int
    end: int
    bytes: int


class _View:
    """One rank's timeline, and what of it belongs to the layer."""

    def __init__(self, timeline: Timeline, window: Window, job: Job) -> None:
        self.timeline, self.window, self.job = timeline, window, job
        self.members = members_of(timeline.storages, window)
        self.groups = list(_groups(timeline.storages, self.members))
        self.moves: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        for entry, row, written in timeline.storages.moves.tolist():
            if row in window:
                self.moves[row].append((entry, bool(written)))

    def drawn(self, least: float) -> list[_Group]:
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
            if written and entry in boxed and self._is_next(boxed[entry].first, row, moved | made)
        }
        ends = {span[n] for span in (self.window.forward, self.window.backward) for n in (0, -1)}
        kernels = {row for row in self.window.rows if is_attention(self._operator(row))}
        return sorted(made - (filled - moved) | moved | kernels | ends)

    def _operator(self, row: int) -> str:
        name: str = self.timeline.ops[self.timeline.op[row]].name
        return name

    def _is_next(self, row: int, later: int, rows: set[int]) -> bool:
        """Return whether no other of these rows is between two rows."""
        return row < later and not any(row < between < later for between in rows)

    def like(self, other: _View, rows: list[int]) -> list[int]:
        """The rows of this timeline at which the same operators ran as at these rows of another rank's."""
        if other is self:
            return rows
        ours = dict(zip(self.keys(), self.window.rows, strict=True))
        found: list[int] = []
        keys = dict(zip(other.window.rows, other.keys(), strict=True))
        for row in rows:
            # Where a rank has no such row, it holds what it held before.
            found.append(ours.get(keys[row], found[-1] if found else self.window.forward.start))
        return [max(pair) for pair in pairwise([0, *found])]

    def keys(self) -> list[tuple[int, str, int]]:
        """A key for each row: the phase, the operator, and how many such operators came before."""
        counts: dict[tuple[int, str], int] = defaultdict(int)
        keys = []
        for row in self.window.rows:
            what = int(self.timeline.phase[row]), str(self.timeline.ops[self.timeline.op[row]])
            keys.append((*what, counts[what]))
            counts[what] += 1
        return keys

    def track(self, rows: list[int], least: float) -> _Track:
        return _Track(self, rows, self.drawn(least))

    def stages(self, rows: list[int]) -> list[tuple[int, int] | None]:
        """The stage of UPipe at each row, and how many there are."""
        if self.job.recipe.head_chunk is None:
            return [None] * len(rows)
        kernels: dict[str, list[int]] = {"forward": [], "recomputed": [], "backward": []}
        for row in self.window.rows:
            name = self._operator(row)
            if is_attention(name):
                again = "recomputed" if row in self.window.backward else "forward"
                kernels["backward" if "backward" in name else again].append(row)
        spans = []
        for run in kernels.values():
            # A stage ends with the exchange that follows its kernel.
            ends = [min((r for r in self.moves if r > row), default=row) for row in run]
            starts = [self._attention_starts(run[0]), *(end + 1 for end in ends[:-1])] if run else []
            spans += [
                (start, end, number, len(run))
                for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1)
            ]
        found = ([(n, of) for start, end, n, of in spans if start <= row <= end] for row in rows)
        return [stages[-1] if stages else None for stages in found]

    def _attention_starts(self, row: int) -> int:
        """The first of the rows before this one that are in attention."""
        while row - 1 in self.window and "attn" in self.timeline.modules[self.timeline.module[row - 1]]:
            row -= 1
        return row

    def captions(self, rows: list[int], track: _Track) -> Iterable[Caption]:
        timeline = self.timeline
        previous: set[int] = set()
        stages, returns = self.stages(rows), self._returns()
        for number, (row, stage) in enumerate(zip(rows, stages, strict=True)):
            held = {n for n, (first, end) in enumerate(track.spans) if first <= number < end}
            travel = track.travel(number)
            if travel is not None:
                text = _travels(travel, track, back=row in returns, ahead=self._is_ahead(travel, track, row))
            elif row in (self.window.forward.start, self.window.backward.start):
                text = f"{timeline.phases[timeline.phase[row]]} of the layer begins"
            else:
                text = self._changes(row, track, held - previous, previous - held)
            module = timeline.modules[timeline.module[row]].partition(f"layers.{self.window.layer}")[2]
            phase = timeline.phases[timeline.phase[row]]
            yield Caption(phase, stage, text, module.lstrip(".") or "the layer")
            previous = held

    def _changes(self, row: int, track: _Track, new: set[int], freed: set[int]) -> str:
        """Say which boxes appear and which are freed."""
        op = format_operator(self._operator(row)).rpartition(".")[2].strip("_")
        again = " again" if any(track.category(n) == "recomputed activations" for n in new) else ""
        made = _listed([track.names[n] for n in sorted(new)])
        parts = []
        if is_attention(op):
            gives = "the gradients of q, k and v" if "backward" in op else "attention"
            parts.append(f"{op} computes {made or gives}{again}")
        elif made == "parameters":
            parts.append("the parameters are copied out of what was gathered")
        elif new:
            allocated = "empty" in op or "zeros" in op
            parts.append(f"{made} allocated{again}" if allocated else f"{op} computes {made}{again}")
        if freed:
            parts.append(f"{_listed([track.names[n] for n in sorted(freed)])} freed")
        return "; ".join(parts) or f"{self.timeline.phases[self.timeline.phase[row]]} of the layer ends"

    def _is_ahead(self, travel: Travel, track: _Track, row: int) -> bool:
        """Return whether the parameters that are gathered are those of the layer that comes next."""
        group = track.groups[travel.targets[0]] if travel.targets else None
        window = self.window
        return group is not None and row in window.backward and group.end > window.backward.stop

    def _returns(self) -> set[int]:
        """The exchanges that send heads back: the first after a forward kernel, all after a backward one."""
        found, waiting, after_backward = set(), False, False
        upipe = self.job.recipe.head_chunk is not None
        for row in self.window.rows:
            name = self._operator(row)
            if is_attention(name):
                waiting, after_backward = True, "backward" in name
            elif "alltoall" in name and waiting:
                found.add(row)
                waiting = after_backward and not upipe
        return found


class _Track:
    """The boxes of one rank, before they have places."""

    def __init__(self, view: _View, rows: list[int], groups: list[_Group]) -> None:
        self.view, self.rows = view, rows
        edges = np.array(rows)
        spans = [
            (int(np.searchsorted(edges, group.first)), int(np.searchsorted(edges, group.end)))
            for group in groups
        ]
        kept = [n for n, (first, end) in enumerate(spans) if first < end]
        self.groups = [groups[n] for n in kept]
        self.spans = [spans[n] for n in kept]
        self._box_of = {int(entry): n for n, group in enumerate(self.groups) for entry in group.members}
        self.names = [name_of(view.timeline, group.members, view.window) for group in self.groups]

    def category(self, box: int) -> str:
        storages = self.view.timeline.storages
        return MEMORIES[int(storages.category[self.groups[box].members[0]])]

    def on_host(self, box: int) -> bool:
        return self.category(box) not in CATEGORIES

    def travel(self, number: int) -> Travel | None:
        """What moves in a frame."""
        row = self.rows[number]
        moves = [
            (self._box_of[e], written) for e, written in self.view.moves.get(row, []) if e in self._box_of
        ]
        if not moves:
            return None
        timeline = self.view.timeline
        kind = moving(timeline.ops[timeline.op[row]], self.view.job.recipe.ring)
        return Travel(
            kind,
            tuple(box for box, written in moves if not written),
            tuple(box for box, written in moves if written),
        )

    def intervals(self, unit: int, *, host: bool) -> dict[int, Interval]:
        return {
            n: Interval(*self.spans[n], self.groups[n].bytes / unit)
            for n in range(len(self.groups))
            if self.on_host(n) == host
        }

    def lane(self, rank: int, unit: int, shelves: int, width: float, host_width: float) -> Lane:
        slots: dict[int, Slot] = {}
        for host, room in ((False, (shelves, width)), (True, (shelves, host_width))):
            intervals = self.intervals(unit, host=host)
            places = pack(list(intervals.values()), *room)
            assert places is not None, "the room was made for all ranks"
            slots |= dict(zip(intervals, places, strict=True))
        boxes = tuple(
            Box(
                name=self.names[n],
                about=_about(self.view.timeline, group.members),
                category=self.category(n),
                bytes=group.bytes,
                first=self.spans[n][0],
                end=self.spans[n][1],
                slot=slots[n],
            )
            for n, group in enumerate(self.groups)
        )
        return Lane(rank, boxes, tuple(self._frames()))

    def _frames(self) -> Iterable[Frame]:
        timeline, storages = self.view.timeline, self.view.timeline.storages
        belongs = np.zeros(len(storages), dtype=bool)
        belongs[self.view.members] = True
        for number, row in enumerate(self.rows):
            boxes = tuple(n for n, (first, end) in enumerate(self.spans) if first <= number < end)
            boxed = np.zeros(len(storages), dtype=bool)
            for box in boxes:
                boxed[self.groups[box].members] = True
            held = storages.held_at(row)
            on_host = storages.category[held] >= HOST
            size, ours, small = storages.size[held], belongs[held], belongs[held] & ~boxed[held]
            yield Frame(
                row=row,
                boxes=boxes,
                small=int(size[small & ~on_host].sum()),
                small_count=int((small & ~on_host).sum()),
                outside=int(size[~ours & ~on_host].sum()),
                by_category=tuple(timeline.device[row].tolist()),
                host_small=int(size[small & on_host].sum()),
                host_outside=int(size[~ours & on_host].sum()),
                travel=self.travel(number),
            )


def _groups(storages: Storages, members: Integers) -> Iterable[_Group]:
    """Yield each tensor; the layer's parameters and gradients that are freed together are one."""
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for n in members.tolist():
        category, end = int(storages.category[n]), int(storages.end[n])
        named = storages.kinds[storages.kind[n]].name != ""
        key = (category, end) if category in MODEL_STATE and named else (category, end, n)
        together[key].append(n)
    for group in together.values():
        index = np.array(group)
        yield _Group(
            index,
            int(storages.first[index].max()),
            int(storages.end[index[0]]),
            int(storages.size[index].sum()),
        )


def _room(tracks: Sequence[_Track], unit: int) -> tuple[int, float, float]:
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


def _about(timeline: Timeline, members: Integers) -> str:
    storages, n = timeline.storages, int(members[0])
    kind = storages.kinds[storages.kind[n]]
    what = f"{len(members)} tensors" if len(members) > 1 else f"{kind.dtype} {'x'.join(map(str, kind.shape))}"
    op = storages.kinds[storages.kind[n]].op
    return f"{what} · {op} in {timeline.modules[storages.module[n]] or 'the step'}"


def _travels(travel: Travel, track: _Track, *, back: bool, ahead: bool) -> str:
    """Say what moves."""
    name = track.names[(travel.sources or travel.targets)[0]]
    match travel.kind:
        case Moving.ALL_TO_ALL:
            got = "all heads of its own tokens" if back else "all tokens of its own heads"
            return f"all-to-all{' back' if back else ''}: every rank gets {got}"
        case Moving.RING:
            return "ring: every rank sends keys and values to the next"
        case Moving.ALL_GATHER:
            which = "the next layer, ahead of time" if ahead else "the layer"
            return f"all-gather: every rank gets all parameters of {which}"
        case Moving.REDUCE_SCATTER:
            return "reduce-scatter: the gradients of all ranks are summed, every rank keeps its shard"
        case Moving.ALL_REDUCE:
            return f"all-reduce: {name} is summed over the ranks"
        case Moving.TO_HOST:
            return f"{name} is copied to host memory"
        case Moving.FROM_HOST:
            return f"{track.names[travel.targets[0]] if travel.targets else name} comes back from host memory"


def _listed(names: list[str]) -> str:
    if not names:
        return ""
    counts = {name: names.count(name) for name in names}
    texts = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    if len(texts) > 3:
        return f"{', '.join(texts[:2])} and {len(texts) - 2} more"
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
