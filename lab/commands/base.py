"""What the subcommands share: options, errors as one line, a status line, answers as text or JSON."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from cluster.errors import ClusterError, RankError
from cluster.folders import ensure_home
from lab.errors import DoesNotFitError, LabError
from lab.recipe.recipe import BY_NAME
from lab.units import abbreviate, parse_path

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What adds options to a command."""

DOES_NOT_FIT = 3
"""The exit code if nothing fits. Other errors exit with 2."""


def integer(value: int | str) -> int:
    """Read a whole number in ASCII digits. Python reads those of any script, and as many as there are."""
    return int(_matching(value, r"[+-]?[0-9]{1,19}", "a whole number"))


def number(value: float | str) -> float:
    """Read a number in ASCII digits."""
    digits = r"([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(e[+-]?[0-9]{1,4})?"
    return float(_matching(value, rf"[+-]?({digits}|inf)|nan", "a number"))


def _matching(value: float | str, pattern: str, what: str) -> float | str:
    if isinstance(value, str) and not re.fullmatch(pattern, value, re.IGNORECASE):
        raise click.BadParameter(f"{abbreviate(repr(value))} is not {what}.")
    return value


def path(value: str | Path) -> Path:
    """Read a path, in which ``~`` stands for a home directory."""
    try:
        return parse_path(value)
    except LabError as error:
        raise click.BadParameter(f"{error}.") from None


def once(_context: click.Context, _option: click.Parameter, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check that the values of an option, ``NAME=VALUE`` or two words, give no name twice."""
    names = [value.partition("=")[0] if isinstance(value, str) else value[0] for value in values]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name} is given {names.count(name)} times: give it once.")
    return values


# ---- options of several commands ---------------------------------------------------------------------------


def options(*parts: Decorator) -> Decorator:
    """Return a decorator that adds options or groups of options to a command, in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for part in reversed(parts):
            command = part(command)
        return command

    return add


TOKENS = click.option("--tokens", required=True, help="The length of the context: 8192, 128K, 5M (5 x 2^20).")
RECIPE = click.option("--recipe", default="upipe", help="A rung of the ladder, fast or long. [upipe]")
SET = click.option(
    "--set",
    "knobs",
    multiple=True,
    callback=once,
    metavar="KNOB=VALUE",
    help=f"Set a knob of the recipe: {', '.join(BY_NAME)}.",
)
LORA = click.option(
    "--lora",
    metavar="r=N",
    help="Train PEFT's adapters of this rank, and freeze the model: r=16, or "
    "r=16,alpha=32,targets=q_proj+v_proj. The weights keep their dtype; adapters of weights in bfloat16 are "
    "float32, or bfloat16 with dtype=bfloat16. "
    "[alpha=r, all projections of a layer]",
)
DTYPE = click.option(
    "--dtype",
    metavar="DTYPE",
    help="Of parameters, gradients and optimizer state: float32 or bfloat16. [the config's; float32 without]",
)
ACCUMULATE = click.option(
    "--accumulate", type=integer, default=1, help="Batches whose gradients a step sums. [1]"
)
ROWS = click.option("--rows", type=integer, default=1, help="Sequences in a batch. [1]")
TEXT = options(
    click.option(
        "--text", type=path, help="A file or folder of text, or a file of tokens. [Python's library]"
    ),
    click.option("--tokenizer", type=path, help="The tokenizer's directory. [bytes are tokens]"),
)
UPDATES = options(
    ACCUMULATE,
    click.option("--lr", "learning_rate", type=number, default=1e-3, help="Learning rate. [0.001]"),
    click.option("--clip-norm", type=number, default=1.0, help="The largest norm of the gradient. [1]"),
    click.option(
        "--seed", type=integer, default=0, help="The seed of weights that the model does not bring. [0]"
    ),
)
PROFILE = options(
    click.option("--profile", default="local", help="Where ranks run; see lab cluster profiles. [local]"),
    click.option(
        "--profile-set",
        "fields",
        multiple=True,
        callback=once,
        metavar="FIELD=VALUE",
        help="Override a field of the profile.",
    ),
)
HOST_DIR = click.option(
    "--host-dir", type=path, metavar="DIR", help="A folder on a disk for the long tensors of streamed layers."
)
LAYERS = click.option("--layers", type=integer, help="Only the first so many layers. [all]")
PART = options(
    LAYERS,
    click.option("--device-memory", help="Act as a GPU of this memory: 80GiB."),
)
MACHINE = click.Choice(["cuda", "cpu"])
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


# ---- errors ------------------------------------------------------------------------------------------------


class OneLineErrors(click.Group):
    """A group that prints an error as one line and exits with 2, as click does, or with ``DOES_NOT_FIT``."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="lab.signs")
        with suppress(OSError, ClusterError):  # a command that needs a folder raises it again
            ensure_home()
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except Exception as error:
            text, code = _one_line(error)
            if not text:
                raise
            click.echo(f"lab: {text}", err=True)
            sys.exit(code)
        # That of a command that ends with `Context.exit`.
        if code:
            sys.exit(code)


def _one_line(error: Exception) -> tuple[str, int]:
    """Return the text and the exit code of an error; no text for an error that is a defect of the lab."""
    if isinstance(error, RankError):
        # Some errors of the lab are found on a rank only, as those of its machine's kernels.
        return str(error.cause) if isinstance(error.cause, LabError) else "", 2
    if isinstance(error, click.Abort):
        return "interrupted", 1
    if isinstance(error, click.ClickException):
        return " ".join(error.format_message().split()), error.exit_code
    if isinstance(error, LabError | ClusterError):
        return str(error), DOES_NOT_FIT if isinstance(error, DoesNotFitError) else 2
    if isinstance(error, OSError) and error.filename is not None:
        # A path of the user's that the system does not take; other errors of the system name no file.
        name, home = str(error.filename), os.path.expanduser("~")
        refused = error.errno in (errno.EACCES, errno.EROFS) and not os.access(home, os.W_OK)
        # HOME moves only the hidden folders in which programs keep their files.
        follows_home = refused and name.startswith(os.path.join(home, "."))
        remedy = "; set HOME to a folder that you can write" if follows_home else ""
        return f"{abbreviate(name)}: {error.strerror}{remedy}", 2
    if isinstance(error, ModuleNotFoundError):
        # The lab runs from its sources, and one of its dependencies is not installed.
        return f"this command needs {error.name}, which is not installed; `lab doctor` lists what is", 2
    return "", 0


_SIGNS = {"█": "#", "✓": "+", "✗": "x", "↓": "v", "»": ">", "·": "-", "…": "..", "µ": "u"}
"""What is printed in place of signs that the encoding of a terminal lacks; in place of others, ``?``."""


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SIGNS.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error("lab.signs", _replace)


@contextmanager
def status(first: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on stderr if that is a terminal, and yield the function that changes its text."""
    from rich.console import Console

    with Console(stderr=True).status(first) as line:
        yield line.update


def pick(keys: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``values`` with these keys, in the order of ``keys``."""
    return {key: values[key] for key in keys}


def print_answer(answer: object) -> None:
    """Print a text as it is, and anything else as JSON."""
    click.echo(answer if isinstance(answer, str) else json.dumps(answer, indent=2))
