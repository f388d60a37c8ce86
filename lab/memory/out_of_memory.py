"""Out of memory: the error that says what was running and what was held at that instant."""

from __future__ import annotations

import torch

from lab.errors import LabError
from lab.memory.timeline import CATEGORIES, Moment
from lab.units import format_bytes


class OutOfMemory(LabError):
    """A rank's device holds more than it may, or more than it has.

    ``moment`` is the instant: the operator that asked for more, its module, what was held by category.
    ``limit`` is in bytes; None where the device itself refused, whose words are ``said``.
    """

    def __init__(self, moment: Moment, limit: int | None, said: str = "") -> None:
        # As arguments of the exception, which is how it travels from a rank to the notebook.
        super().__init__(moment, limit, said)
        self.moment, self.limit, self.said = moment, limit, said

    def __str__(self) -> str:
        """One line; what was held follows in lines of its own."""
        moment = self.moment
        given = f"the limit is {format_bytes(self.limit)}" if self.limit is not None else self.said
        held = "".join(
            f"\n  {category:<12}{format_bytes(count):>12}" for category, count in moment.by_category.items()
        )
        # The first row of a phase has no operator: all was held before.
        doing = f"{moment.op} {moment.shapes}".strip() if moment.op != "-" else "before the first operator"
        where = f" in {moment.module}" if moment.module else ""
        return (
            f"out of memory in {moment.phase}, {doing}{where}: "
            f"{format_bytes(moment.device)} held, {given}{held}"
        )


def outside_the_meter(error: torch.OutOfMemoryError, phase: str) -> OutOfMemory:
    """Return the error for a device that refused where no meter looked on: what it held is *other*."""
    held = torch.cuda.memory_allocated()
    split = dict.fromkeys(CATEGORIES, 0) | {"other": held}
    moment = Moment(0.0, held, 0, split, "outside the meter", "", "", phase, 0)
    return OutOfMemory(moment, None, str(error).partition("\n")[0])
