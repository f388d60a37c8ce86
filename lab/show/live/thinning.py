"""Which rows of a timeline a drawing needs: those that can be told apart at its width."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.float64]
"""Where rows stand on the horizontal axis [n], ascending."""

Rows = npt.NDArray[np.int64]
"""Numbers of rows, or a number for each row [n]."""


def thinned(at: Places, held: Rows, columns: int) -> Rows:
    """Numbers of the rows to draw, at most two for each of ``columns`` equal stretches of the axis.

    ``held`` [n] is each row's bytes. A stretch keeps its highest row and its last, which holds until the next
    stretch: so the peak survives, and every level that lasts longer than a stretch.
    """
    highest, last = _ends(at, held, columns)
    return np.unique(np.concatenate((highest, last)))


def widened(at: Places, held: Rows, columns: int) -> tuple[Places, Rows]:
    """Places and numbers of the thinned rows, each stretch's highest drawn at least one stretch wide.

    What peaks for a moment only would be thinner than a pixel, and not be seen.
    """
    if not len(at):
        return at, np.arange(0)
    highest, last = _ends(at, held, columns)
    rows = np.unique(np.concatenate((highest, last)))
    until = np.where(np.isin(rows, highest), at[rows] + (at[-1] - at[0]) / columns, at[0])
    earliest = np.concatenate((at[:1], np.maximum.accumulate(until)[:-1]))
    return np.minimum(np.maximum(at[rows], earliest), at[-1]), rows


def _ends(at: Places, held: Rows, columns: int) -> tuple[Rows, Rows]:
    """The highest and the last row of each stretch that has rows."""
    if not len(at):
        return np.arange(0), np.arange(0)
    width = (at[-1] - at[0]) / columns or 1.0
    column = np.minimum((at - at[0]) / width, columns - 1).astype(np.int64)
    last = np.append(np.flatnonzero(np.diff(column)), len(at) - 1)
    # Sorted by stretch, then by bytes, the first of equals at the end.
    order = np.lexsort((-np.arange(len(at)), held, column))
    return order[last], last
