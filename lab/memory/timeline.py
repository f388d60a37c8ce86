"""The timeline: bytes over time by category, with the operator at each point. Every verb returns one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.errors import ResultError
from lab.memory.categories import CATEGORIES, DISK, HOST, MEMORIES, OTHER
from lab.memory.holders import NO_OPERATOR, Holder, Holders, Memory, check_memory, is_inside
from lab.memory.moment import Moment, Op
from lab.memory.storages import NO_STORAGES, Integers, Storages
from lab.units import format_bytes

TILES = "lab.empty_host"
"""The operator that allocates the host tiles of streamed layers, and nothing else."""


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
    device: Integers
    host: Integers
    disk: Integers
    phase: Integers
    module: Integers
    op: Integers
    step: Integers
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
    def total(self) -> Integers:
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

    def holders(self, at: float | str = "peak", *, memory: Memory = "device") -> Holders:
        """Return every tensor that is held at an instant.

        Args:
            at: Seconds; or ``"peak"``, the row at which this memory holds the most; or the name of a phase,
                whose last row is meant, in the last step that has it.
            memory: Which memory: the device's, the host's or the disk's.

        Raises:
            ResultError: There is no such instant or memory, or the timeline has no storages.
        """
        return self.holders_at(self._row(at, memory), memory)

    def holders_at(self, row: int, memory: Memory) -> Holders:
        """Return every tensor that is held at a row; see ``holders``.

        Raises:
            ResultError: The timeline has no storages, or ``memory`` is none.
        """
        check_memory(memory)
        storages, moment = self.storages, self.moment(row)
        if not len(storages):
            raise ResultError(
                "this timeline has no storages: those of a run that was stopped, and rows that are sent "
                "while it goes on, have none; a run to its end, a plan or a rehearsal has them"
            )
        held = storages.held_at(row)
        category = storages.category[held]
        of_memory = {"device": category < HOST, "host": category == HOST, "disk": category == DISK}
        held = held[of_memory[memory]]
        held = held[np.argsort(-storages.size[held], kind="stable")]
        items = tuple(map(self._holder, held.tolist()))
        return Holders(moment, memory, items, int(getattr(moment, memory)))

    def _holder(self, index: int) -> Holder:
        """Return what a storage is, which is given by its index."""
        storages = self.storages
        kind, freed = storages.kinds[storages.kind[index]], float(storages.freed[index])
        return Holder(
            bytes=int(storages.size[index]),
            count=1,
            category=MEMORIES[storages.category[index]],
            shape=kind.shape,
            dtype=kind.dtype,
            name=kind.name,
            op=kind.op,
            module=self.modules[storages.module[index]],
            # No operator of the step made what was there before it.
            phase=self.phases[storages.phase[index]] if kind.op != NO_OPERATOR else "start",
            step=int(storages.step[index]),
            made=float(storages.made[index]),
            freed=None if np.isinf(freed) else freed,
        )

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

    def _check_rows(self) -> None:
        if not len(self):
            raise ResultError("this timeline has no rows: nothing was measured")

    def _row(self, at: float | str, memory: Memory) -> int:
        check_memory(memory)
        if isinstance(at, str):
            if at == "peak" and len(self):
                return int((self.total if memory == "device" else getattr(self, memory)).argmax())
            return int(self._where(phase=at)[-1])
        self._check_rows()
        start, end = float(self.seconds[0]), float(self.seconds[-1])
        if not start <= at <= end:
            raise ResultError(
                f"at={at!r} is outside this timeline, which goes from {start:.6g} to {end:.6g} seconds"
            )
        return int(np.searchsorted(self.seconds, at, side="right")) - 1

    def _where(
        self, *, module: str | None = None, phase: str | None = None, step: int | None = None
    ) -> Integers:
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

    def take(self, index: Integers) -> Timeline:
        """Return a timeline of the rows at these indices, in any order, without storages."""
        return _from_columns(
            [getattr(self, name)[index] for name in _COLUMNS], self.phases, self.modules, self.ops
        )

    def with_seconds(self, seconds: npt.NDArray[np.float64]) -> Timeline:
        """Return the same timeline at other times [n]."""
        made, freed = seconds[self.storages.first], np.append(seconds, np.inf)[self.storages.end]
        return replace(self, seconds=seconds, storages=replace(self.storages, made=made, freed=freed))

    def with_blocks(self, block: int) -> Timeline:
        """Return the timeline of a device whose allocator takes whole blocks of so many bytes."""
        storages = self.storages
        rounded = np.where(storages.category < HOST, -(-storages.size // block) * block, storages.size)
        return self.with_bytes_of(replace(storages, size=rounded))

    def with_tiles_on_disk(self) -> Timeline:
        """Return the timeline of the same step with the host tiles of streamed layers in a mapped file."""
        made = np.array([kind.op == TILES for kind in self.storages.kinds], dtype=bool)
        of_tiles = made[self.storages.kind] & (self.storages.category == HOST)
        category = np.where(of_tiles, DISK, self.storages.category)
        return self.with_bytes_of(replace(self.storages, category=category))

    def with_storages(self, *, first: Integers, end: Integers, **columns: Any) -> Timeline:
        """Return the timeline with storages, and with their bytes; those of *other* stay as they are.

        Args:
            first: See ``Storages``. The rows at which storages are first held say what made them.
            end: See ``Storages``.
            columns: The other columns, but for those that the rows give.
        """
        storages = Storages(
            first=first,
            end=end,
            module=self.module[first],
            phase=self.phase[first],
            step=self.step[first],
            made=self.seconds[first],
            freed=np.append(self.seconds, np.inf)[end],
            **columns,
        )
        return self.with_bytes_of(storages)

    def with_bytes_of(self, storages: Storages) -> Timeline:
        """Return the timeline with these storages and their bytes; those of *other* stay as they are."""
        held = storages.bytes_of(len(self))
        held[:, OTHER] = self.device[:, OTHER]
        return replace(self, device=held[:, :HOST], host=held[:, HOST], disk=held[:, DISK], storages=storages)

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
        self._rows: list[tuple[Any, ...]] = []
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
        named = zip(self._tables, (phase, module, op), strict=True)
        indices = (table.setdefault(name, len(table)) for table, name in named)
        self._rows.append((seconds, tuple(device), host, disk, *indices, step))

    def since(self, row: int = 0) -> Timeline:
        """Return the rows from ``row`` on as a timeline."""
        columns = list(zip(*self._rows[row:], strict=True)) or [()] * len(_COLUMNS)
        return _from_columns(columns, *self._tables)
