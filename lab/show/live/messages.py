"""The messages of a live timeline to the browser: some of the new rows of a rank, and new names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.memory.timeline import Timeline
from lab.show.live.thinning import thin_rows
from lab.training.records import Progress

INTERVALS = 24
"""The time of a message is divided into so many intervals, and two rows of each are sent. A message is about
a tenth of a second long, a few pixels."""


@dataclass
class Names:
    """The names of phases, modules and operators that were sent to the browser, each with its number."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """Return the number of a name; a new name gets the next number."""
        return self.numbers.setdefault(name, len(self.numbers))

    def since(self, first: int) -> list[str]:
        """Return the names from number ``first`` on."""
        return list(self.numbers)[first:]


def browser_message(progress: Progress, names: Names) -> tuple[dict[str, Any], bytes]:
    """Turn a message of a rank into one for the browser: its content, and its rows as float32.

    A row is: seconds, the bytes of each category, the bytes on the host, the numbers of its phase,
    module and operator, and its step. The script reads them by position.
    """
    rows = progress.timeline
    rows = rows.rows(thin_rows(rows.seconds, rows.total, INTERVALS))
    known = len(names.numbers)
    table = np.column_stack((rows.seconds, rows.device, rows.host, _name_numbers(rows, names), rows.step))
    content = {
        "rank": progress.rank,
        "ranks": progress.ranks,
        "step": progress.step,
        "steps": progress.steps,
        "loss": progress.loss,
        "known": known,
        "names": names.since(known),
    }
    return content, table.astype(np.float32).tobytes()


def _name_numbers(rows: Timeline, names: Names) -> Any:
    """Return the numbers of the phase, the module and the operator of each row [n, 3]."""
    texts = (
        (rows.phases[phase], rows.modules[module], str(rows.ops[op]))
        for phase, module, op in zip(rows.phase, rows.module, rows.op, strict=True)
    )
    return np.array([[names.number(name) for name in row] for row in texts], dtype=np.int64).reshape(-1, 3)
