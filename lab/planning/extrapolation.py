"""From the step of a model's first few layers to the step of all of them, row by row, to the byte.

A unit is a number of layers after which segments, and the kinds of layers, repeat: one layer if all are of
one kind and there are no segments. In the step that is walked, the two first layers and the two last ones are
as in the whole model: prefetching begins and ends there. So are the first layers of each kind. Of the layers
between, a unit stands for all the others. Their rows are repeated once for each further unit, and so are the
storages that are made and freed in them. The bytes of a row are the sum of its storages.

What is outside the layers grows by one amount a layer. A second step, of two layers or of a unit with layers
of every kind, gives this amount.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import lcm

import numpy as np
import numpy.typing as npt

from lab.memory.categories import OTHER
from lab.memory.storages import Integers, columns_of
from lab.memory.timeline import Timeline
from lab.planning.costs import Work
from lab.planning.extrapolated_storages import Depths, Part, Parts, Repeat, extrapolated_entries
from lab.planning.scaling import Step

EDGE = 2
"""The first layers, and the last ones, that are not repeated."""

SHALLOW = 2
"""The layers of the second step. The input of a single one would be held by the model, as no other's is."""

_LAYER = re.compile(r"\bmodel\.layers\.(\d+)")


def depths_to_walk(kinds: Sequence[Hashable], segment: int) -> Depths:
    """Return how many layers to walk for a model with layers of these kinds, in segments of ``segment``.

    The last segment of the deeper step is as long as that of the whole model, and its last layers are of the
    same kinds.
    """
    layers = len(kinds)
    period = next(p for p in range(1, layers + 1) if kinds[p:] == kinds[: layers - p])
    unit = lcm(segment, period)
    # The first layer of a kind frees the cosines and sines of its kind in backward, and no other layer does.
    first = max(EDGE, period if period > 1 else 0)
    least = first + unit + EDGE
    shallow = SHALLOW if period == 1 else unit
    return Depths(shallow, least + (layers - least) % unit, layers, range(first, first + unit))


def extrapolate(shallow: Step, deep: Step, depths: Depths) -> Step | None:
    """Return the step of all layers.

    Args:
        shallow: The step of ``depths.shallow`` layers. Its last layer must be the first of a segment if that
            of the whole model is: it then ends with other operators.
        deep: The step of ``depths.deep`` layers.
        depths: What ``depths_to_walk`` returned.

    Returns:
        The step. None if the two steps differ in an operator outside the layers, if layers
        do not repeat, or if the storages do not fit together: at each row of a layer the same bytes of each
        category must be made and freed, and as many storages be moved, as at the row that it repeats.
    """
    timeline, parts, shallow_parts = deep.timeline, _parts(deep.timeline), _parts(shallow.timeline)
    outside = _alike_outside(shallow.timeline, shallow_parts, timeline, parts)
    if outside is None or not _repeats(timeline, parts, depths.repeated):
        return None
    target, rows, shifts = _repeated(parts, depths)
    ends = timeline.seconds.astype(np.int64)
    entries_of_rows = np.diff(ends, prepend=0)[rows]
    whole = _renumbered(timeline, rows, shifts, entries_of_rows.cumsum().astype(np.float64))
    try:
        entries = extrapolated_entries(
            (shallow.timeline.storages, shallow_parts),
            (timeline.storages, parts),
            target,
            {part: _operators(timeline, of_part) for part, of_part in parts.items()},
            depths,
        )
        whole = whole.with_storages(**columns_of(entries))
        work = _work(shallow, deep, outside, depths)
    except LookupError:
        return None
    inside = np.concatenate([np.arange(r.start, r.stop) for part, (r, _) in target.items() if part[1] >= 0])
    fits = np.array_equal(_changes(whole)[inside], _changes(timeline)[rows[inside]])
    starts = (ends[rows] - entries_of_rows).repeat(entries_of_rows)
    within = np.arange(len(starts)) - (entries_of_rows.cumsum() - entries_of_rows).repeat(entries_of_rows)
    return Step(whole, work.take(starts + within)) if fits else None


def _parts(timeline: Timeline) -> dict[Part, slice]:
    of_module = [int(m[1]) if (m := _LAYER.search(path)) else -1 for path in timeline.modules]
    layer = np.array(of_module)[timeline.module]
    # Each micro-batch has a forward and a backward.
    edges = [0, *(np.flatnonzero(np.diff(timeline.phase)) + 1).tolist(), len(timeline)]
    for start, end in pairwise(edges):
        name = timeline.phases[timeline.phase[start]]
        inside = start + np.flatnonzero(layer[start:end] >= 0)
        if len(inside):
            rows = slice(inside[0], inside[-1] + 1)
            # A row between two layers, where no module is known, goes with that of the smaller number. The
            # layers of a segment that run again, before the backward of its last layer, go with the last.
            order = slice(None, None, 1 if name == "forward" else -1)
            layer[rows] = np.maximum.accumulate(layer[rows][order])[order]
    parts: dict[Part, slice] = {}
    for (phase, of), group in groupby(range(len(timeline)), lambda r: (timeline.phase[r], layer[r])):
        numbers = list(group)
        name = timeline.phases[phase]
        which = sum(key[:2] == (name, of) for key in parts)
        parts[name, int(of), which] = slice(numbers[0], numbers[-1] + 1)
    return parts


