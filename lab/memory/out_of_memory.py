"""The error of a device that is out of memory: which operator ran, and what the bytes were for."""

from __future__ import annotations

import torch

from lab.errors import LabError
from lab.memory.categories import CATEGORIES
from lab.memory.moment import Moment
from lab.units import format_bytes


class OutOfMemory(LabError):
    """A rank's device would hold more bytes than its limit, or more than it has.

    Attributes:
        moment: The instant: the operator, its module, and the bytes by category.
        limit: The limit in bytes; None where the device itself refused.
        reason: What the device answered; empty where there is a limit.
    """

    def __init__(self, moment: Moment, limit: int | None, reason: str = "") -> None:
        # All values are arguments of the exception, so that pickling keeps them on the way to the notebook.
        super().__init__(moment, limit, reason)
        self.moment, self.limit, self.reason = moment, limit, reason

    def __str__(self) -> str:
        """Return the message in one line, and the bytes of each category in a line of its own."""
        moment = self.moment
        reason = f"the limit is {format_bytes(self.limit)}" if self.limit is not None else self.reason
        categories = "".join(
            f"\n  {category:<26}{format_bytes(count):>12}" for category, count in moment.by_category.items()
        )
        # The first row of a phase has no operator.
        operator = f"{moment.op} {moment.shapes}".strip() if moment.op != "-" else "before the first operator"
        module = f" in {moment.module}" if moment.module else ""
        return (
            f"out of memory in {moment.phase}, {operator}{module}: "
            f"{format_bytes(moment.device)} held, {reason}{categories}"
        )


def unmetered_out_of_memory(error: torch.OutOfMemoryError, phase: str) -> OutOfMemory:
    """Return the error of a device that refused while no meter ran; all allocated bytes are *other*."""
    allocated = torch.cuda.memory_allocated()
    split = dict.fromkeys(CATEGORIES, 0) | {"other": allocated}
    moment = Moment(0.0, allocated, 0, split, "outside the meter", "", "", phase, 0)
    return OutOfMemory(moment, None, str(error).partition("\n")[0])
