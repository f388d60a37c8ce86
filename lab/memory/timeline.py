"""The one result type of every verb: bytes over time, by category, with the op at each point."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "other")
"""What holds device bytes, in stacking order. *activations* outlive the module that made them."""


@dataclass(frozen=True)
class Op:
    """An operator and the shapes of its tensor inputs: ``Op("aten.mm", "40x48 48x96")``."""

    name: str
    shapes: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.shapes}".rstrip()


@dataclass(frozen=True)
class Moment:
    """One instant of a step, in full: what ran, where, and who held what.

    ``device`` and ``host`` are bytes of this rank; ``by_category`` splits ``device``.
    """

    seconds: float
    device: int
    host: int
    by_category: dict[str, int]
    op: str
    shapes: str
    module: str
    phase: str
    step: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """Bytes of one rank over time; one row per operator that changed them, n rows.

    ``seconds`` [n]; ``device`` [n, len(CATEGORIES)] and ``host`` [n] in bytes; ``phase``, ``module``, ``op``
    [n] are indices into the tables ``phases``, ``modules``, ``ops``; ``step`` [n] counts training steps
    from 0.
    """

    seconds: npt.NDArray[np.float64]
    device: npt.NDArray[np.int64]
    host: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    module: npt.NDArray[np.int64]
    op: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    phases: tuple[str, ...]
    modules: tuple[str, ...]
    ops: tuple[Op, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """Device bytes at each point, all categories together [n]."""
        return np.asarray(self.device.sum(axis=1), dtype=np.int64)

    @property
    def device_peak(self) -> int:
        """The most device bytes held at once."""
        return int(self.total.max(initial=0))

    @property
    def host_peak(self) -> int:
        """The most host bytes held at once."""
        return int(self.host.max(initial=0))

    @property
    def peak(self) -> Moment:
        """The instant at which the device held the most: its op names the next technique."""
        return self.moment(int(self.total.argmax()))

    def moment(self, row: int) -> Moment:
        """Everything known of one row."""
        op = self.ops[self.op[row]]
        return Moment(
            seconds=float(self.seconds[row]),
            device=int(self.device[row].sum()),
            host=int(self.host[row]),
            by_category={c: int(b) for c, b in zip(CATEGORIES, self.device[row], strict=True)},
            op=op.name,
            shapes=op.shapes,
            module=self.modules[self.module[row]],
            phase=self.phases[self.phase[row]],
            step=int(self.step[row]),
        )

    def at(self, seconds: float) -> Moment:
        """What was held at this time: the last point at or before it."""
        return self.moment(max(int(np.searchsorted(self.seconds, seconds, side="right")) - 1, 0))

    def spans(self) -> Iterator[tuple[str, int, float, float]]:
        """Yield ``(phase, step, start, end)`` in seconds, in order: the bands behind a drawn timeline."""
        if not len(self):
            return
        edges = np.flatnonzero((np.diff(self.phase) != 0) | (np.diff(self.step) != 0)) + 1
        starts = [0, *edges.tolist()]
        ends = [*edges.tolist(), len(self) - 1]
        for start, end in zip(starts, ends, strict=True):
            yield (
                self.phases[self.phase[start]],
                int(self.step[start]),
                float(self.seconds[start]),
                float(self.seconds[end]),
            )

    @classmethod
    def joined(cls, pieces: Sequence[Timeline]) -> Timeline:
        """One timeline of consecutive pieces, at least one, as ``TimelineBuilder.since`` handed them out."""
        last = pieces[-1]  # which knows all names of those before it
        columns = [np.concatenate([getattr(piece, name) for piece in pieces]) for name in _COLUMNS]
        return _from_columns(columns, last.phases, last.modules, last.ops)

    def rows(self, keep: npt.ArrayLike) -> Timeline:
        """Only these rows (a slice's indices or a mask), with the tables as they are."""
        index = np.asarray(keep)
        return _from_columns(
            [getattr(self, name)[index] for name in _COLUMNS], self.phases, self.modules, self.ops
        )

    def to_json(self) -> dict[str, Any]:
        """Plain lists and strings, for a file or a message."""
        return {
            **{name: getattr(self, name).tolist() for name in _COLUMNS},
            "phases": list(self.phases),
            "modules": list(self.modules),
            "ops": [asdict(op) for op in self.ops],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any] | str) -> Timeline:
        """Read what ``to_json`` wrote, as a dict or as its text."""
        d = json.loads(document) if isinstance(document, str) else document
        columns = [d[name] for name in _COLUMNS]
        return _from_columns(columns, d["phases"], d["modules"], (Op(**op) for op in d["ops"]))


_COLUMNS = ("seconds", "device", "host", "phase", "module", "op", "step")


def _from_columns(
    columns: Sequence[Any], phases: Iterable[str], modules: Iterable[str], ops: Iterable[Op]
) -> Timeline:
    arrays: dict[str, Any] = {
        name: np.asarray(column, dtype=np.float64 if name == "seconds" else np.int64)
        for name, column in zip(_COLUMNS, columns, strict=True)
    }
    arrays["device"] = arrays["device"].reshape(-1, len(CATEGORIES))
    return Timeline(**arrays, phases=tuple(phases), modules=tuple(modules), ops=tuple(ops))


class TimelineBuilder:
    """Grows a timeline row by row; ``since`` hands out what came after a row, for live drawing."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, tuple[int, ...], int, int, int, int, int]] = []
        self._tables: tuple[dict[Any, int], dict[Any, int], dict[Any, int]] = ({}, {}, {})

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        seconds: float,
        device: Sequence[int],
        host: int,
        *,
        phase: str,
        module: str,
        op: Op,
        step: int,
    ) -> None:
        """Append one row: device bytes by category, host bytes, and where they were seen."""
        phases, modules, ops = self._tables
        self._rows.append(
            (
                seconds,
                tuple(device),
                host,
                phases.setdefault(phase, len(phases)),
                modules.setdefault(module, len(modules)),
                ops.setdefault(op, len(ops)),
                step,
            )
        )

    def since(self, row: int = 0) -> Timeline:
        """The rows from ``row`` on, as a timeline of their own."""
        columns = list(zip(*self._rows[row:], strict=True)) or [()] * len(_COLUMNS)
        return _from_columns(columns, *self._tables)
