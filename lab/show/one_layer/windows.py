"""Which rows of a timeline are those of one layer, and which storages belong to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.errors import ResultError
from lab.memory.categories import CATEGORIES
from lab.memory.holders import LAYER
from lab.memory.storages import Integers, TensorKind
from lab.memory.timeline import Timeline

MODEL_STATE = tuple(CATEGORIES.index(name) for name in ("parameters", "gradients", "optimizer"))
"""The categories of the model's state."""


@dataclass(frozen=True, eq=False)
class Window:
    """The rows of one layer in the last step of a timeline.

    Attributes:
        timeline: The timeline.
        layer: The number of the layer.
        forward: The rows from the layer's first to its last in forward.
        backward: The same in backward.
    """

    timeline: Timeline
    layer: int
    forward: range
    backward: range

    @property
    def rows(self) -> list[int]:
        """All rows, in order."""
        return [*self.forward, *self.backward]

    def __contains__(self, row: int) -> bool:
        return row in self.forward or row in self.backward

    def operator(self, row: int) -> str:
        """Return the name of the operator of a row."""
        return self.timeline.ops[int(self.timeline.op[row])].name

    def kind(self, entry: int) -> TensorKind:
        """Return what is said of a storage."""
        return self.timeline.storages.kinds[int(self.timeline.storages.kind[entry])]

    def module(self, entry: int) -> str:
        """Return the path of the module that ran when a storage was made."""
        return self.timeline.modules[int(self.timeline.storages.module[entry])]


def window_of(timeline: Timeline, layer: int | None) -> Window:
    """Return the rows of a layer; without a number, of the layer in the middle.

    Raises:
        ResultError: The timeline has no storages, no such layer, or no backward of it.
    """
    if not len(timeline.storages):
        raise ResultError(
            "there is no layer to show: a run that was stopped, and rows that are sent while it goes on, "
            "recorded no tensors; a run to its end, a plan or a rehearsal has them"
        )
    of_module = [int(match[0]) if (match := LAYER.search(path)) else -1 for path in timeline.modules]
    numbers = np.array(of_module)[timeline.module]
    numbers[timeline.step != timeline.step[-1]] = -1
    known = sorted(set(numbers.tolist()) - {-1})
    if not known:
        raise ResultError("there is no layer to show: no row of the last step is of a decoder layer")
    chosen = known[len(known) // 2] if layer is None else layer
    if chosen not in known:
        raise ResultError(f"layer={layer!r}: this timeline has the layers {known[0]} to {known[-1]}")
    spans = []
    for phase in ("forward", "backward"):
        in_phase = np.array([name == phase for name in timeline.phases], dtype=bool)[timeline.phase]
        rows = np.flatnonzero((numbers == chosen) & in_phase)
        if not len(rows):
            raise ResultError(f"layer {chosen} has no {phase}: the last step of this timeline did not end")
        spans.append(range(int(rows[0]), int(rows[-1]) + 1))
    return Window(timeline, chosen, *spans)


def members_of(window: Window) -> Integers:
    """Return the entries that belong to the layer: those that are made, freed or moved in its rows.

    What is held before and after it, as the state of the model and what other layers keep, does not belong to
    it.
    """
    storages = window.timeline.storages
    inside = np.zeros(int(storages.end.max(initial=0)) + 2, dtype=bool)
    inside[window.rows] = True
    # A tensor whose last user is the window's last row is freed at the row after it.
    freed = inside.copy()
    freed[[window.forward.stop, window.backward.stop]] = True
    moved = storages.moves[inside[storages.moves[:, 1]], 0]
    belongs = inside[storages.first] | freed[storages.end]
    belongs[moved] = True
    # Sharded parameters and their gradients are held throughout, though a collective may read them.
    throughout = (storages.first < window.forward.start) & (storages.end > window.backward.stop)
    belongs &= ~(throughout & np.isin(storages.category, MODEL_STATE))
    held = [
        (storages.first < span.stop) & (storages.end > span.start)
        for span in (window.forward, window.backward)
    ]
    return np.flatnonzero(belongs & (held[0] | held[1]))
