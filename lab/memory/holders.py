"""Who holds the bytes at an instant: every tensor, with the operator and the module that made it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from lab.errors import ResultError
from lab.memory.moment import Moment
from lab.units import format_bytes, format_operator

Memory = Literal["device", "host", "disk"]

NO_OPERATOR = "-"
"""The operator of what no operator of a step made."""

LAYER = re.compile(r"(?<=layers\.)\d+")
"""The number of a layer in the path of a module or of a parameter."""


@dataclass(frozen=True)
class Holder:
    """A tensor that is held at an instant, or several that are alike.

    Attributes:
        bytes: The bytes of all of them together.
        count: How many tensors there are.
        category: What they are for; one of ``CATEGORIES``, ``"host"`` or ``"disk"``.
        shape: The shape of the first tensor seen on the storage.
        dtype: Its dtype.
        name: The parameter that it is, or whose gradient or optimizer state it is; else empty.
        op: The operator that made it.
        module: The path of the module that ran the operator.
        phase: The phase of the step in which it was made; "start" if it was there before the first step.
        step: The training step in which it was made, counted from 0.
        made: When it was made, in seconds on the timeline's clock; of several, the first.
        freed: When it is freed; of several, the last. None if it is held at the end.
        units: Its bytes in units of A, the bytes of one hidden state on the rank; None where no job is known.
        knob: The knob of the recipe that would remove it or shrink it; empty if none would.
    """

    bytes: int
    count: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    name: str
    op: str
    module: str
    phase: str
    step: int
    made: float
    freed: float | None
    units: float | None = None
    knob: str = ""

    @property
    def tensor(self) -> str:
        """The dtype and the shape: ``"bfloat16 1x655360x4096"``."""
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"

    @property
    def place(self) -> str:
        """The parameter's name, or else the module."""
        return self.name or self.module or "-"


@dataclass(frozen=True, eq=False)
class Holders:
    """What is held at one instant.

    Attributes:
        moment: The instant.
        memory: Which memory is meant: the device's, the host's or the disk's.
        items: The tensors, the largest first.
        total: The bytes of this memory at that instant, or those of the tensors that were asked for.
    """

    moment: Moment
    memory: Memory
    items: tuple[Holder, ...]
    total: int

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Holder]:
        return iter(self.items)

    @property
    def unheld(self) -> int:
        """Bytes that no tensor holds: kernels' workspaces, and what an allocator holds besides the tensors.

        On CUDA it is negative where the allocator has freed a tensor, or not yet allocated it, and the meter
        counts it.
        """
        return self.total - sum(item.bytes for item in self.items)

    def made_by(
        self, *, module: str | None = None, phase: str | None = None, step: int | None = None
    ) -> Holders:
        """Return only those that were made by a module, in a phase and in a step; None stands for any.

        Their total is that of these tensors alone. A module is given as for ``Timeline.highest``.
        """
        items = tuple(
            item
            for item in self.items
            if (module is None or is_inside(item.module, module))
            and (phase is None or item.phase == phase)
            and (step is None or item.step == step)
        )
        return replace(self, items=items, total=sum(item.bytes for item in items))

    def grouped(self) -> Holders:
        """Return them with those of different layers that are alike as one item each."""
        groups: dict[Holder, list[Holder]] = {}
        for item in self.items:
            alike = replace(
                item,
                bytes=item.bytes // item.count,
                count=1,
                name=LAYER.sub("*", item.name),
                module=LAYER.sub("*", item.module),
                made=0.0,
                freed=None,
                units=None,
            )
            groups.setdefault(alike, []).append(item)
        items = [_together(alike, members) for alike, members in groups.items()]
        return replace(self, items=tuple(sorted(items, key=lambda item: -item.bytes)))

    def with_knobs(self, unit: int, knob: Callable[[Holder], str]) -> Holders:
        """Return them with their bytes in units of ``unit`` bytes, and with the knob of each."""
        items = tuple(replace(item, units=item.bytes / unit, knob=knob(item)) for item in self.items)
        return replace(self, items=items)

    def table(self, rows: int = 12) -> str:
        """Return the largest as lines of text, those of different layers that are alike in one line."""
        grouped = self.grouped()
        shown, rest = grouped.items[:rows], grouped.items[rows:]
        lines = [("bytes", "A", "", "category", "tensor", "made by", "where", "less with")]
        lines += [
            (
                format_bytes(item.bytes),
                "" if item.units is None else f"{item.units:.2f}",
                f"{item.count} x" if item.count > 1 else "",
                item.category,
                item.tensor,
                format_operator(item.op),
                item.place.removeprefix("model."),
                item.knob,
            )
            for item in shown
        ]
        if rest:
            held, tensors = sum(item.bytes for item in rest), sum(item.count for item in rest)
            lines.append((format_bytes(held), "", f"{tensors} x", "the other tensors", "", "", "", ""))
        if self.unheld:
            lines.append((format_bytes(self.unheld), "", "", "other", "held by no tensor", "", "", ""))
        lines.append((format_bytes(self.total), "", "", "in all", "", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_aligned(line, widths) for line in lines)

    def __repr__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "memory": self.memory,
            "seconds": self.moment.seconds,
            "phase": self.moment.phase,
            "op": self.moment.op,
            "total": self.total,
            "unheld": self.unheld,
            "holders": [asdict(item) for item in self.items],
        }


def is_inside(path: str, module: str) -> bool:
    """Return whether a path is that of a module or lies in it; a star in ``module`` stands for any text."""
    return fnmatchcase(path, module) or fnmatchcase(path, f"{module}.*")


def check_memory(memory: str) -> None:
    """Check the name of a memory.

    Raises:
        ResultError: It is none of ``"device"``, ``"host"`` and ``"disk"``.
    """
    if memory not in get_args(Memory):
        raise ResultError(f"memory={memory!r}: use 'device', 'host' or 'disk'")


def _together(alike: Holder, members: list[Holder]) -> Holder:
    """Return one item for members that are alike but for their layers."""
    if len(members) == 1:
        return members[0]
    freed = [member.freed for member in members]
    units = [member.units for member in members if member.units is not None]
    return replace(
        alike,
        bytes=sum(member.bytes for member in members),
        count=sum(member.count for member in members),
        made=min(member.made for member in members),
        freed=None if None in freed else max(time for time in freed if time is not None),
        units=sum(units) if units else None,
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return the cells of a line, the first three of which are numbers."""
    numbers = (cell.rjust(width) for cell, width in zip(cells[:3], widths[:3], strict=True))
    texts = (cell.ljust(width) for cell, width in zip(cells[3:], widths[3:], strict=True))
    return "  ".join((*numbers, *texts)).rstrip()
