"""From the storages of a model's first 5 and first 6 layers to those of all of them.

A storage is held from one place of the step to another. A place is a row of a part: of a layer in a phase, or
of what is outside the layers. A storage that was made in layer 3 of the deeper step is made in every layer
between, and freed as many layers further on. Storages outside the layers have, with each layer, as many more
entries as the deeper step has more than the shallower; an operator on all parameters makes one of each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lab.memory.holders import LAYER
from lab.memory.storages import Entry, Move, Storages, TensorKind

Part = tuple[str, int, int]
"""The phase, the layer (-1 for none), and how many such parts came before."""

Parts = Mapping[Part, slice]
"""The rows of each part, in order."""


class Place(NamedTuple):
    """A row, counted from the first row of its part; ``part`` is None behind the last row of all."""

    part: Part | None
    offset: int


def extrapolated_entries(
    shallow: tuple[Storages, Parts], deep: tuple[Storages, Parts], target: Parts, middle: int, extra: int
) -> Iterator[Entry]:
    """Yield the entries of the whole step.

    Args:
        shallow: The storages of the shallower step, and its parts.
        deep: Those of the deeper step.
        target: The parts of the whole step, in which layers are numbered as in the whole model.
        middle: The layer of the deeper step that stands for all between.
        extra: How many layers more the whole step has than the deeper.

    Raises:
        LookupError: The two steps do not determine the entries of the whole.
    """
    end: int = max(rows.stop for rows in target.values())

    def row_of(place: Place) -> int:
        if place.part is None:
            return end
        rows = target[place.part]
        row: int = rows.start + place.offset
        if row >= rows.stop:
            raise LookupError(place)
        return row

    outside_shallow = _outside(*shallow)
    outside_deep = _outside(*deep)
    for between, entries in outside_deep.items():
        for entry in _grown(entries, outside_shallow.pop(between, []), extra):
            yield entry._replace(first=row_of(between[0]), end=row_of(between[1]))
    if outside_shallow:
        raise LookupError(outside_shallow)

    def moved(place: Place, by: int) -> Place:
        if place.part is None or place.part[1] < 0:
            return place
        phase, layer, which = place.part
        return Place((phase, layer + by, which), place.offset)

    for made, freed, entry, transfers in _entries(*deep):
        layer = _layer(made) if _layer(made) >= 0 else _layer(freed)
        if layer < 0:
            continue
        shifts = range(extra + 1) if layer == middle else [extra if layer > middle else 0]
        for shift in shifts:
            kind = entry.kind._replace(name=_renamed(entry.kind.name, shift))
            first, last = row_of(moved(made, shift)), row_of(moved(freed, shift))
            moves = tuple(Move(row_of(moved(at, shift)), written) for at, written in transfers)
            yield Entry(first, last, entry.size, entry.category, kind, moves)


def _entries(
    storages: Storages, parts: Parts
) -> Iterator[tuple[Place, Place, Entry, list[tuple[Place, bool]]]]:
    """Yield each entry with the places at which it is made and freed, and those of its moves."""
    names = list(parts)
    starts = [part.start for part in parts.values()]
    rows = max(part.stop for part in parts.values())

    def place(row: int) -> Place:
        if row == rows:
            return Place(None, 0)
        index = bisect_right(starts, row) - 1
        return Place(names[index], row - starts[index])

    columns = (storages.first, storages.end, storages.size, storages.category, storages.kind)
    moves: dict[int, list[tuple[Place, bool]]] = defaultdict(list)
    for index, row, written in storages.moves.tolist():
        moves[index].append((place(row), bool(written)))
    for index, (first, end, size, category, kind) in enumerate(np.stack(columns, axis=1).tolist()):
        entry = Entry(first, end, size, category, storages.kinds[kind])
        yield place(first), place(end), entry, moves[index]


def _outside(storages: Storages, parts: Parts) -> dict[tuple[Place, Place], list[Entry]]:
    """The entries that are neither made nor freed in a layer, by the places at which they are.

    Their moves are left out: no layer has them.
    """
    outside: dict[tuple[Place, Place], list[Entry]] = defaultdict(list)
    for made, freed, entry, _ in _entries(storages, parts):
        if _layer(made) < 0 and _layer(freed) < 0:
            outside[made, freed].append(entry)
    return outside


def _grown(deep: list[Entry], shallow: list[Entry], extra: int) -> Iterator[Entry]:
    """Yield what two lists between the same places become with ``extra`` more layers.

    Raises:
        LookupError: The shallower has an entry that the deeper lacks.
    """
    if len(deep) == len(shallow):
        for more, less in zip(deep, shallow, strict=True):
            if more.category != less.category:
                raise LookupError(more)
            kind = more.kind._replace(shape=_longer(more.kind, less.kind, extra))
            yield more._replace(size=more.size + extra * (more.size - less.size), kind=kind)
        return
    # Entries for each layer: those that the deeper step has more are those of its last layer.
    remaining = defaultdict(list)
    for entry in shallow:
        remaining[_identity(entry)].append(entry)
    for entry in deep:
        yield entry
        known = remaining[_identity(entry)]
        if known:
            known.pop()
        else:
            for shift in range(1, extra + 1):
                yield entry._replace(kind=entry.kind._replace(name=_renamed(entry.kind.name, shift)))
    if any(remaining.values()):
        raise LookupError(remaining)


def _identity(entry: Entry) -> tuple[int, int, TensorKind]:
    return entry.size, entry.category, entry.kind


def _longer(deep: TensorKind, shallow: TensorKind, extra: int) -> tuple[int, ...]:
    """The shape of a tensor that has an element for each parameter."""
    if len(deep.shape) != len(shallow.shape):
        raise LookupError(deep)
    return tuple(d + extra * (d - s) for d, s in zip(deep.shape, shallow.shape, strict=True))


def _layer(place: Place) -> int:
    return -1 if place.part is None else place.part[1]


def _renamed(name: str, shift: int) -> str:
    return LAYER.sub(lambda match: str(int(match[0]) + shift), name)
