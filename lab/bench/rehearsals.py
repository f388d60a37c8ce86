"""Rehearsals of all recipes on one GPU: the planned peak over the measured one, and the seconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lab.bench.software import device_and_versions
from lab.bench.table import Row, Say
from lab.errors import DivergedError, RecipeError
from lab.recipe.ladder import RECIPE_NAMES
from lab.rehearsing.rehearsal import Rehearsal, RehearsalOutOfMemory, RehearsalTooLarge
from lab.rehearsing.rehearse import machine_for, rehearse
from lab.units import GiB, format_tokens

COLUMNS = (
    "recipe", "tokens", "peak, GiB", "reserved, GiB", "retries", "planned / peak", "host, GiB", "seconds",
    "over tiling", "over upipe", "failed", "machine",
)  # fmt: skip


FAILURES = (RecipeError, RehearsalOutOfMemory, RehearsalTooLarge, DivergedError, RuntimeError)
"""Errors of one recipe, after which the next recipe is still rehearsed."""


def measure_rehearsals(model: str, contexts: Sequence[int], say: Say, **settings: Any) -> Iterator[Row]:
    """Rehearse each recipe at each context as one rank of many, and yield a row for each.

    "reserved" and "retries" are those of the CUDA allocator, and missing on CPU. "over tiling" and "over
    upipe" are the seconds of a step divided by those of that rung: "tiling" is UPipe's stack with plain
    Ulysses, and "upipe" recomputes every layer in full. If a recipe does not fit, is refused, or a kernel
    fails, "failed" has the first line of the error.

    Args:
        model: The model.
        contexts: Numbers of tokens.
        say: Shows what is measured now.
        settings: Arguments of ``lab.rehearse``.

    Raises:
        LabError: No recipe can be rehearsed with this model, text or size.
    """
    where = device_and_versions(machine_for(settings.get("machine")))
    for tokens in contexts:
        by_recipe: dict[str, Rehearsal] = {}
        for name in RECIPE_NAMES:
            say(f"{name}, {format_tokens(tokens)} tokens")
            failure = None
            try:
                by_recipe[name] = rehearse(model, name, tokens=tokens, **settings)
            except FAILURES as error:
                failure = str(error).partition("\n")[0]
            if failure is not None:
                # The traceback of the error has referred to the model until here.
                gc.collect()
                torch.cuda.empty_cache()
            yield {**_row(name, tokens, by_recipe), "failed": failure, "machine": where}


def _row(name: str, tokens: int, by_recipe: dict[str, Rehearsal]) -> Row:
    row: dict[str, str | float | None] = dict.fromkeys(COLUMNS)
    row |= {"recipe": name, "tokens": format_tokens(tokens)}
    if name in by_recipe:
        rehearsal = by_recipe[name]
        row |= {
            "peak, GiB": rehearsal.device_peak / GiB,
            "reserved, GiB": None if rehearsal.reserved_peak is None else rehearsal.reserved_peak / GiB,
            "retries": rehearsal.alloc_retries,
            "planned / peak": rehearsal.plan_over_measured,
            "host, GiB": rehearsal.host_peak / GiB,
            "seconds": rehearsal.step_seconds,
        }
        for other in ("tiling", "upipe"):
            if other in by_recipe:
                row[f"over {other}"] = rehearsal.step_seconds / by_recipe[other].step_seconds
    return row
