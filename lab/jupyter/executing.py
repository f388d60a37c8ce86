"""Notebooks as programs: find them, check their parameters, execute them into copies."""

from __future__ import annotations

import ast
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

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


@dataclass(frozen=True)
class Notebook:
    """A notebook and the defaults of its ``parameters`` cell, by name."""

    path: Path
    defaults: dict[str, Any]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem


def find(names: list[str]) -> list[Notebook]:
    """The notebooks of these names (or paths); all of the lab's own, in order, when none is given.

    Raises:
        NotebookError: no such notebook, or one without a ``parameters`` cell of literals.
    """
    known = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if not known:
        raise NotebookError(
            f"no notebooks in {FOLDER}: install the lab from its clone, with pip install -e ."
        )
    paths = [known.get(name.removesuffix(".ipynb")) or _outside(name, known) for name in names or known]
    return [_read(path) for path in paths]


def refuse_notebook(model: str) -> None:
    """Check that the name of a model is not that of a notebook.

    Raises:
        NotebookError: it is.
    """
    if model.endswith(".ipynb") or model in {path.stem for path in FOLDER.glob("*.ipynb")}:
        raise NotebookError(f"{model} is a notebook: lab execute {model} executes it; lab run takes a model")


def with_parameters(notebook: Notebook, given: dict[str, str]) -> dict[str, Any]:
    """The given values, each read as the type of the notebook's own default.

    Raises:
        NotebookError: a name the notebook does not take, or a value of another type.
    """
    values = {}
    for name, text in given.items():
        if name not in notebook.defaults:
            raise NotebookError(
                f"{notebook.name} has no parameter {name!r}: it takes {', '.join(notebook.defaults)}"
            )
        values[name] = _as_type_of(notebook.defaults[name], text, f"{notebook.name}: {name}")
    return values


@dataclass(frozen=True)
class Outcome:
    """One execution: how long it took, where the copy is, and what failed in which cell, if anything did."""

    seconds: float
    copy: Path
    failure: str | None = None


def execute_one(notebook: Notebook, values: dict[str, Any], folder: Path) -> Outcome:
    """Execute a notebook with these parameters into a copy in ``folder``, and wait for its end."""
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
                # Sockets in the file system: the kernel's traffic is on no network, not even a local one; in
                # a folder of their own, for two kernels begun in one folder at once would take the same.
                config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
            )
    except papermill.PapermillExecutionError as error:
        failure = f"cell {error.cell_index}: {error.ename}: {error.evalue}"
    except (RuntimeError, TimeoutError) as error:
        # The kernel died, or never came up.
        failure = f"{type(error).__name__}: {error}"
    return Outcome(time.perf_counter() - start, copy, failure)


def execute(names: list[str], given: dict[str, str], out: Path | None = None) -> list[str]:
    """Execute notebooks one after the other into copies under ``out``; return the names that failed.

    Everything is checked before the first one starts. A failure is printed with its cell and its message
    (which names the rank, where a rank failed) and the rest goes on.
    """
    console = Console(stderr=True, highlight=False)
    work = [(notebook, with_parameters(notebook, given)) for notebook in find(names)]
    folder = out or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for notebook, _ in work:
        if folder.resolve() == notebook.path.resolve().parent:
            raise NotebookError(f"--out {folder} is where {notebook.path.name} is: name another folder")
    failed = []
    for notebook, values in work:
        done = execute_one(notebook, values, folder)
        if done.failure is not None:
            failed.append(notebook.name)
            console.print(f"[red]failed[/] {notebook.name}, {escape(done.failure)}", soft_wrap=True)
        else:
            console.print(
                f"[green]passed[/] {notebook.name} in {done.seconds:.0f} s -> {done.copy}", soft_wrap=True
            )
    return failed


def _outside(name: str, known: dict[str, Path]) -> Path:
    if Path(name).is_file():
        return Path(name)
    close = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise NotebookError(f"unknown notebook {name!r}{hint}: the lab has {', '.join(known)}")


def _read(path: Path) -> Notebook:
    cells = nbformat.read(path, as_version=4).cells
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    if not tagged:
        raise NotebookError(f"{path.name} has no cell tagged 'parameters'")
    defaults = {}
    for statement in ast.parse(tagged[0].source).body:
        try:
            [target], value = statement.targets, statement.value
            defaults[target.id] = ast.literal_eval(value)
        except (AttributeError, ValueError):
            raise NotebookError(
                f"{path.name}: its parameters are to be literals, {ast.unparse(statement)!r} is none"
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
            f"{where} = {text!r} is not {_named(default)}: give a value like {default!r}, its default"
        )
    return value


def _named(value: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "True or False", list: "a list", dict: "a dict"}
    return names.get(type(value), type(value).__name__)
