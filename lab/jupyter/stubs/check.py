"""``lab check``: run the stub of a reader's saved notebook, and say what is right and what is wrong."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.processes import end, family
from cluster.watchdog import is_alive
from lab.errors import NotebookError
from lab.jupyter.copies import PARTICIPANT
from lab.jupyter.notebook_files import FOLDER, code_cells, read_notebook
from lab.jupyter.stubs import END

STUBS = {
    "02_ulysses": "exchange",
    "03_activation_checkpointing": "checkpointing",
    "05_sequence_tiling": "tiled_mlp",
    "06_untied_ulysses": "head_schedule",
}
"""The module of this package that checks the stub of each notebook."""

SECONDS = 60.0
"""How long a cell and its checks may take, and in addition the start of their process and its ranks."""

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Answer:
    """The result of one check.

    Attributes:
        title: What was checked.
        wrong: What was wrong, as one line; None if it is right.
    """

    title: str
    wrong: str | None


def find_stub(name: str) -> str:
    """Return the notebook that ``name`` begins: ``02`` is ``02_ulysses``.

    Raises:
        NotebookError: No notebook with a stub has this name.
    """
    found = [notebook for notebook in STUBS if notebook.startswith(name.removesuffix(".ipynb"))]
    if len(found) != 1 or not name:
        raise NotebookError(
            f"{name!r} is no notebook with a stub; these have one: {', '.join(STUBS)} (02 is 02_ulysses)"
        )
    return found[0]


def find_copy(notebook: str, folder: Path | None) -> Path:
    """Return a reader's copy of a notebook.

    Args:
        notebook: The name of the notebook.
        folder: Where the copies are. None stands for the working folder if it has copies, as in a cell or in
            a terminal of JupyterLab, and otherwise for ``my_notebooks`` in it.

    Raises:
        NotebookError: There is no copy, or it is the lab's own notebook.
    """
    folders = [folder] if folder is not None else [Path(), PARTICIPANT]
    for one in folders:
        path = one / f"{notebook}.ipynb"
        if path.is_file() and path.resolve().parent != FOLDER:
            return path
    raise NotebookError(
        f"no copy of {notebook} in {' or '.join(str(one.resolve()) for one in folders)}: `lab open` makes "
        "one, and --folder says where it is"
    )


def stub_of(path: Path) -> str:
    """Return the source of the cell that is tagged ``stub``, without the magic in its first line.

    Raises:
        NotebookError: The file is no notebook, or not exactly one of its cells has the tag.
    """
    sources = [cell.source for cell in code_cells(read_notebook(path), "stub")]
    if len(sources) != 1:
        raise NotebookError(
            f"{path}: {len(sources)} cells of code are tagged 'stub', and one must be; `lab open --folder "
            "OTHER` makes a new copy to compare with"
        )
    return without_magic(sources[0])


def without_magic(source: str) -> str:
    """Return a cell with an empty line in place of ``%%ranks``, so that its lines keep their numbers."""
    first, rest = (source + "\n").split("\n", 1)
    return "\n" + rest if first.startswith("%%") else source


def solution_of(notebook: str) -> str:
    """Return the lab's own solution of a stub."""
    cells = read_notebook(FOLDER / f"{notebook}.ipynb").cells
    [place] = [i for i, cell in enumerate(cells) if "stub" in cell.metadata.get("tags", [])]
    return str(cells[place + 1].source)


def check(notebook: str, source: str, *, seconds: float = SECONDS) -> Iterator[Answer]:
    """Run a stub and its checks in a process of their own.

    The process, and each process that the cell has left running, is ended when the iteration ends.

    Args:
        notebook: The name of the notebook.
        source: The source of the cell.
        seconds: How long the checks may take, and how long the start of their process may take before.

    Yields:
        The result of each check, up to the first that is wrong. A cell that does not end in time, ends its
        process, or leaves a process running is wrong too.
    """
    read, write = os.pipe()
    module = f"lab.jupyter.stubs.{STUBS[notebook]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.jupyter.stubs.process", module, str(write)],
        stdin=subprocess.PIPE,
        pass_fds=[write],
        # The checks are small. Where there are fewer GPUs than ranks, ranks on GPUs would be refused.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    os.close(write)
    seen: set[psutil.Process] = set()
    try:
        _send(process, source)
        yield from _answers(process, read, seen, seconds)
    finally:
        end(seen | family([process.pid]), patience=2)
        process.communicate()
        os.close(read)


def _send(process: subprocess.Popen[bytes], source: str) -> None:
    """Send the cell. The input stays open: the process ends when it is closed."""
    assert process.stdin is not None
    # A lone surrogate, which JSON can have, is no character of UTF-8.
    process.stdin.write((source + END).encode(errors="replace"))
    process.stdin.flush()


def _answers(
    process: subprocess.Popen[bytes], read: int, seen: set[psutil.Process], seconds: float
) -> Iterator[Answer]:
    """Yield what the process reports, and how it ended; collect its descendants in ``seen``."""
    deadline, rest, own = time.monotonic() + seconds, b"", list[int]()
    while time.monotonic() < deadline:
        ready, _, _ = select.select([read], [], [], _POLL_SECONDS)
        seen |= family([process.pid])
        received = os.read(read, 1 << 16) if ready else b""
        *lines, rest = (rest + received).split(b"\n")
        for line in map(json.loads, lines):
            if line is None:
                # A process that detached itself a moment ago is an orphan, which the check's process adopts.
                seen |= family([process.pid])
                left = [one for one in seen if own and one.pid not in own and is_alive(one)]
                if left:
                    names = ", ".join(sorted({one.name() for one in left}))
                    yield Answer("The cell leaves nothing running", f"it left {names} running, now ended")
                return
            if isinstance(line, dict):
                # What is there before the cell runs, with the process that ranks are forks of.
                deadline, own = time.monotonic() + seconds, line["own"]
            else:
                yield Answer(*line)
        if not received and process.poll() is not None:
            yield Answer("The cell returns", f"it ended its process, with exit code {process.returncode}")
            return
    yield Answer("The cell returns", f"it did not within {seconds:.0f} s, and was ended")
