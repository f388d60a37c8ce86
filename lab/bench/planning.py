"""The seconds of the questions that plans answer, and the peak memory of the process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

from lab.bench.table import Row, Say
from lab.bench.timing import seconds
from lab.planning import plan_cache
from lab.planning.fit import fit
from lab.planning.max_context import max_context
from lab.planning.plan import plan, plan_ladder
from lab.units import MiB, parse_tokens


def measure_planning(model: str, recipe: str, tokens: str, ranks: int, say: Say) -> list[Row]:
    """Return a row for each question: its seconds, and the peak memory of the process so far.

    The first questions are plans of one recipe, at other lengths, that share a cache of plans. Each of the
    others begins with an empty one. ``fit`` and ``max_context`` have the memory of the default device, and
    the default host memory.
    """
    length = parse_tokens(tokens)

    def plan_of(part: float) -> None:
        plan(model, recipe, tokens=int(length * part), ranks=ranks)

    lengths = {"": 1.0, ", again": 1.0, ", at 3/4 of the tokens": 3 / 4, ", at 1/2 of the tokens": 1 / 2}
    plans: dict[str, Callable[[], object]] = {
        f"plan{which}": partial(plan_of, part) for which, part in lengths.items()
    }
    others: dict[str, Callable[[], object]] = {
        "ladder": lambda: plan_ladder(model, tokens=length, ranks=ranks),
        "max-context": lambda: max_context(model, recipe, ranks=ranks),
        "fit": lambda: fit(model, tokens=length, ranks=ranks),
    }
    command = ["-m", "lab", "plan", model, "--recipe", recipe, "--tokens", tokens, "--ranks", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        _run_python(command, folder)
        rows = [
            _measure("python -c pass", lambda: _run_python(["-c", "pass"], folder), say),
            _measure("lab plan, again", lambda: _run_python(command, folder), say),
        ]
    for questions in (plans, *({name: others[name]} for name in others)):
        with (
            tempfile.TemporaryDirectory() as empty,
            patch.object(plan_cache, "folder", lambda _: Path(empty)),
        ):
            rows += [_measure(name, work, say) for name, work in questions.items()]
    return rows


def _run_python(arguments: list[str], cache: str) -> None:
    """Run Python with these arguments and a user's cache of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)


def _measure(name: str, work: Callable[[], object], say: Say) -> Row:
    say(name)
    taken = seconds(work)
    # Linux counts the peak in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"answer": name, "seconds": taken, "process peak, MiB": round(peak / MiB)}
