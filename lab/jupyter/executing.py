"""Executing notebooks as programs: find them, check their parameters, execute them into copies."""

from __future__ import annotations

import ast
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import papermill
import zmq
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from rich.console import Console
from rich.markup import escape
from traitlets.config import Config

from cluster import limits
from cluster.temporary import PREFIX, places, temporary_folder
from lab.errors import NotebookError
from lab.jupyter.notebook_files import (
    FOLDER,
    code_cells,
    first_line,
    own_notebooks,
    read_notebook,
    write_notebook,
)
from lab.jupyter.storing import find_stale, store
from lab.units import abbreviate, format_seconds

KERNELS = Path(__file__).parent
"""The folder with a kernel ``python3``. Its "python" stands for the Python in which the lab runs."""

KERNEL_THREADS = 20
"""The threads of a kernel and of its client."""


@dataclass(frozen=True)
class Notebook:
    """A notebook file.

    Attributes:
        path: The file.
        defaults: The values that its ``parameters`` cell assigns, by name.
        kinds: The types that each may have: those of its annotation, or else its own; none for any.
        given: The values with which an executed copy was executed, by name.
    """

    path: Path
    defaults: dict[str, Any]
    kinds: dict[str, tuple[type, ...]]
    given: dict[str, Any]

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
    """Return the values of parameters given as text, each of the type of the notebook's own.

    Values with which an executed copy was executed hold, unless they are given anew.

    Raises:
        NotebookError: The notebook does not have a parameter of this name, or a value has another type.
    """
    values = dict(notebook.given)
    for name, text in texts.items():
        if name not in notebook.defaults:
            raise NotebookError(
                f"{notebook.name} has no parameter {name!r}: it takes {', '.join(notebook.defaults)}"
            )
        where, default = f"{notebook.name}: {name}", notebook.defaults[name]
        values[name] = _as_one_of(notebook.kinds[name], default, text, where)
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
    copy, failure, start = folder / notebook.path.name, None, time.perf_counter()
    killed, where = limits.killed_for_memory(), ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)
        _check_threads()
        own_python_first()
        # It warns of parameters whose annotations it cannot read.
        logging.getLogger("papermill").setLevel(logging.ERROR)
        with temporary_folder(folder_for_sockets()) as temporary:
            # papermill writes it again after each cell.
            executed = temporary / "executed.ipynb"
            # The kernel's sockets are files, so its messages are on no network, not even the local one. Each
            # kernel has a folder of its own: two in one folder would share the files.
            files = {"transport": "ipc", "ip": f"{temporary}/kernel", "connection_file": f"{temporary}/key"}
            try:
                papermill.execute_notebook(
                    read_notebook(notebook.path),
                    executed,
                    parameters=values,
                    kernel_name="python3",
                    progress_bar={"desc": notebook.name},
                    # On a busy machine a kernel may be slow to start, and its outputs to arrive.
                    start_timeout=180,
                    iopub_timeout=60,
                    config=Config({"KernelManager": files}),
                    # One that is interrupted would print the traceback of a reply that it cannot send.
                    extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
                )
            finally:
                with suppress(NotebookError):  # it was cut short
                    if executed.exists():
                        where = f"cell {_finish(executed, notebook.path, copy)}: "
    except papermill.PapermillExecutionError as error:
        failure = f"cell {error.cell_index}: {error.ename}: {error.evalue}"
    except KeyboardInterrupt:
        # Of the tasks that are left, asyncio would print that nobody has taken their errors.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    except DeadKernelError:
        full = limits.killed_for_memory() > killed
        why = ": memory was used up; a smaller size needs less" if full else ""
        failure = f"{where}the kernel died{why}"
    except (RuntimeError, OSError, zmq.ZMQError, NotebookError) as error:
        # The kernel did not start, or a disk is full.
        failure = _in_one_line(error, copy)
    return Outcome(time.perf_counter() - start, copy, failure)


def folder_for_sockets() -> str:
    """Return a folder for the sockets of kernels: that of temporary files, unless its path is too long.

    Raises:
        NotebookError: No folder has a path that is short enough.
    """
    longest = zmq.IPC_PATH_MAX_LEN - len(f"/{PREFIX}01234567/kernel-5")
    for folder in places():
        if 0 < len(os.fsencode(folder)) <= longest and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise NotebookError(
        f"the sockets of a kernel need a folder whose path has at most {longest} bytes: set TMPDIR to one"
    )


def own_python_first() -> None:
    """Have Jupyter start the Python in which the lab runs, whatever other kernels are named ``python3``."""
    paths = [str(KERNELS), *filter(None, os.environ.get("JUPYTER_PATH", "").split(os.pathsep))]
    os.environ["JUPYTER_PATH"] = os.pathsep.join(dict.fromkeys(paths))


def _check_threads() -> None:
    """Check that a kernel can start its threads: ZeroMQ ends the whole process where it cannot start one."""
    if (free := limits.free_threads()) < KERNEL_THREADS:
        raise NotebookError(
            f"a kernel needs about {KERNEL_THREADS} threads, and {free:.0f} can be started here (ulimit "
            "-u, or the container's limit of processes): raise that limit, or end other programs"
        )


