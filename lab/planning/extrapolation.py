"""From the steps of a model's first 5 and first 6 layers to the step of all of them, row by row, to the byte.

What is held at a row of a layer grows by one amount with each layer before it (their kept inputs), and by
another with each layer after it (in backward their gradients): it is ``a + b*before + c*after``. Two depths
give b and c, for layer 2 of the shallower step and layer 3 of the deeper have the same layers after them,
and layer 3 of both the same before. The first three layers and the last two stay as they were walked, for
there prefetching begins and ends; everything outside the layers grows by one amount a layer.
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


def extended(shallow: Timeline, deep: Timeline, layers: int) -> Timeline | None:
    """The timeline of ``layers`` layers, more than 6; None where the two do not correspond row by row."""
    extra = layers - DEEP
    twins, values, shallow_values = _parts(shallow), _values(deep), _values(shallow)
    rows: list[npt.NDArray[np.int64]] = []
    held: list[npt.NDArray[np.float64]] = []
    shifts: list[int] = []
    for (phase, layer, which), part in _parts(deep).items():
        # Its twin has one layer fewer after it, or before it; the middle layer has one of each kind.
        twin = twins.get((phase, layer - (layer > MIDDLE), which))
        other = twins.get((phase, layer - (layer >= MIDDLE), which))
        if not (_alike(shallow, twin, deep, part) and _alike(shallow, other, deep, part)):
            return None
        after, before = values[part] - shallow_values[twin], values[part] - shallow_values[other]
        copies = range(extra + 1) if layer == MIDDLE else [extra if layer > MIDDLE else 0]
        for copy in copies if phase == "forward" else reversed(copies):
            rows.append(np.arange(part.start, part.stop))
            held.append(values[part] + copy * before + (extra - copy) * after)
            shifts.append(copy)
    return _assembled(deep, rows, held, shifts)


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
    """All that is extended, a row each: seconds since the row before, device by category, host."""
    return np.column_stack((np.diff(timeline.seconds, prepend=0.0), timeline.device, timeline.host))


def _alike(shallow: Timeline, twin: slice | None, deep: Timeline, part: slice) -> bool:
    """Whether the same operators made the rows."""
    if twin is None:
        return False
    return [shallow.ops[i].name for i in shallow.op[twin]] == [deep.ops[i].name for i in deep.op[part]]


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
