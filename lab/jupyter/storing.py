"""Storing the outputs of an executed copy in its notebook, and finding notebooks whose outputs are stale."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from lab.errors import NotebookError
from lab.jupyter.notebook_files import (
    WIDGET,
    code_cells,
    first_line,
    read_notebook,
    source_hash,
    write_notebook,
)

STATE = "application/vnd.jupyter.widget-state+json"
"""Where a notebook has the states of its widgets."""

_SHOWS_SOURCE = re.compile(r"lab\.show\.source\(.*\)")
_IMPORT = re.compile(r"^(?:import|from) .*$", re.M)


def store(copy: Path, path: Path) -> None:
    """Write the outputs of an executed copy into the notebook at ``path``.

    What papermill adds to a copy, its paths and times, is left out. A widget that has the same place and as
    many parts as before keeps its ids, which a kernel draws at random.
    """
    executed, stored = read_notebook(copy), read_notebook(path)
    text = json.dumps(executed)
    for new, old in zip(_widgets(executed), _widgets(stored), strict=False):
        ids, ids_before = _ids(executed, new), _ids(stored, old)
        if len(ids) == len(ids_before):
            for one, before in zip(ids, ids_before, strict=True):
                text = text.replace(one, before)
    executed = nbformat.from_dict(json.loads(text))
    for cell, new in zip(stored.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = new.outputs, new.execution_count
    if "widgets" in executed.metadata:
        stored.metadata.widgets = executed.metadata.widgets
    stored.metadata.lab = {"executed": source_hash(code_cells(stored))}
    write_notebook(stored, path)


def find_stale(path: Path) -> str | None:
    """Return why the outputs of a stored notebook are stale; None if they are not.

    They are if its code has changed since it was executed, or the code of the lab that it shows. Data that it
    reads may have changed without notice. The imports of a notebook that shows code are executed.

    Raises:
        NotebookError: It cannot be read, see ``read_notebook``, or the code that it shows cannot be found.
    """
    notebook = read_notebook(path)
    cells, known = code_cells(notebook), notebook.metadata.get("lab")
    if not isinstance(known, dict) or "executed" not in known:
        return "lab execute --in-place has not stored its outputs"
    if known["executed"] != source_hash(cells):
        return "its code has changed"
    names, showing = dict[str, Any](), [cell for cell in cells if _SHOWS_SOURCE.fullmatch(cell.source)]
    try:
        if showing:
            exec("\n".join(line for cell in cells for line in _IMPORT.findall(cell.source)), names)
        shown = [str(eval(cell.source, names)) for cell in showing]
    except Exception as error:  # whatever the code of a notebook raises
        raise NotebookError(f"{path}: the code that it shows cannot be found: {first_line(error)}") from error
    for cell, current in zip(showing, shown, strict=True):
        texts = (output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        # The first line has the place of the code in its file, which changes with the code above it.
        if current.partition("\n")[2] not in (text.partition("\n")[2] for text in texts):
            return f"{cell.source} does not show the current code"
    return None


def _widgets(notebook: NotebookNode) -> list[str]:
    """The id of each widget that is an output, in order."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [output.data[WIDGET]["model_id"] for output in outputs if WIDGET in output.get("data", {})]


def _ids(notebook: NotebookNode, widget: str) -> list[str]:
    """The ids of a widget and of its parts, in the order in which they are named."""
    state: dict[str, Any] = notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    ids = [widget]
    for one in ids:
        # The list grows while it is read: the parts of parts follow.
        named = re.findall(r"IPY_MODEL_(\w+)", json.dumps(state.get(one, {}), sort_keys=True))
        ids += [part for part in dict.fromkeys(named) if part not in ids]
    return ids
