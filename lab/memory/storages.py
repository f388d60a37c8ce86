"""The storages whose bytes a timeline adds up: which tensor holds bytes, from when to when."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lab.memory.categories import MEMORIES

Integers = npt.NDArray[np.int64]


class TensorKind(NamedTuple):
    """What is said of a storage: the first tensor that was seen on it.

    Attributes:
        shape: Its shape.
        dtype: Its dtype, ``"float32"``.
        op: The name of the operator that made the storage; of one that was resized, before it was resized.
        name: The name of the parameter that it is, or whose gradient or optimizer state it is; else empty.
    """

    shape: tuple[int, ...]
    dtype: str
    op: str
    name: str


class Move(NamedTuple):
    """A row at which a collective, or a copy from or to the host, moves bytes of a storage.

    Attributes:
        row: The row of the operator.
        written: Whether the operator writes the storage; otherwise it reads it.
    """

    row: int
    written: bool


@dataclass(frozen=True, eq=False)
class Storages:
    """The storages of one rank: m entries, one for each stretch of rows in which a storage has one size.

    The sum of the sizes of a category's entries that are held at a row is the timeline's value there, but for
    the category *other*, whose bytes no tensor holds. On CUDA it is larger where the allocator holds less
    than the tensors take.

    Attributes:
        first: The first row at which the storage is held [m].
        end: The first row at which it is no longer held; the number of rows if it is never freed [m].
        size: Bytes [m].
        category: Indices into ``CATEGORIES``; ``HOST`` for host memory [m].
        kind: Indices into ``kinds`` [m].
        module: Indices into the timeline's ``modules``: the module that ran when it was made [m].
        phase: Indices into the timeline's ``phases`` [m].
        step: Training steps, counted from 0 [m].
        made: Seconds on the timeline's clock [m].
        freed: The same; infinite if it is never freed [m].
        kinds: The tensors.
        moves: Of each move of an entry: the entry, the row, and 1 if the row's operator writes the storage,
            0 if it reads it [k, 3].
    """

    first: Integers
    end: Integers
    size: Integers
    category: Integers
    kind: Integers
    module: Integers
    phase: Integers
    step: Integers
    made: npt.NDArray[np.float64]
    freed: npt.NDArray[np.float64]
    kinds: tuple[TensorKind, ...]
    moves: Integers

    def __len__(self) -> int:
        return len(self.first)

    def held_at(self, row: int) -> Integers:
        """Return the indices of the entries that are held at a row."""
        return np.flatnonzero((self.first <= row) & (row < self.end))

    def bytes_of(self, rows: int) -> Integers:
        """Return the bytes that are held at each of ``rows`` rows, by category [rows, len(MEMORIES)]."""
        changes = np.zeros((rows + 1, len(MEMORIES)), dtype=np.int64)
        np.add.at(changes, (self.first, self.category), self.size)
        np.subtract.at(changes, (self.end, self.category), self.size)
        return np.asarray(changes.cumsum(axis=0)[:rows])

    def at_rows(self, kept: Integers) -> Storages:
        """Return the entries for a timeline that has only these rows, which are given in order."""
        first, end = np.searchsorted(kept, self.first), np.searchsorted(kept, self.end)
        held = first < end
        columns = {name: getattr(self, name) for name in COLUMNS} | {"first": first, "end": end}
        moves = self.moves[np.isin(self.moves[:, 1], kept) & held[self.moves[:, 0]]]
        moves[:, 0] = (held.cumsum() - 1)[moves[:, 0]]
        moves[:, 1] = np.searchsorted(kept, moves[:, 1])
        return Storages(**{n: c[held] for n, c in columns.items()}, kinds=self.kinds, moves=moves)

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the arrays as a compressed ``npz`` in base64, and the kinds as lists."""
        file = io.BytesIO()
        # numpy's stubs take any further keyword for the flag that allows pickles.
        np.savez_compressed(file, **{name: getattr(self, name) for name in (*COLUMNS, "moves")})
        return {
            "columns": base64.b64encode(file.getvalue()).decode(),
            "kinds": [[list(kind.shape), *kind[1:]] for kind in self.kinds],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Storages:
        """Return the storages of what ``to_json`` returned."""
        with np.load(io.BytesIO(base64.b64decode(document["columns"])), allow_pickle=False) as columns:
            kinds = tuple(TensorKind(tuple(shape), *texts) for shape, *texts in document["kinds"])
            return cls(**{name: columns[name] for name in (*COLUMNS, "moves")}, kinds=kinds)


COLUMNS = tuple(field.name for field in fields(Storages) if field.name not in ("kinds", "moves"))
"""The columns with a number for each entry."""

NO_STORAGES = Storages(
    **{name: np.zeros(0, np.float64 if name in ("made", "freed") else np.int64) for name in COLUMNS},  # type: ignore[arg-type]
    kinds=(),
    moves=np.zeros((0, 3), np.int64),
)
"""Those of a timeline that recorded none."""


class Entry(NamedTuple):
    """A storage of one size, in the rows ``first`` to ``end - 1``."""

    first: int
    end: int
    size: int
    category: int
    kind: TensorKind
    moves: tuple[Move, ...] = ()


def columns_of(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return the columns of storages that these entries give; see ``Timeline.with_storages``."""
    kinds: dict[TensorKind, int] = {}
    table, moves = [], []
    for number, e in enumerate(entries):
        table.append((e.first, e.end, e.size, e.category, kinds.setdefault(e.kind, len(kinds))))
        moves += [(number, *move) for move in e.moves]
    columns = np.array(table, dtype=np.int64).reshape(-1, 5).T
    return dict(zip(("first", "end", "size", "category", "kind"), columns, strict=True)) | {
        "kinds": tuple(kinds),
        "moves": np.array(moves, dtype=np.int64).reshape(-1, 3),
    }
