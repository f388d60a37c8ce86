"""Selecting the rows of a timeline that a picture of some width can show."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.float64]
"""Positions of rows on the horizontal axis [n], ascending."""

Rows = npt.NDArray[np.int64]
"""Indices of rows, or an integer for each row [n]."""


def thin_rows(at: Positions, size: Rows, columns: int) -> Rows:
    """Select at most two rows of each of ``columns`` equal intervals of the axis.

    They are the highest row and the last row, whose bytes stay until the next interval. So the peak is drawn,
    and every level that lasts longer than an interval.

    Args:
        at: The position of each row on the axis [n].
        size: The bytes of each row [n].
        columns: The number of intervals.

    Returns:
        The indices of the rows to draw.
    """
    highest, last = _highest_and_last(at, size, columns)
    return np.unique(np.concatenate((highest, last)))


def widen_peaks(at: Positions, size: Rows, columns: int) -> tuple[Positions, Rows]:
    """Select rows as ``thin_rows`` does, and move them so that each highest row is an interval wide.

    A short peak would otherwise be thinner than a pixel, and invisible.

    Returns:
        The positions and the indices of the rows to draw.
    """
    if not len(at):
        return at, np.arange(0)
    highest, last = _highest_and_last(at, size, columns)
    rows = np.unique(np.concatenate((highest, last)))
    until = np.where(np.isin(rows, highest), at[rows] + (at[-1] - at[0]) / columns, at[0])
    earliest = np.concatenate((at[:1], np.maximum.accumulate(until)[:-1]))
    return np.minimum(np.maximum(at[rows], earliest), at[-1]), rows


def _highest_and_last(at: Positions, size: Rows, columns: int) -> tuple[Rows, Rows]:
    """Return the indices of the highest and of the last row of each interval that has rows."""
    if not len(at):
        return np.arange(0), np.arange(0)
    width = (at[-1] - at[0]) / columns or 1.0
    column = np.minimum((at - at[0]) / width, columns - 1).astype(np.int64)
    last = np.append(np.flatnonzero(np.diff(column)), len(at) - 1)
    # Sorted by interval, then by bytes; of equal rows the first is at the end.
    order = np.lexsort((-np.arange(len(at)), size, column))
    return order[last], last
