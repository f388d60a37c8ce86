"""One instant of a step, and the operator that had just run."""

from __future__ import annotations

from dataclasses import dataclass

from lab.units import format_operator


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
