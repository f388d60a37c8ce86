"""From the steps of a model's first 5 and first 6 layers to the step of all of them, row by row, to the byte.

What is held at a row of a layer grows by one amount with each layer before it (their kept inputs), and by
another with each layer after it (in backward their gradients): it is ``a + b*before + c*after``. Two depths
give b and c, for layer 2 of the shallower step and layer 3 of the deeper have the same layers after them,
and layer 3 of both the same before. The first three layers and the last two stay as they were walked, for
prefetching begins and ends there. Everything outside the layers grows by one amount a layer.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from lab.memory.categories import CATEGORIES, HOST, OTHER
from lab.memory.storages import Rows, storages_of
from lab.memory.timeline import Timeline
from lab.planning.extrapolated_storages import Part, extrapolated_entries

SHALLOW, DEEP = 5, 6
"""The depths that are walked."""

MIDDLE = 3
"""The layer of the deeper step that stands for all between: the first with all its kind around it."""

_LAYER = re.compile(r"\bmodel\.layers\.(\d+)")


def extrapolate(shallow: Timeline, deep: Timeline, layers: int) -> Timeline | None:
    """Return the timeline of ``layers`` layers, more than 6.

    The storages are extrapolated apart, and must add up to the bytes of every row.

    Returns:
        None if the two differ in a row's operator, or where the storages do not add up.
    """
    extra = layers - DEEP
    shallow_parts, values, shallow_values = _parts(shallow), _values(deep), _values(shallow)
    rows: list[npt.NDArray[np.int64]] = []
    columns: list[npt.NDArray[np.float64]] = []
    shifts: list[int] = []
    target: dict[Part, slice] = {}
    deep_parts, length = _parts(deep), 0
    for (phase, layer, which), part in deep_parts.items():
        # The same rows of the shallower step, with one layer fewer after them, or one layer fewer before.
        fewer_after = shallow_parts.get((phase, layer - (layer > MIDDLE), which))
        fewer_before = shallow_parts.get((phase, layer - (layer >= MIDDLE), which))
        if not (_alike(shallow, fewer_after, deep, part) and _alike(shallow, fewer_before, deep, part)):
            return None
        after = values[part] - shallow_values[fewer_after]
        before = values[part] - shallow_values[fewer_before]
        copies = range(extra + 1) if layer == MIDDLE else [extra if layer > MIDDLE else 0]
        for copy in copies if phase == "forward" else reversed(copies):
            rows.append(np.arange(part.start, part.stop))
            columns.append(values[part] + copy * before + (extra - copy) * after)
            shifts.append(copy)
            begin, length = length, length + part.stop - part.start
            target[phase, layer + copy, which] = slice(begin, length)
    whole = _assembled(deep, rows, columns, shifts)
    try:
        entries = extrapolated_entries(
            (shallow.storages, shallow_parts), (deep.storages, deep_parts), target, MIDDLE, extra
        )
        storages = storages_of(entries, Rows(whole.seconds, whole.module, whole.phase, whole.step))
    except LookupError:
        return None
    held = storages.bytes_of(len(whole), HOST + 1)
    adds_up = (held[:, :OTHER] == whole.device[:, :OTHER]).all() and (held[:, HOST] == whole.host).all()
    return replace(whole, storages=storages) if adds_up else None


def _parts(timeline: Timeline) -> dict[Part, slice]:
    of_module = [int(m[1]) if (m := _LAYER.search(path)) else -1 for path in timeline.modules]
    layer = np.array(of_module)[timeline.module]
    for phase in range(len(timeline.phases)):
        inside = np.flatnonzero((timeline.phase == phase) & (layer >= 0))
        # What runs between two layers, or where no module is known, goes with the layer before it.
        for row in range(inside[0], inside[-1]) if len(inside) else ():
            if layer[row + 1] < 0:
                layer[row + 1] = layer[row]
    parts: dict[Part, slice] = {}
    for (phase, of), group in groupby(range(len(timeline)), lambda r: (timeline.phase[r], layer[r])):
        rows = list(group)
        name = timeline.phases[phase]
        which = sum(key[:2] == (name, of) for key in parts)
        parts[name, int(of), which] = slice(rows[0], rows[-1] + 1)
    return parts


def _values(timeline: Timeline) -> npt.NDArray[np.float64]:
    """What is extrapolated, by row: seconds since the row before, device bytes by category, host bytes."""
    return np.column_stack((np.diff(timeline.seconds, prepend=0.0), timeline.device, timeline.host))


def _alike(shallow: Timeline, rows: slice | None, deep: Timeline, part: slice) -> bool:
    """Whether the same operators made the rows."""
    if rows is None:
        return False
    return [shallow.ops[i].name for i in shallow.op[rows]] == [deep.ops[i].name for i in deep.op[part]]


def _assembled(
    deep: Timeline,
    rows: list[npt.NDArray[np.int64]],
    values: list[npt.NDArray[np.float64]],
    shifts: list[int],
) -> Timeline:
    modules: dict[str, int] = {}

    def renamed(module: int, shift: int) -> int:
        path = _LAYER.sub(lambda m: f"model.layers.{int(m[1]) + shift}", deep.modules[module])
        return modules.setdefault(path, len(modules))

    columns = np.concatenate(values)
    return replace(
        deep.take(np.concatenate(rows)),
        seconds=columns[:, 0].cumsum(),
        device=columns[:, 1 : 1 + len(CATEGORIES)].astype(np.int64),
        host=columns[:, -1].astype(np.int64),
        module=np.array([renamed(m, s) for r, s in zip(rows, shifts, strict=True) for m in deep.module[r]]),
        modules=tuple(modules),
    )
