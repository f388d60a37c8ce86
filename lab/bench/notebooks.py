"""The notebooks again and again: whether each comes to its end every time, and what it takes."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from lab.bench.table import Row, Say
from lab.jupyter.executing import Outcome, execute_one, find


def measure_notebooks(names: list[str], times: int, say: Say) -> list[Row]:
    """One row a notebook of ``names`` (all, when none is named): how often it failed, and its seconds.

    The whole sequence is executed ``times`` times, each notebook at its stored size, as ``lab execute`` does.

    Raises:
        NotebookError: no such notebook.
    """
    notebooks = find(names)
    outcomes: list[list[Outcome]] = [[] for _ in notebooks]
    with TemporaryDirectory() as folder:
        for number in range(times):
            for notebook, done in zip(notebooks, outcomes, strict=True):
                say(f"{notebook.name}: {number + 1} of {times}")
                done.append(execute_one(notebook, {}, Path(folder)))
    rows: list[Row] = []
    for notebook, done in zip(notebooks, outcomes, strict=True):
        seconds = [outcome.seconds for outcome in done]
        failures = [outcome.failure for outcome in done if outcome.failure]
        rows.append(
            {
                "notebook": notebook.name,
                "executed": times,
                "failed": len(failures),
                "seconds, median": median(seconds),
                "worst": max(seconds),
                "first failure": failures[0] if failures else None,
            }
        )
    return rows
