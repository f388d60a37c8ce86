"""The timeline: bytes over time by category, with the operator at each point. Every verb returns one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.errors import ResultError
from lab.memory.categories import CATEGORIES, DISK, HOST
from lab.memory.holders import Holders, Memory, check_memory, is_inside, of_moment
from lab.memory.storages import NO_STORAGES, Storages
from lab.units import format_bytes, format_operator

TILES = "lab.empty_host"
"""The operator that allocates the host tiles of streamed layers, and nothing else."""


@dataclass(frozen=True)
class Op:
    """An operator and the shapes of its tensor inputs: ``Op("aten.mm", "40x48 48x96")``."""

    name: str
    shapes: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.shapes}".rstrip()


@dataclass(frozen=True)
class Moment:
    """One instant of a step.

    Attributes:
        seconds: The time, on the timeline's clock.
        device: Bytes of this rank on the device.
        host: Bytes of this rank in host memory.
        by_category: The device bytes by category.
        op: The operator that had just run.
        shapes: The shapes of its tensor inputs.
        module: The path of the module that ran it; empty outside every module.
        phase: The phase of the step: forward, backward or optimizer.
        step: The training step, counted from 0.
        disk: Bytes of this rank in a mapped file on a disk.
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
    disk: int = 0

    def __str__(self) -> str:
        """Return the phase, the operator with the first three shapes, and the module."""
        shapes = self.shapes.split()
        words = [f"{self.phase}:", self.operator, *shapes[:3], *["..."] * (len(shapes) > 3)]
        return " ".join([*words, *(["in", self.module] if self.module else [])])

    @property
    def operator(self) -> str:
        """The name of the operator without its namespace and its device."""
        return format_operator(self.op)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Bytes of one rank over time: n rows, one for each operator that changed the bytes.

    Attributes:
        seconds: The time of each row [n].
        device: Device bytes by category [n, len(CATEGORIES)].
        host: Host bytes [n].
        disk: Bytes in a mapped file [n].
        phase: Indices into ``phases`` [n].
        module: Indices into ``modules`` [n].
        op: Indices into ``ops`` [n].
        step: Training steps, counted from 0 [n].
        phases: The names of phases.
        modules: The paths of modules.
        ops: The operators.
        storages: The storages whose bytes the rows add up; none for rows that are sent while a run goes on.
    """

    seconds: npt.NDArray[np.float64]
    device: npt.NDArray[np.int64]
    host: npt.NDArray[np.int64]
    disk: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    module: npt.NDArray[np.int64]
    op: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    phases: tuple[str, ...]
    modules: tuple[str, ...]
    ops: tuple[Op, ...]
    storages: Storages = NO_STORAGES

    def __len__(self) -> int:
        return len(self.seconds)

    def __repr__(self) -> str:
        peak = f", device peak {format_bytes(self.device_peak)} ({self.peak})" if len(self) else ""
        return f"Timeline of {len(self):,} rows{peak}"

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """Device bytes of all categories together [n]."""
        return np.asarray(self.device.sum(axis=1), dtype=np.int64)

    @property
    def device_peak(self) -> int:
        """The most device bytes that are held at once."""
        return int(self.total.max(initial=0))

    @property
    def host_peak(self) -> int:
        """The most host bytes that are held at once."""
        return int(self.host.max(initial=0))

    @property
    def disk_peak(self) -> int:
        """The most bytes that a mapped file holds at once."""
        return int(self.disk.max(initial=0))

    @property
    def peak(self) -> Moment:
        """The instant at which the device holds the most bytes."""
        return self.moment(int(self.total.argmax()))

    def moment(self, row: int) -> Moment:
        """Return one row as a Moment."""
        op = self.ops[self.op[row]]
        return Moment(
            seconds=float(self.seconds[row]),
            device=int(self.device[row].sum()),
            host=int(self.host[row]),
            disk=int(self.disk[row]),
            by_category={c: int(b) for c, b in zip(CATEGORIES, self.device[row], strict=True)},
            op=op.name,
            shapes=op.shapes,
            module=self.modules[self.module[row]],
            phase=self.phases[self.phase[row]],
            step=int(self.step[row]),
        )

    def at(self, seconds: float) -> Moment:
        """Return the last row at or before this time."""
        return self.moment(max(int(np.searchsorted(self.seconds, seconds, side="right")) - 1, 0))

    def row_at(self, seconds: float) -> int:
        """Return the index of the last row at or before this time.

        Raises:
            ResultError: The time is outside the timeline, or the timeline has no rows.
        """
        self._check_rows()
        start, end = float(self.seconds[0]), float(self.seconds[-1])
        if not start <= seconds <= end:
            raise ResultError(
                f"at={seconds!r} is outside this timeline, which goes from {start:.6g} to {end:.6g} seconds"
            )
        return int(np.searchsorted(self.seconds, seconds, side="right")) - 1

    def holders(self, at: float | str = "peak", *, memory: Memory = "device") -> Holders:
        """Return every tensor that is held at an instant.

        Args:
            at: Seconds; or ``"peak"``, the row at which this memory holds the most; or the name of a phase,
                whose last row is meant, in the last step that has it.
            memory: Which memory: the device's, the host's or the disk's.

        Raises:
            ResultError: There is no such instant or memory, or the timeline has no storages.
        """
        return of_moment(self, self._row(at, memory), memory)

    def end_of(self, phase: str, step: int | None = None) -> Moment:
        """Return the last row of a phase, in the last step that has it or in a given step.

        Raises:
            ResultError: There is no such phase.
        """
        rows = self._where(phase=phase, step=step)
        return self.moment(int(rows[-1]))

    def highest(self, *, module: str | None = None, phase: str | None = None) -> Moment:
        """Return the row at which the device holds the most bytes while a module or a phase runs.

        Args:
            module: The path of a module, for instance ``"model.layers.1.mlp"``; those inside it count too. A
                star stands for any text: ``"*.mlp"`` is the MLP of every layer.
            phase: The name of a phase.

        Raises:
            ResultError: No row is of that module and phase.
        """
        rows = self._where(module=module, phase=phase)
        return self.moment(int(rows[self.total[rows].argmax()]))

    def kept(self, module: str, *, memory: Memory = "device") -> Holders:
        """Return what a module's forward keeps for backward: its tensors at the end of the last forward.

        Args:
            module: The path of a module, for instance ``"model.layers.1"``; those inside it count too.
            memory: Which memory: the device's, the host's or the disk's.

        Raises:
            ResultError: The module has no row in a forward phase, or the timeline has no storages.
        """
        rows = self._where(module=module, phase="forward")
        step = int(self.step[rows[-1]])
        end = int(self._where(phase="forward", step=step)[-1])
        return of_moment(self, end, memory).made_by(module=module, phase="forward", step=step)

    def grown(self, step: int, *, memory: Memory = "device") -> Holders:
        """Return what a step adds to the next: the tensors made in it that are held at its end.

        Args:
            step: The training step, counted from 0.
            memory: Which memory: the device's, the host's or the disk's.

        Raises:
            ResultError: There is no such step, or the timeline has no storages.
        """
        return of_moment(self, int(self._where(step=step)[-1]), memory).made_by(step=step)

    def _check_rows(self) -> None:
        if not len(self):
            raise ResultError("this timeline has no rows: nothing was measured")

    def _row(self, at: float | str, memory: Memory) -> int:
        check_memory(memory)
        if isinstance(at, str) and at == "peak" and len(self):
            return int((self.total if memory == "device" else getattr(self, memory)).argmax())
        return int(self._where(phase=at)[-1]) if isinstance(at, str) else self.row_at(at)

    def _where(
        self, *, module: str | None = None, phase: str | None = None, step: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the rows of a module, of a phase and of a step; None stands for any.

        Raises:
            ResultError: There are none.
        """
        self._check_rows()
        matches = np.ones(len(self), dtype=bool)
        if module is not None:
            inside = [is_inside(path, module) for path in self.modules]
            matches &= np.array(inside, dtype=bool)[self.module]
        if phase is not None:
            matches &= np.array([name == phase for name in self.phases], dtype=bool)[self.phase]
        if step is not None:
            matches &= self.step == step
        rows = np.flatnonzero(matches)
        if not len(rows):
            asked = {"module": module, "phase": phase, "step": step}
            said = " and ".join(f"{name} {value!r}" for name, value in asked.items() if value is not None)
            steps = np.unique(self.step).tolist()
            close = get_close_matches(module or "", self.modules, n=1) if module else []
            raise ResultError(
                f"no row is of {said}; there are the phases {', '.join(self.phases)} and the steps "
                f"{', '.join(map(str, steps))}" + "".join(f", and a module {name!r}" for name in close)
            )
        return rows

    def spans(self) -> Iterator[tuple[str, int, float, float]]:
        """Yield ``(phase, step, start, end)`` of each phase, in order; start and end are in seconds."""
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
    def join(cls, pieces: Sequence[Timeline]) -> Timeline:
        """Return one timeline of consecutive pieces that ``TimelineBuilder.since`` returned; at least one."""
        last = pieces[-1]  # its tables contain those of all pieces before it
        columns = [np.concatenate([getattr(piece, name) for piece in pieces]) for name in _COLUMNS]
        return _from_columns(columns, last.phases, last.modules, last.ops)

    def rows(self, keep: npt.ArrayLike) -> Timeline:
        """Return a timeline of these rows alone, which are given as increasing indices or as a mask."""
        index = np.arange(len(self))[np.asarray(keep)]
        return replace(self.take(index), storages=self.storages.at_rows(index))

    def take(self, index: npt.NDArray[np.int64]) -> Timeline:
        """Return a timeline of the rows at these indices, in any order, without storages."""
        return _from_columns(
            [getattr(self, name)[index] for name in _COLUMNS], self.phases, self.modules, self.ops
        )

    def with_tiles_on_disk(self) -> Timeline:
        """Return the timeline of the same step with the host tiles of streamed layers in a mapped file."""
        made = np.array([kind.op == TILES for kind in self.storages.kinds], dtype=bool)
        of_tiles = made[self.storages.kind] & (self.storages.category == HOST)
        storages = replace(self.storages, category=np.where(of_tiles, DISK, self.storages.category))
        held = storages.bytes_of(len(self), DISK + 1)
        return replace(self, host=held[:, HOST], disk=held[:, DISK], storages=storages)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and strings, for a file or a message."""
        return {
            **{name: getattr(self, name).tolist() for name in _COLUMNS},
            "phases": list(self.phases),
            "modules": list(self.modules),
            "ops": [asdict(op) for op in self.ops],
            "storages": self.storages.to_json(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any] | str) -> Timeline:
        """Return the timeline of what ``to_json`` returned, given as a dict or as JSON text.

        Raises:
            ResultError: The document is that of an earlier version, whose categories were others.
        """
        d = json.loads(document) if isinstance(document, str) else document
        if "storages" not in d:
            raise ResultError(
                "this timeline is of an earlier version of the lab, without storages: record it again"
            )
        columns = [d[name] for name in _COLUMNS]
        timeline = _from_columns(columns, d["phases"], d["modules"], (Op(**op) for op in d["ops"]))
        return replace(timeline, storages=Storages.from_json(d["storages"]))


_COLUMNS = ("seconds", "device", "host", "disk", "phase", "module", "op", "step")


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
    """Builds a timeline row by row. The live timeline draws the new rows, which ``since`` returns."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, tuple[int, ...], int, int, int, int, int, int]] = []
        self._tables: tuple[dict[Any, int], dict[Any, int], dict[Any, int]] = ({}, {}, {})

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        seconds: float,
        device: Sequence[int],
        host: int,
        *,
        disk: int = 0,
        phase: str,
        module: str,
        op: Op,
        step: int,
    ) -> None:
        """Append one row; ``device`` has the bytes of each category."""
        phases, modules, ops = self._tables
        self._rows.append(
            (
                seconds,
                tuple(device),
                host,
                disk,
                phases.setdefault(phase, len(phases)),
                modules.setdefault(module, len(modules)),
                ops.setdefault(op, len(ops)),
                step,
            )
        )

    def since(self, row: int = 0) -> Timeline:
        """Return the rows from ``row`` on as a timeline."""
        columns = list(zip(*self._rows[row:], strict=True)) or [()] * len(_COLUMNS)
        return _from_columns(columns, *self._tables)
