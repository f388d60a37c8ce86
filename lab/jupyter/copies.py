"""A reader's own copies of the notebooks, for ``lab open``: made once, and never written over.

A participant's copy has no outputs and no solutions. A teacher's copy has both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from lab.errors import NotebookError
from lab.jupyter.notebook_files import FOLDER, code_cells, read_notebook, source_hash, write_notebook

PARTICIPANT, TEACHER = Path("my_notebooks"), Path("teacher_notebooks")
"""Where the copies of a participant and of a teacher go, in the working folder."""

_ANSWER = "# Your answer. `lab open --teacher` opens copies with the solutions."


@dataclass(frozen=True)
class Copies:
    """The copies in a folder.

    Attributes:
        folder: The folder.
        made: The names of the notebooks that were copied now.
        outdated: The names of the notebooks whose copies were made of another version of the lab. They were
            left as they are.
    """

    folder: Path
    made: tuple[str, ...]
    outdated: tuple[str, ...]


def make_copies(folder: Path, *, teacher: bool = False) -> Copies:
    """Copy the notebooks of the lab, and the files that they link to, into ``folder``.

    A file that exists there is left as it is, whatever it contains.

    Args:
        folder: Where the copies go. It is made if it does not exist.
        teacher: Whether the copies keep outputs and solutions.

    Raises:
        NotebookError: ``folder`` is the folder of the original notebooks, or cannot be written to.
    """
    if folder.resolve().is_relative_to(FOLDER):
        raise NotebookError(f"{folder} is where the lab's own notebooks are: give another folder")
    made, outdated = [], []
    try:
        for source in _files():
            target = folder / source.relative_to(FOLDER)
            if source.suffix != ".ipynb":
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)
                continue
            notebook = read_notebook(source)
            version = source_hash(notebook.cells)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                notebook.metadata["lab"] = NotebookNode(notebook=source.stem, version=version)
                write_notebook(notebook if teacher else for_participants(notebook), target)
                made.append(source.stem)
            elif version_of_copy(target) != version:
                outdated.append(source.stem)
    except OSError as error:
        raise NotebookError(f"{folder} cannot be written to: {error.strerror}; give another folder") from None
    return Copies(folder, tuple(made), tuple(outdated))


def version_of_copy(path: Path) -> str | None:
    """Return the version of the notebook that this file is a copy of; None if the file does not say."""
    try:
        version: str | None = read_notebook(path).metadata.get("lab", {}).get("version")
    except NotebookError:
        return None
    return version


def for_participants(notebook: NotebookNode) -> NotebookNode:
    """Remove the outputs and the solutions of a notebook, in place, and return it.

    A solution becomes a cell for an answer, and the solution of a stub a cell that checks the stub.
    """
    notebook.metadata.pop("widgets", None)
    stub = False
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
        tags = cell.metadata.get("tags", [])
        if "solution" in tags:
            cell.source = f"!lab check {notebook.metadata.lab.notebook[:2]}" if stub else _ANSWER
            cell.metadata = NotebookNode(tags=["check" if stub else "answer"])
        stub = "stub" in tags
    return notebook


def _files() -> Iterator[Path]:
    """The notebooks and the files that they link to."""
    yield from sorted(FOLDER.glob("*.ipynb"))
    yield from sorted(FOLDER.glob("*.md"))
    yield from sorted((FOLDER / "images").iterdir())
