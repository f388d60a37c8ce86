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

from lab.memory.timeline import CATEGORIES, Timeline

SHALLOW, DEEP = 5, 6
"""The depths that are walked."""

MIDDLE = 3
"""The layer of the deeper step that stands for all between: the first with all its kind around it."""

_LAYER = re.compile(r"\bmodel\.layers\.(\d+)")


def extrapolate(shallow: Timeline, deep: Timeline, layers: int) -> Timeline | None:
    """Return the timeline of ``layers`` layers, more than 6; None if the two differ in a row's operator."""
    extra = layers - DEEP
    shallow_parts, values, shallow_values = _parts(shallow), _values(deep), _values(shallow)
    rows: list[npt.NDArray[np.int64]] = []
    columns: list[npt.NDArray[np.float64]] = []
    shifts: list[int] = []
    for (phase, layer, which), part in _parts(deep).items():
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
    return _assembled(deep, rows, columns, shifts)


_Parts = dict[tuple[str, int, int], slice]
"""Rows by phase, layer (-1 for none), and how many such parts came before."""


def _parts(timeline: Timeline) -> _Parts:
    of_module = [int(m[1]) if (m := _LAYER.search(path)) else -1 for path in timeline.modules]
    layer = np.array(of_module)[timeline.module]
    for phase in range(len(timeline.phases)):
        inside = np.flatnonzero((timeline.phase == phase) & (layer >= 0))
        # What runs between two layers, or where no module is known, goes with the layer before it.
        for row in range(inside[0], inside[-1]) if len(inside) else ():
            if layer[row + 1] < 0:
                layer[row + 1] = layer[row]
    parts: _Parts = {}
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
        deep.rows(np.concatenate(rows)),
        seconds=columns[:, 0].cumsum(),
        device=columns[:, 1 : 1 + len(CATEGORIES)].astype(np.int64),
        host=columns[:, -1].astype(np.int64),
        module=np.array([renamed(m, s) for r, s in zip(rows, shifts, strict=True) for m in deep.module[r]]),
        modules=tuple(modules),
    )
