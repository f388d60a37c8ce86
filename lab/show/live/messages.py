"""The messages of a timeline to the browser: new rows of a rank while it runs, and all at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lab.memory.timeline import Timeline
from lab.show.live.recorded import Recorded
from lab.show.live.thinning import Positions, thin_rows
from lab.show.panels import align_plan, row_positions
from lab.training.records import Progress

INTERVALS = 24
"""The time of a message is divided into so many intervals, and two rows of each are sent. A message is about
a tenth of a second long, a few pixels."""

RECORDED_INTERVALS = 1200
"""The same of a whole timeline, whose panel has fewer pixels."""


Names = dict[str, int]
"""The names of phases, modules and operators that were sent to the browser, each with its number."""


def browser_message(progress: Progress, names: Names) -> tuple[dict[str, Any], bytes]:
    """Turn a message of a rank into one for the browser: its content, and its rows as float32.

    A row is: seconds, the bytes of each category, the bytes on the host and on the disk, the numbers of its
    phase, module and operator, and its step. The script reads them by position.
    """
    rows = progress.timeline
    rows = rows.rows(thin_rows(rows.seconds, rows.total, INTERVALS))
    new, table = _table(rows, rows.seconds, names)
    content = {
        "kind": "rows",
        "rank": progress.rank,
        "ranks": progress.ranks,
        "step": progress.step,
        "steps": progress.steps,
        "loss": progress.loss,
    }
    return content | new, table


def recorded_messages(recorded: Recorded) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """Yield a message for each timeline: its content, its rows as above, and three more arrays.

    Those are the number of each row in the whole timeline as uint32, and the positions and the bytes of the
    plan's line as float32.
    """
    names: Names = {}
    for rank, (name, whole) in enumerate(recorded.timelines.items()):
        at = row_positions(whole, recorded.over)
        kept = thin_rows(at, whole.total, RECORDED_INTERVALS)
        rows = whole.take(kept)
        new, table = _table(rows, at[kept], names)
        content = {
            "kind": "recorded",
            "rank": rank,
            "ranks": len(recorded.timelines),
            "name": name,
            "title": recorded.title,
            "count": len(whole),
            "over": recorded.over,
            "addable": recorded.ranks and len(recorded.timelines) > 1,
            "stacked": not recorded.ranks,
            "job": recorded.job is not None,
        }
        yield content | new, [table, kept.astype(np.uint32).tobytes(), *_planned_line(recorded, whole, at)]


def _table(rows: Timeline, at: Positions, names: Names) -> tuple[dict[str, Any], bytes]:
    """Return the names that are new, with the number of the first of them, and the rows."""
    known = len(names)
    columns = (at, rows.device, rows.host, rows.disk, _name_numbers(rows, names), rows.step)
    table = np.column_stack(columns).astype(np.float32).tobytes()
    return {"known": known, "names": list(names)[known:]}, table


def _planned_line(recorded: Recorded, timeline: Timeline, at: Positions) -> list[bytes]:
    """Return the positions and the bytes of the plan's line; empty arrays without a plan."""
    lines = [] if recorded.planned is None else align_plan(timeline, recorded.planned, at)
    positions = np.concatenate([np.zeros(0), *(line for line, _ in lines)])
    sizes = np.concatenate([np.zeros(0, dtype=np.int64), *(line for _, line in lines)])
    kept = thin_rows(positions, sizes, RECORDED_INTERVALS)
    return [positions[kept].astype(np.float32).tobytes(), sizes[kept].astype(np.float32).tobytes()]


def _name_numbers(rows: Timeline, names: Names) -> Any:
    """Return the numbers of the phase, the module and the operator of each row [n, 3]."""
    texts = (
        (rows.phases[phase], rows.modules[module], str(rows.ops[op]))
        for phase, module, op in zip(rows.phase, rows.module, rows.op, strict=True)
    )
    numbers = [[names.setdefault(name, len(names)) for name in row] for row in texts]
    return np.array(numbers, dtype=np.int64).reshape(-1, 3)
