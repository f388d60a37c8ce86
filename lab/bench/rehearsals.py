"""What one GPU says of every recipe: its plan's peak over the measured one, and seconds beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.bench.software import versions
from lab.bench.table import Row, Say
from lab.rungs import NAMES
from lab.units import GiB, format_tokens
from lab.verbs.rehearsal import Rehearsal, RehearsalOutOfMemory
from lab.verbs.rehearse import rehearse

COLUMNS = (
    "recipe", "tokens", "peak, GiB", "reserved, GiB", "retries", "planned / peak", "host, GiB", "seconds",
    "over tiling", "over upipe", "failed", "machine",
)  # fmt: skip


def measure_rehearsals(model: str, contexts: Sequence[int], say: Say, **settings: Any) -> list[Row]:
    """One row a context and recipe, all as one rank of many: bytes, seconds, and what they are over others'.

    ``settings`` are those of ``lab.rehearse``. "reserved" and "retries" are the CUDA allocator's, and absent
    on CPU. "over tiling" is a step over the rung below UPipe's, the same
    stack with Ulysses alone; "over upipe" is over that rung with every layer recomputed in full. A context
    that does not fit says so, and has no seconds.
    """
    rows: list[Row] = []
    for tokens in contexts:
        found: dict[str, Rehearsal] = {}
        for name in NAMES:
            say(f"{name}, {format_tokens(tokens)} tokens")
            refused = None
            try:
                found[name] = rehearse(model, name, tokens=tokens, **settings)
            except RehearsalOutOfMemory as error:
                refused = f"out of memory in {error.moment.phase}"
            rows.append(_row(name, tokens, found, refused))
    return rows


def _row(name: str, tokens: int, found: dict[str, Rehearsal], refused: str | None) -> Row:
    row: dict[str, str | float | None] = dict.fromkeys(COLUMNS)
    row |= {"recipe": name, "tokens": format_tokens(tokens), "failed": refused}
    if name in found:
        one = found[name]
        row |= {
            "peak, GiB": one.device_peak / GiB,
            "reserved, GiB": None if one.reserved_peak is None else one.reserved_peak / GiB,
            "retries": one.alloc_retries,
            "planned / peak": one.plan_over_measured,
            "host, GiB": one.host_peak / GiB,
            "seconds": one.step_seconds,
            "machine": f"{one.machine}, {versions()}",
        }
        for other in ("tiling", "upipe"):
            if other in found:
                row[f"over {other}"] = one.step_seconds / found[other].step_seconds
    return row
