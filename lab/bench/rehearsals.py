"""What one GPU says of every recipe: its plan's peak over the measured one, and seconds beside each other."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lab.bench.software import measured_on
from lab.bench.table import Row, Say
from lab.errors import DivergedError, RecipeError
from lab.recipe.ladder import NAMES
from lab.rehearsing.rehearsal import Rehearsal, RehearsalOutOfMemory, RehearsalTooLarge
from lab.rehearsing.rehearse import machine_for, rehearse
from lab.units import GiB, format_tokens

COLUMNS = (
    "recipe", "tokens", "peak, GiB", "reserved, GiB", "retries", "planned / peak", "host, GiB", "seconds",
    "over tiling", "over upipe", "failed", "machine",
)  # fmt: skip


FAILURES = (RecipeError, RehearsalOutOfMemory, RehearsalTooLarge, DivergedError, RuntimeError)
"""What can go wrong with one recipe and not with the next."""


def measure_rehearsals(model: str, contexts: Sequence[int], say: Say, **settings: Any) -> Iterator[Row]:
    """Yield a row a context and recipe, all as one rank of many: bytes, seconds, and these over others'.

    ``settings`` are those of ``lab.rehearse``. "reserved" and "retries" are the CUDA allocator's, and absent
    on CPU. "over tiling" is a step over the rung below UPipe's, the same stack with Ulysses alone; "over
    upipe" is over that rung with every layer recomputed in full. A row that does not fit, that is refused, or
    in which a kernel fails has that error's first line in "failed".

    Raises:
        LabError: a model, text or size with which no recipe can be rehearsed.
    """
    where = measured_on(machine_for(settings.get("machine")))
    for tokens in contexts:
        found: dict[str, Rehearsal] = {}
        for name in NAMES:
            say(f"{name}, {format_tokens(tokens)} tokens")
            refused = None
            try:
                found[name] = rehearse(model, name, tokens=tokens, **settings)
            except FAILURES as error:
                refused = str(error).partition("\n")[0]
            if refused is not None:
                # The error's frames held the model until here.
                gc.collect()
                torch.cuda.empty_cache()
            yield {**_row(name, tokens, found), "failed": refused, "machine": where}


def _row(name: str, tokens: int, found: dict[str, Rehearsal]) -> Row:
    row: dict[str, str | float | None] = dict.fromkeys(COLUMNS)
    row |= {"recipe": name, "tokens": format_tokens(tokens)}
    if name in found:
        one = found[name]
        row |= {
            "peak, GiB": one.device_peak / GiB,
            "reserved, GiB": None if one.reserved_peak is None else one.reserved_peak / GiB,
            "retries": one.alloc_retries,
            "planned / peak": one.plan_over_measured,
            "host, GiB": one.host_peak / GiB,
            "seconds": one.step_seconds,
        }
        for other in ("tiling", "upipe"):
            if other in found:
                row[f"over {other}"] = one.step_seconds / found[other].step_seconds
    return row