def _alike_outside(
    shallow: Timeline, shallow_parts: Parts, deep: Timeline, parts: Parts
) -> list[tuple[slice, slice]] | None:
    """Return the rows of the deeper and of the shallower step that are outside the layers, part by part.

    None if the same operators did not make them.
    """
    pairs = {part: (rows, shallow_parts.get(part)) for part, rows in parts.items() if part[1] < 0}
    alike = []
    for rows, others in pairs.values():
        if others is None or _operators(deep, rows) != _operators(shallow, others):
            return None
        alike.append((rows, others))
    return alike if len(alike) == sum(layer < 0 for _, layer, _ in shallow_parts) else None


def _repeats(deep: Timeline, parts: Parts, repeated: range) -> bool:
    """Return whether the layer after those that are repeated has the rows of the first of them."""
    changes = _changes(deep)
    for (phase, layer, which), rows in parts.items():
        if layer == repeated.start:
            others = parts.get((phase, repeated.stop, which), slice(0))
            if _operators(deep, rows) != _operators(deep, others):
                return False
            if not np.array_equal(changes[rows], changes[others]):
                return False
    return True


def _operators(timeline: Timeline, rows: slice) -> list[str]:
    return [timeline.ops[i].name for i in timeline.op[rows]]


def _repeated(parts: Parts, depths: Depths) -> tuple[dict[Part, Repeat], Integers, Integers]:
    """Return the parts of the whole step; the row of the deeper step that each row repeats; and its shift.

    The shift of a row is what is added to the number of its layer.
    """
    target: dict[Part, Repeat] = {}
    rows: list[Integers] = []
    shifts: list[Integers] = []
    length = 0
    for _, group in groupby(parts, lambda part: part[1] in depths.repeated or part):
        unit = list(group)
        copies = depths.shifts(unit[0][1])
        for shift in copies if unit[0][0] == "forward" else reversed(copies):
            for phase, layer, which in unit:
                walked = parts[phase, layer, which]
                rows.append(np.arange(walked.start, walked.stop))
                shifts.append(np.full(len(rows[-1]), shift))
                after = slice(length, length + len(rows[-1]))
                target[phase, layer + shift, which] = Repeat(after, (phase, layer, which))
                length += len(rows[-1])
    return target, np.concatenate(rows), np.concatenate(shifts)


def _renumbered(
    deep: Timeline, rows: Integers, shifts: Integers, seconds: npt.NDArray[np.float64]
) -> Timeline:
    """Return these rows of the deeper step, at these seconds, in the modules of their layers."""
    modules: dict[str, int] = {}

    def renamed(module: int, shift: int) -> int:
        path = _LAYER.sub(lambda m: f"model.layers.{int(m[1]) + shift}", deep.modules[module])
        return modules.setdefault(path, len(modules))

    pairs, which = np.unique(np.stack((deep.module[rows], shifts)), axis=1, return_inverse=True)
    module = np.array([renamed(*pair) for pair in pairs.T.tolist()])[which.ravel()]
    return replace(deep.take(rows), seconds=seconds, module=module, modules=tuple(modules))


def _changes(timeline: Timeline) -> Integers:
    """Return how each row changes the bytes of each category, and how many storages it reads and writes."""
    held = np.column_stack((timeline.device[:, :OTHER], timeline.host))
    moved = np.zeros((len(timeline), 2), dtype=np.int64)
    np.add.at(moved, (timeline.storages.moves[:, 1], timeline.storages.moves[:, 2]), 1)
    return np.hstack((np.diff(held, axis=0, prepend=0), moved))


def _work(shallow: Step, deep: Step, outside: list[tuple[slice, slice]], depths: Depths) -> Work:
    """Return the work of the deeper step, with that outside the layers as it is in the whole step.

    Raises:
        LookupError: Outside the layers, the two steps have different kinds of work.
    """
    flops, nbytes = deep.work.flops.copy(), deep.work.nbytes.copy()
    for of_deep, of_shallow in outside:
        more, less = _entries(deep, of_deep), _entries(shallow, of_shallow)
        ours, theirs = deep.work.take(more), shallow.work.take(less)
        if not (np.array_equal(ours.kind, theirs.kind) and np.array_equal(ours.other, theirs.other)):
            raise LookupError(of_deep)
        flops[more] += depths.growth * (ours.flops - theirs.flops)
        nbytes[more] += depths.growth * (ours.nbytes - theirs.nbytes)
    return replace(deep.work, flops=np.rint(flops), nbytes=np.rint(nbytes))


def _entries(step: Step, rows: slice) -> slice:
    """Return the entries of work of these rows."""
    ends = step.timeline.seconds
    return slice(int(ends[rows.start - 1]) if rows.start else 0, int(ends[rows.stop - 1]))
