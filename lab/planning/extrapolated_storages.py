"""From the storages of a model's first layers to those of all of them.

A storage is held from one place of the step to another. A place is a row of a part: of a layer in a phase, or
of what is outside the layers. A storage of a layer that is repeated is made and freed again in each layer
that repeats it. Storages outside the layers have, with each layer, as many more entries as the deeper step
has more than the shallower; an operator on all parameters makes one of each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from lab.memory.holders import LAYER
from lab.memory.storages import Entry, Move, Storages, TensorKind

Part = tuple[str, int, int]
"""The phase, the layer (-1 for none), and how many such parts came before."""

Parts = Mapping[Part, slice]
"""The rows of each part, in order."""


@dataclass(frozen=True)
class Depths:
    """How many layers the steps have.

    Attributes:
        shallow: Those of the shallower step.
        deep: Those of the deeper step.
        whole: Those of the whole step.
        repeated: The layers of the deeper step that stand for all between the first and the last ones. Their
            number divides ``whole - deep``.
    """

    shallow: int
    deep: int
    whole: int
    repeated: range

    def shifts(self, layer: int) -> range:
        """Return what is added to the number of a layer of the deeper step, for each layer that repeats it.

        Outside the layers, where ``layer`` is -1, it is 0.
        """
        more = self.whole - self.deep
        if layer in self.repeated:
            return range(0, more + 1, len(self.repeated))
        return range(more, more + 1) if layer >= self.repeated.stop else range(1)

    @property
    def growth(self) -> float:
        """What the whole step has more than the deeper, over what the deeper has more than the shallower."""
        return (self.whole - self.deep) / (self.deep - self.shallow)

    def grown(self, deep: Any, shallow: Any) -> Any:
        """Return the value in the whole step of what grows by one amount a layer.

        Args:
            deep: Its value in the deeper step, an integer or an array of integers.
            shallow: That in the shallower step.

        Raises:
            LookupError: The amount is no integer.
        """
        amount, remainder = divmod((deep - shallow) * (self.whole - self.deep), self.deep - self.shallow)
        if np.any(remainder):
            raise LookupError(deep, shallow)
        return deep + amount


class Repeat(NamedTuple):
    """The rows of a part of the whole step, and the part of the deeper step that they repeat."""

    rows: slice
    part: Part


class Place(NamedTuple):
    """A row, counted from the first row of its part; ``part`` is None behind the last row of all."""

    part: Part | None
    offset: int

    @property
    def layer(self) -> int:
        """The layer of its part; -1 for none."""
        return -1 if self.part is None else self.part[1]


class Span(NamedTuple):
    """The places at which a storage is made, freed and moved; of a move, also whether it writes."""

    made: Place
    freed: Place
    moves: tuple[tuple[Place, bool], ...]

    @property
    def layer(self) -> int:
        """The layer in which the storage is first made, freed or moved; -1 outside the layers."""
        if self.made.layer >= 0:
            return self.made.layer
        places = (self.freed, *(place for place, _ in self.moves))
        return next((place.layer for place in places if place.layer >= 0), -1)


def extrapolated_entries(
    shallow: tuple[Storages, Parts],
    deep: tuple[Storages, Parts],
    target: Mapping[Part, Repeat],
    operators: Mapping[Part, list[str]],
    depths: Depths,
) -> Iterator[Entry]:
    """Yield the entries of the whole step.

    Args:
        shallow: The storages of the shallower step, and its parts.
        deep: Those of the deeper step.
        target: The parts of the whole step, in which layers are numbered as in the whole model.
        operators: The operators of the rows of each part of the deeper step.
        depths: The layers of the three steps.

    Raises:
        LookupError: The two steps do not determine the entries of the whole.
    """
    end: int = max(repeat.rows.stop for repeat in target.values())
    aligned = cache(lambda part, other: _aligned(operators[part], operators[other]))

    @cache
    def repeats_of(part: Part, shifts: range) -> list[tuple[int, Part]]:
        phase, layer, which = part
        repeats = (target[phase, layer + shift if layer >= 0 else layer, which] for shift in shifts)
        return [(rows.start, repeated) for rows, repeated in repeats]

    def rows_of(place: Place, shifts: range) -> list[int]:
        part, offset = place
        if part is None:
            return [end] * len(shifts)
        return [
            start + (offset if other == part else aligned(part, other)[offset])
            for start, other in repeats_of(part, shifts)
        ]

    def placed(entry: Entry, span: Span, shifts: range) -> Iterator[Entry]:
        size, category, kind = entry[2:5]
        numbered = LAYER.search(kind.name)
        places = (span.made, span.freed, *(place for place, _ in span.moves))
        rows = zip(*(rows_of(place, shifts) for place in places), strict=True)
        for shift, (first, last, *moved) in zip(shifts, rows, strict=True):
            of_layer = kind._replace(name=_renamed(kind.name, shift)) if numbered else kind
            moves = tuple(Move(row, written) for row, (_, written) in zip(moved, span.moves, strict=True))
            yield Entry(first, last, size, category, of_layer, moves)

    spans = list(_spans(*deep))
    outside_shallow, outside_deep = _outside(_spans(*shallow)), _outside(spans)
    for span, entries in outside_deep.items():
        for entry in _grown(entries, outside_shallow.pop(span, []), depths):
            yield from placed(entry, span, range(1))
    if outside_shallow:
        raise LookupError(outside_shallow)
    for span, entry in spans:
        layer = span.layer
        if layer >= 0:
            yield from placed(entry, span, depths.shifts(layer))


def _aligned(operators: list[str], others: list[str]) -> dict[int, int]:
    """Return the row among others of each row of a part, for the first rows and the last ones that are alike.

    The first layers of a step, and the last ones, prefetch less than the others.
    """
    fewer, more = min(len(operators), len(others)), len(others) - len(operators)
    before = next((i for i in range(fewer) if operators[i] != others[i]), fewer)
    after = next((i for i in range(fewer - before) if operators[-1 - i] != others[-1 - i]), fewer - before)
    last = range(len(operators) - after, len(operators))
    return {i: i for i in range(before)} | {i: i + more for i in last}


def _spans(storages: Storages, parts: Parts) -> Iterator[tuple[Span, Entry]]:
    """Yield each entry, without its moves, and its places."""
    names = list(parts)
    starts = [part.start for part in parts.values()]
    rows = max(part.stop for part in parts.values())

    @cache
    def place(row: int) -> Place:
        if row == rows:
            return Place(None, 0)
        index = bisect_right(starts, row) - 1
        return Place(names[index], row - starts[index])

    columns = (storages.first, storages.end, storages.size, storages.category, storages.kind)
    moves: dict[int, tuple[tuple[Place, bool], ...]] = {}
    for index, row, written in storages.moves.tolist():
        moves[index] = (*moves.get(index, ()), (place(row), bool(written)))
    for index, (first, end, size, category, kind) in enumerate(np.stack(columns, axis=1).tolist()):
        span = Span(place(first), place(end), moves.get(index, ()))
        yield span, Entry(first, end, size, category, storages.kinds[kind])


def _outside(spans: Iterable[tuple[Span, Entry]]) -> dict[Span, list[Entry]]:
    """Return the entries that are at no layer, by their places."""
    outside: dict[Span, list[Entry]] = defaultdict(list)
    for span, entry in spans:
        if span.layer < 0:
            outside[span].append(entry)
    return outside


def _grown(deep: list[Entry], shallow: list[Entry], depths: Depths) -> Iterator[Entry]:
    """Yield what two lists between the same places become in the whole step.

    Raises:
        LookupError: They do not differ by as many entries, or by as many elements, for each layer.
    """
    if len(deep) == len(shallow):
        for more, less in zip(deep, shallow, strict=True):
            yield _longer(more, less, depths)
        return
    groups: dict[tuple[int, int, TensorKind], tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
    for which, entries in enumerate((deep, shallow)):
        for entry in entries:
            name = LAYER.sub("*", entry.kind.name)
            groups[entry.size, entry.category, entry.kind._replace(name=name)][which].append(entry)
    for more_entries, less_entries in groups.values():
        yield from more_entries
        whole = depths.grown(len(more_entries), len(less_entries))
        # One of each that is added is named after the last layer, or none has the number of a layer.
        last = [e for e in more_entries if LAYER.findall(e.kind.name) in ([], [str(depths.deep - 1)])]
        added, layers = whole - len(more_entries), depths.whole - depths.deep
        if added < 0 or (added and len(last) < added // layers):
            raise LookupError(more_entries)
        for shift in range(1, layers + 1):
            for entry in last[: added // layers]:
                yield entry._replace(kind=entry.kind._replace(name=_renamed(entry.kind.name, shift)))


def _longer(deep: Entry, shallow: Entry, depths: Depths) -> Entry:
    """Return a tensor that may have some elements for each layer, as it is in the whole step."""
    kind = deep.kind
    if deep.category != shallow.category or kind._replace(shape=shallow.kind.shape) != shallow.kind:
        raise LookupError(deep)
    if kind.shape == shallow.kind.shape and deep.size == shallow.size:
        return deep
    if len(kind.shape) != len(shallow.kind.shape):
        raise LookupError(deep)

    def size_of(shape: tuple[int, ...]) -> int:
        return prod(shape) * int(getattr(torch, kind.dtype).itemsize)

    shape = tuple(depths.grown(d, s) for d, s in zip(kind.shape, shallow.kind.shape, strict=True))
    if (deep.size, shallow.size) != (size_of(kind.shape), size_of(shallow.kind.shape)):
        raise LookupError(deep)
    return deep._replace(size=size_of(shape), kind=kind._replace(shape=shape))


def _renamed(name: str, shift: int) -> str:
    return LAYER.sub(lambda match: str(int(match[0]) + shift), name)
