"""Notebook files: where the lab's are, and how one is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from cluster.folders import write_whole
from lab.errors import NotebookError
from lab.units import abbreviate

FOLDER = (Path(__file__).parent / "notebooks").resolve()
"""The folder of the lab's own notebooks. In a clone it is a link to the folder at the top."""

WIDGET = "application/vnd.jupyter.widget-view+json"
"""The kind of output that is a widget."""


def own_notebooks() -> dict[str, Path]:
    """Return the files of the lab's own notebooks by name, in order.

    Raises:
        NotebookError: There are none, as in a copy of a clone without its links.
    """
    own = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if not own:
        raise NotebookError(f"no notebooks in {FOLDER}, a link to the clone's folder: clone the lab again")
    return own


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook of format 4.

    Raises:
        NotebookError: The file cannot be read, or is no such notebook.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        document: Any = json.loads(text)
    except OSError as error:
        raise NotebookError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise NotebookError(f"{path} is no notebook: it is not JSON ({first_line(error)})") from error
    version = document.get("nbformat") if isinstance(document, dict) else None
    if version is None:
        raise NotebookError(f"{path} is no notebook: its JSON has no 'nbformat'")
    if version != 4:
        raise NotebookError(
            f"{path} is a notebook of format {abbreviate(repr(version))}: the lab reads format 4, to which "
            "JupyterLab converts it: open it there and save it"
        )
    cells = document.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise NotebookError(f"{path} is no notebook of format 4: 'cells' must be a list of objects")
    try:
        nbformat.validate(document)
        notebook: NotebookNode = nbformat.v4.reads(text)
    except Exception as error:  # nbformat raises errors of many kinds
        raise NotebookError(f"{path} is no notebook of format 4: {first_line(error)}") from error
    return notebook


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook, whole or not at all.

    Raises:
        OSError: See `write_whole`.
    """
    write_whole(path, f"{nbformat.writes(notebook)}\n".encode())


def code_cells(notebook: NotebookNode, tag: str | None = None) -> list[NotebookNode]:
    """Return the cells of code; with a tag, those that have it."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in cells if tag is None or tag in cell.metadata.get("tags", [])]


def source_hash(cells: Iterable[NotebookNode]) -> str:
    """Return a hash of the sources of cells. Their outputs do not change it."""
    return sha256("\0".join(cell.source for cell in cells).encode()).hexdigest()[:16]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its beginning."""
    return abbreviate(str(error).strip().partition("\n")[0], 200) or type(error).__name__
