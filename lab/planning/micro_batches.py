"""From the step of a few micro-batches to that of many: one of the few stands for those that are alike.

The first micro-batch makes the gradients, and each later one adds to them with the operators and the bytes of
the second. What remains of each is its tokens, which are held until the step ends. So the most bytes are held
in the last micro-batch, and those of many micro-batches are known from few: the last one then has the tokens
of all before it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lab.memory.storages import COLUMNS, Integers
from lab.memory.timeline import Timeline
from lab.planning.scaling import Step

WALKED = 4
"""The most micro-batches whose code is run. Of more, the third stands for all but the two first and the last.
"""


def with_micro_batches(few: Step, count: int) -> Step | None:
    """Return the step of ``count`` micro-batches, from that of ``WALKED``.

    The third lasts as long as all that it stands for, and has their work and their tokens.

    Returns:
        The step; None if the third and the last of the few differ in an operator or in their bytes.
    """
    timeline, more = few.timeline, count - WALKED
    *_, third, last = _micro_batches(timeline)
    if not _are_alike(timeline, third, last):
        return None
    storages = timeline.storages
    # What the third made and the optimizer still holds.
    kept = (third.start <= storages.first) & (storages.first < third.stop) & (storages.end > last.stop)
    index = np.concatenate((np.arange(len(storages)), np.repeat(np.flatnonzero(kept), more)))
    columns = {name: getattr(storages, name)[index] for name in COLUMNS}
    work = few.work
    inside = slice(*(int(timeline.seconds[row - 1]) for row in (third.start, third.stop)))
    flops, nbytes = work.flops.copy(), work.nbytes.copy()
    flops[inside] *= 1 + more
    nbytes[inside] *= 1 + more
    held = timeline.with_bytes_of(replace(storages, **columns))
    return Step(held, replace(work, flops=flops, nbytes=nbytes))


def _micro_batches(timeline: Timeline) -> list[slice]:
    """Return the rows of each micro-batch: a forward and a backward."""
    edges = [0, *(np.flatnonzero(np.diff(timeline.phase)) + 1).tolist(), len(timeline)]
    return [slice(*edges[i : i + 3 : 2]) for i in range(0, 2 * WALKED, 2)]


def _are_alike(timeline: Timeline, one: slice, other: slice) -> bool:
    """Return whether two micro-batches have the same operators, and change bytes by the same amounts."""
    held = np.column_stack((timeline.device, timeline.host, timeline.disk))
    changes: Integers = np.diff(held, axis=0, prepend=np.zeros((1, held.shape[1]), np.int64))

    def rows(column: Integers) -> bool:
        return np.array_equal(column[one], column[other])

    return rows(timeline.op) and rows(timeline.module) and rows(changes)
