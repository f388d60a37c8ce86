"""The seconds of a plan: computed, from the cache, and in closed form; and the peak memory of the process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

from lab.bench.table import Row, Say
from lab.models import shape_of
from lab.planning import plan_cache
from lab.planning.closed_form import estimate_job
from lab.planning.plan import plan, plan_ladder
from lab.recipe.jobs import Job
from lab.recipe.ladder import resolve_recipe
from lab.units import Mi, MiB


def measure_planning(say: Say, model: str = "llama3-8b", tokens: int = 5 * Mi, ranks: int = 8) -> list[Row]:
    """Return a row for each way to plan: its seconds, and the peak memory of the process so far.

    The cache of plans is empty before the first.
    """
    recipe, shape = resolve_recipe("upipe", model, ranks, tokens), shape_of(model)
    with tempfile.TemporaryDirectory() as empty, patch.object(plan_cache, "folder", lambda _: Path(empty)):
        ways: dict[str, Callable[[], object]] = {
            "plan upipe": lambda: plan(model, "upipe", tokens=tokens, ranks=ranks),
            "plan upipe, from the cache": lambda: plan(model, "upipe", tokens=tokens, ranks=ranks),
            "the other six rungs": lambda: plan_ladder(model, tokens=tokens, ranks=ranks),
            "closed form": lambda: estimate_job(shape, Job(model, recipe, tokens, ranks)),
        }
        rows = [_measure(name, work, say) for name, work in ways.items()]
        command = ["-m", "lab", "plan", model, "--tokens", str(tokens), "--ranks", str(ranks)]
        _run_python(command, empty)
        commands = {"python -c pass": ["-c", "pass"], "lab plan, from the cache": command}
        rows += [
            _measure(name, partial(_run_python, arguments, empty), say)
            for name, arguments in commands.items()
        ]
        return rows


def _run_python(arguments: list[str], cache: str) -> None:
    """Run Python with these arguments and a user's cache of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)


def _measure(name: str, work: Callable[[], object], say: Say) -> Row:
    say(name)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    # Linux counts the peak in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"answer": name, "seconds": seconds, "process peak, MiB": round(peak / MiB)}
