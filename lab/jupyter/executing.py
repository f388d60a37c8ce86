"""Executing notebooks as programs: find them, check their parameters, execute them into copies."""

from __future__ import annotations

import ast
import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import papermill
from rich.console import Console
from rich.markup import escape
from traitlets.config import Config

from lab.errors import NotebookError
from lab.jupyter.notebook_files import FOLDER, code_cells, first_line, own_notebooks, read_notebook
from lab.jupyter.storing import find_stale, store
from lab.units import abbreviate, format_seconds


@dataclass(frozen=True)
class Notebook:
    """A notebook file.

    Attributes:
        path: The file.
        defaults: The values that its ``parameters`` cell assigns, by name.
    """

    path: Path
    defaults: dict[str, Any]

    @property
    def name(self) -> str:
        """The name on the command line: that of the file, without its suffix."""
        return self.path.stem


def find_notebooks(names: list[str]) -> list[Notebook]:
    """Return the notebooks of these names or paths; without names, all notebooks of the lab, in order.

    Raises:
        NotebookError: A notebook does not exist, or has no ``parameters`` cell of literals.
    """
    known = own_notebooks()
    paths = [known.get(name.removesuffix(".ipynb")) or _find_other(name, known) for name in names or known]
    return [_read(path) for path in paths]


def refuse_notebook(model: str) -> None:
    """Check that ``model`` is not the name of a notebook.

    Raises:
        NotebookError: It is.
    """
    if model.endswith(".ipynb") or model in {path.stem for path in FOLDER.glob("*.ipynb")}:
        raise NotebookError(f"{model} is a notebook: lab execute {model} executes it; lab run takes a model")


def parse_parameters(notebook: Notebook, texts: dict[str, str]) -> dict[str, Any]:
    """Return the values of parameters given as text, each of the type of the notebook's default.

    Raises:
        NotebookError: The notebook does not have a parameter of this name, or a value has another type.
    """
    values = {}
    for name, text in texts.items():
        if name not in notebook.defaults:
            raise NotebookError(
                f"{notebook.name} has no parameter {name!r}: it takes {', '.join(notebook.defaults)}"
            )
        values[name] = _as_type_of(notebook.defaults[name], text, f"{notebook.name}: {name}")
    return values


@dataclass(frozen=True)
class Outcome:
    """The result of executing a notebook once.

    Attributes:
        seconds: How long it took.
        copy: The executed copy.
        failure: The cell that failed and its error; None if no cell failed.
    """

    seconds: float
    copy: Path
    failure: str | None = None


