"""The notebooks again and again: whether each comes to its end with the stored facts, and what it takes."""

from __future__ import annotations

from itertools import compress, zip_longest
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import nbformat

from lab.bench.table import Row, Say
from lab.jupyter.executing import Outcome, execute_one, find_notebooks

FACT = "# NBVAL_CHECK_OUTPUT"
"""The first line of a cell that prints the same on every machine."""


def measure_notebooks(names: list[str], times: int, say: Say) -> list[Row]:
    """One row a notebook of ``names`` (all, when none is named): how often it failed, the facts that it
    printed otherwise than stored, and its seconds.

    The whole sequence is executed ``times`` times, each notebook at its stored size, as ``lab execute`` does.

    Raises:
        NotebookError: no such notebook.
    """
    notebooks = find_notebooks(names)
    outcomes: list[list[Outcome]] = [[] for _ in notebooks]
    changes: list[list[str]] = [[] for _ in notebooks]
    with TemporaryDirectory() as folder:
        for number in range(times):
            for notebook, done, changed in zip(notebooks, outcomes, changes, strict=True):
                say(f"{notebook.name}: {number + 1} of {times}")
                done.append(execute_one(notebook, {}, Path(folder)))
                if done[-1].failure is None:
                    changed += changed_facts(notebook.path, done[-1].copy)
    rows: list[Row] = []
    for notebook, done, changed in zip(notebooks, outcomes, changes, strict=True):
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
                "facts changed": len(changed),
                "first change": changed[0] if changed else None,
            }
        )
    return rows


def changed_facts(stored: Path, copy: Path) -> list[str]:
    """Return a line for each fact of a stored notebook that its executed copy printed otherwise.

    The line names the cell, counted from 0 among the cells of code, and has the first line that differs.
    """
    changes = []
    for number, (before, after) in enumerate(zip(_facts(stored), _facts(copy), strict=True)):
        if before != after:
            pairs = list(zip_longest((before or "").splitlines(), (after or "").splitlines(), fillvalue=""))
            old, new = next(compress(pairs, (a != b for a, b in pairs)))
            changes.append(f"cell of code {number}: {new!r}, stored {old!r}")
    return changes


def _facts(path: Path) -> list[str | None]:
    """What each cell of code printed; None where that is no fact."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return [
        "".join(output.get("text", "") for output in cell.outputs) if cell.source.startswith(FACT) else None
        for cell in cells
    ]