def _in_one_line(error: Exception, path: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror}"
    return str(error) if isinstance(error, NotebookError) else f"{type(error).__name__}: {error}"


def _finish(executed: Path, source: Path, copy: Path) -> int:
    """Write what papermill executed, with tidy outputs, as ``copy``; return the last cell that started."""
    notebook = read_notebook(executed)
    notebook.metadata.papermill.update(input_path=str(source), output_path=str(copy))
    for cell in code_cells(notebook):
        cell.outputs = tidy(cell.outputs)
    write_notebook(notebook, copy)
    notes = [cell.metadata.get("papermill", {}) for cell in notebook.cells]
    return max((number for number, note in enumerate(notes) if note.get("start_time")), default=0)


_ERASED = re.compile(r"^.*\r(?=[^\n])", re.M)


def tidy(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join the parts of each stream, and remove from it what was written over and erased.

    So does nbclient, in a time that grows with the square of a line's length.
    """
    texts: dict[str, list[str]] = {}
    tidied = []
    for output in outputs:
        if output.output_type != "stream" or output.name not in texts:
            tidied.append(output)
        if output.output_type == "stream":
            texts.setdefault(output.name, []).append(output.text)
    streams = [output for output in tidied if output.output_type == "stream"]
    for output in streams:
        output.text = _ERASED.sub("", "".join(texts[output.name]))
    # Which of two streams arrives first is a matter of chance.
    if len(streams) == 2 and streams[0].name == "stderr":
        first, second = map(tidied.index, streams)
        if second == first + 1:
            tidied[first], tidied[second] = tidied[second], tidied[first]
    return [output for output in tidied if output.get("name") != "stderr" or output.text.strip()]


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
    for notebook in notebooks:
        if kept := [f"{name}={value!r}" for name, value in notebook.given.items() if name not in parameters]:
            message = f"{notebook.name} is a copy that was executed with {', '.join(kept)}: that still holds"
            console.print(message, markup=False, soft_wrap=True)
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
        failure = outcome.failure
        if in_place and failure is None:
            try:
                store(outcome.copy, notebook.path)
            except OSError as error:
                failure = _in_one_line(error, notebook.path)
        if failure is not None:
            failed.append(notebook.name)
            console.print(f"[red]failed[/] {escape(f'{notebook.name}, {failure}')}", soft_wrap=True)
        else:
            console.print(
                f"[green]passed[/] {escape(notebook.name)} in {outcome.seconds:.0f} s -> "
                + escape(str(notebook.path if in_place else outcome.copy)),
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
    notebook = read_notebook(path)
    tagged = code_cells(notebook, "parameters")
    if not tagged:
        raise NotebookError(f"{path.name} has no cell tagged 'parameters'")
    defaults, kinds = _literals(tagged[0].source, path)
    given = [cell.source for cell in code_cells(notebook, "injected-parameters")]
    return Notebook(path, defaults, kinds, _literals(given[0], path)[0] if given else {})


def _literals(source: str, path: Path) -> tuple[dict[str, Any], dict[str, tuple[type, ...]]]:
    """Return the values that a cell assigns, and the types that they may have."""
    values, kinds = dict[str, Any](), dict[str, tuple[type, ...]]()
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotebookError(f"{path.name}: its parameters are no Python: {first_line(error)}") from error
    for statement in statements:
        try:
            match statement:
                case ast.Assign([ast.Name(name)], value):
                    annotated = ""
                case ast.AnnAssign(ast.Name(name), annotation, ast.expr() as value):
                    annotated = ast.unparse(annotation)
                case _:
                    raise ValueError
            # As papermill writes it.
            number = re.fullmatch(r"float\('(-?inf|nan)'\)", ast.unparse(value))
            values[name] = float(number[1]) if number else ast.literal_eval(value)
        except ValueError:
            raise NotebookError(
                f"{path.name}: its parameters must be literals, and {ast.unparse(statement)!r} is not one"
            ) from None
        own = () if values[name] is None else (type(values[name]),)
        kinds[name] = _annotated(annotated, f"{path.name}: {name}") or own
    return values, kinds


def _annotated(text: str, where: str) -> tuple[type, ...]:
    known = {"None" if kind is type(None) else kind.__name__: kind for kind in _KINDS}
    names = [name.partition("[")[0].strip("'\" ") for name in text.split("|") if name]
    if not known.keys() >= {*names}:
        raise NotebookError(
            f"{where}: {text} is no type of a parameter: give some of {', '.join(known)}, as in int | None"
        )
    return tuple(known[name] for name in names)


_KINDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "text", list: "a list",
    dict: "a dict", type(None): "None",
}  # fmt: skip


def _as_one_of(kinds: tuple[type, ...], default: Any, text: str, where: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if str in kinds and (type(value) is str or type(value) not in kinds):
        return text
    if float in kinds and int not in kinds and type(value) is int:
        value = float(value)
    if kinds and type(value) not in kinds:
        said = " or ".join(_KINDS.get(kind, kind.__name__) for kind in kinds)
        raise NotebookError(f"{where} = {text!r} is not {said}: give a value like {default!r}, its default")
    return value