def execute_one(notebook: Notebook, values: dict[str, Any], folder: Path) -> Outcome:
    """Execute a notebook with these parameters into a copy in ``folder``, and return when it has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    copy, failure, start = folder / notebook.path.name, None, time.perf_counter()
    try:
        with TemporaryDirectory(prefix="lab-") as sockets:
            papermill.execute_notebook(
                notebook.path,
                copy,
                parameters=values,
                kernel_name="python3",
                progress_bar={"desc": notebook.name},
                # On a busy machine a kernel may be slow to start, and its outputs to arrive.
                start_timeout=180,
                iopub_timeout=60,
                coalesce_streams=True,
                # The kernel's sockets are files, so its messages are on no network, not even the local one.
                # Each kernel has a folder of its own: two kernels in one folder would share the files.
                config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
            )
    except papermill.PapermillExecutionError as error:
        failure = f"cell {error.cell_index}: {error.ename}: {error.evalue}"
    except (RuntimeError, TimeoutError) as error:
        # The kernel died or did not start.
        failure = f"{type(error).__name__}: {error}"
    if copy.exists():
        drop_erased_lines(copy)
    return Outcome(time.perf_counter() - start, copy, failure)


def drop_erased_lines(copy: Path) -> None:
    """Remove from an executed notebook what is left of lines that said what goes on, and were erased."""
    notebook = nbformat.read(copy, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs = [
            output for output in cell.outputs if output.get("name") != "stderr" or output.text.strip()
        ]
    nbformat.write(notebook, copy)


def execute(
    names: list[str],
    parameters: dict[str, str],
    out: Path | None = None,
    *,
    in_place: bool = False,
    stale: bool = False,
) -> list[str]:
    """Execute notebooks one after the other into copies under ``out``.

    All names and parameters are checked before the first notebook starts. A failure is printed with its cell
    and its message, and the next notebook is executed.

    Args:
        names: Names or paths of notebooks; without names, all notebooks of the lab.
        parameters: Values for the ``parameters`` cells, as text, by name.
        out: The folder of the copies; None for ``runs/<date>``.
        in_place: Whether the outputs of a copy are stored in its notebook, if no cell failed.
        stale: Whether those alone are executed whose stored outputs are stale; see ``find_stale``.

    Returns:
        The names of the notebooks that failed.

    Raises:
        NotebookError: A notebook or a parameter does not exist, a notebook cannot be read, or ``out`` is the
            folder of a notebook or cannot be made; or parameters with ``in_place``.
    """
    if in_place and parameters:
        raise NotebookError("--in-place stores what a notebook shows at its own parameters: leave out -p")
    console = Console(stderr=True, highlight=False)
    notebooks = find_notebooks(names)
    if stale:
        reasons = {notebook.name: find_stale(notebook.path) for notebook in notebooks}
        notebooks = [notebook for notebook in notebooks if reasons[notebook.name]]
        for notebook in notebooks:
            console.print(f"stale: {notebook.name}, {reasons[notebook.name]}", markup=False, soft_wrap=True)
        if not notebooks:
            console.print("no notebook is stale")
            return []
    work = [(notebook, parse_parameters(notebook, parameters)) for notebook in notebooks]
    folder = out or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotebookError(f"--out {folder} cannot be made: {error.strerror}") from error
    for notebook, _ in work:
        if folder.resolve() == notebook.path.resolve().parent:
            raise NotebookError(f"--out {folder} is where {notebook.path.name} is: name another folder")
    seconds = sum(known_seconds().get(notebook.name[:2], 0) for notebook in notebooks)
    if seconds and not parameters:
        console.print(f"about {format_seconds(seconds)} on two cores, by notebooks/README.md")
    failed = []
    for notebook, values in work:
        outcome = execute_one(notebook, values, folder)
        if outcome.failure is not None:
            failed.append(notebook.name)
            console.print(f"[red]failed[/] {notebook.name}, {escape(outcome.failure)}", soft_wrap=True)
        else:
            if in_place:
                store(outcome.copy, notebook.path)
            console.print(
                f"[green]passed[/] {notebook.name} in {outcome.seconds:.0f} s -> "
                f"{notebook.path if in_place else outcome.copy}",
                soft_wrap=True,
            )
    return failed


def known_seconds() -> dict[str, int]:
    """Return the seconds that an execution takes on two cores, by the first two letters of a notebook's name.

    They are those of the table in the README of the notebooks.
    """
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    numbers, seconds = re.findall(r"^\| (\d\d .*) \|$", page.partition("## How long they take")[2], re.M)[:2]
    return dict(zip(numbers.split(" | "), map(int, seconds.split(" | ")), strict=True))


def _find_other(name: str, known: dict[str, Path]) -> Path:
    # A Path raises where a name is too long for a file.
    if os.path.isfile(name):
        return Path(name)
    close = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise NotebookError(f"unknown notebook {abbreviate(repr(name))}{hint}: the lab has {', '.join(known)}")


def _read(path: Path) -> Notebook:
    tagged = code_cells(read_notebook(path), "parameters")
    if not tagged:
        raise NotebookError(f"{path.name} has no cell tagged 'parameters'")
    defaults = {}
    try:
        statements = ast.parse(tagged[0].source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotebookError(f"{path.name}: its parameters are no Python: {first_line(error)}") from error
    for statement in statements:
        try:
            [target], value = statement.targets, statement.value
            defaults[target.id] = ast.literal_eval(value)
        except (AttributeError, ValueError):
            raise NotebookError(
                f"{path.name}: its parameters must be literals, and {ast.unparse(statement)!r} is not one"
            ) from None
    return Notebook(path, defaults)


def _as_type_of(default: Any, text: str, where: str) -> Any:
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default) and default is not None:
        raise NotebookError(
            f"{where} = {text!r} is not {_type_name(default)}: give a value like {default!r}, its default"
        )
    return value


def _type_name(value: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "True or False", list: "a list", dict: "a dict"}
    return names.get(type(value), type(value).__name__)
