"""The seconds of a plan: computed, from the cache, and in closed form; and the peak memory of the process."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from lab.bench.table import Row, Say
from lab.models import config_of
from lab.planning import plan_cache
from lab.planning.closed_form import estimate
from lab.planning.plan import plan, plan_ladder
from lab.recipe.ladder import recipe_for
from lab.units import Mi, MiB


def measure_planning(say: Say, model: str = "llama3-8b", tokens: int = 5 * Mi, ranks: int = 8) -> list[Row]:
    """Return a row for each way to plan: its seconds, and the peak memory of the process so far.

    The cache of plans is empty before the first.
    """
    recipe, config = recipe_for("upipe", model, ranks, tokens), config_of(model)
    with tempfile.TemporaryDirectory() as empty, patch.object(plan_cache, "folder", lambda: Path(empty)):
        ways: dict[str, Callable[[], object]] = {
            "plan upipe": lambda: plan(model, "upipe", tokens=tokens, ranks=ranks),
            "plan upipe, from the cache": lambda: plan(model, "upipe", tokens=tokens, ranks=ranks),
            "the other six rungs": lambda: plan_ladder(model, tokens=tokens, ranks=ranks),
            "closed form": lambda: estimate(config, recipe, tokens=tokens, ranks=ranks),
        }
        return [_measure(name, work, say) for name, work in ways.items()]


def _measure(name: str, work: Callable[[], object], say: Say) -> Row:
    say(name)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    # Linux counts the peak in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"answer": name, "seconds": seconds, "process peak, MiB": round(peak / MiB)}
