"""Executing the notebooks several times: failures, facts that differ from the stored ones, and seconds."""

from __future__ import annotations

import json
from itertools import compress, zip_longest
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import nbformat

from lab.bench.table import Row, Say
from lab.jupyter.executing import Outcome, execute_one, find_notebooks
from lab.jupyter.notebook_files import code_cells

FACT = "nbval-check-output"
"""nbval's tag of a cell that prints a fact: a text that is the same on every machine."""


def measure_notebooks(names: list[str], times: int, say: Say) -> list[Row]:
    """Execute all notebooks ``times`` times, as ``lab execute`` does, and return a row for each.

    A row has the number of failures, the number of facts that differ from the stored ones, and the seconds.

    Args:
        names: Names or paths of notebooks; without names, all notebooks of the lab.
        times: How often all of them are executed.
        say: Shows what is measured now.

    Raises:
        NotebookError: A notebook does not exist.
    """
    notebooks = find_notebooks(names)
    outcomes: list[list[Outcome]] = [[] for _ in notebooks]
    changes: list[list[str]] = [[] for _ in notebooks]
    with TemporaryDirectory() as folder:
        for number in range(times):
            for notebook, results, changed in zip(notebooks, outcomes, changes, strict=True):
                say(f"{notebook.name}: {number + 1} of {times}")
                results.append(execute_one(notebook, {}, Path(folder)))
                if results[-1].failure is None:
                    changed += changed_facts(notebook.path, results[-1].copy)
    rows: list[Row] = []
    for notebook, results, changed in zip(notebooks, outcomes, changes, strict=True):
        seconds = [outcome.seconds for outcome in results]
        failures = [outcome.failure for outcome in results if outcome.failure]
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
    """Return a line for each fact that differs between a stored notebook and its executed copy.

    The line has the number of the cell, counted from 0 among the cells of code, and the first difference.
    """
    changes = []
    for number, (before, after) in enumerate(zip(_facts(stored), _facts(copy), strict=True)):
        if before != after:
            pairs = list(zip_longest((before or "").splitlines(), (after or "").splitlines(), fillvalue=""))
            old, new = next(compress(pairs, (a != b for a, b in pairs)))
            changes.append(f"cell of code {number}: {new!r}, stored {old!r}")
    return changes


def _facts(path: Path) -> list[str | None]:
    """Return the output of each cell of code that prints a fact, or shows one; None for the other cells.

    What is on stderr is no fact: a wait says there what goes on.
    """
    notebook = nbformat.read(path, as_version=4)
    facts = code_cells(notebook, FACT)
    return ["".join(map(_text, cell.outputs)) if cell in facts else None for cell in code_cells(notebook)]


def _text(output: nbformat.NotebookNode) -> str:
    if "data" in output:
        return json.dumps(output.data, sort_keys=True)
    return "" if output.get("name") == "stderr" else output.get("text", "")
