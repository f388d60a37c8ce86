"""What a live timeline sends to the browser: the rows since the last message, thinned, and new names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.memory.timeline import Timeline
from lab.show.live.thinning import thinned
from lab.training.records import Progress

STRETCHES = 24
"""A message keeps two rows for each of so many stretches of its time; a tenth of a second is a few pixels."""


@dataclass
class Names:
    """Phases, modules and operators that the browser knows, by number: a name is sent once."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """The number of a name, a new one if it was never asked for."""
        return self.numbers.setdefault(name, len(self.numbers))

    def since(self, first: int) -> list[str]:
        """The names from number ``first`` on."""
        return list(self.numbers)[first:]


def delta(progress: Progress, names: Names) -> tuple[dict[str, Any], bytes]:
    """Turn a message of a rank into one for the browser: content, and its rows as float32.

    A row is seconds, the five categories' and the host's bytes, the numbers of its phase, module and
    operator, and its step: the script reads them by position.
    """
    rows = progress.timeline
    rows = rows.rows(thinned(rows.seconds, rows.total, STRETCHES))
    known = len(names.numbers)
    table = np.column_stack((rows.seconds, rows.device, rows.host, _numbered(rows, names), rows.step))
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


def _numbered(rows: Timeline, names: Names) -> Any:
    """Numbers of phase, module and operator of each row [n, 3]."""
    said = (
        (rows.phases[phase], rows.modules[module], str(rows.ops[op]))
        for phase, module, op in zip(rows.phase, rows.module, rows.op, strict=True)
    )
    return np.array([[names.number(name) for name in row] for row in said], dtype=np.int64).reshape(-1, 3)
