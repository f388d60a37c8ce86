"""What the subcommands share: options, errors as one line, a status line, answers as text or JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from lab.errors import LabError
from lab.recipe.knobs import BY_NAME
from lab.units import abbreviate, parse_path

P = ParamSpec("P")
T = TypeVar("T")


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


TOKENS = click.option("--tokens", required=True, help="The length of the context: 8192, 128K, 5M (5 x 2^20).")
RECIPE = click.option("--recipe", default="upipe", help="A rung of the ladder, fast or long. [upipe]")
SET = click.option(
    "--set",
    "knobs",
    multiple=True,
    metavar="KNOB=VALUE",
    help=f"Set a knob of the recipe: {', '.join(BY_NAME)}.",
)
LORA = click.option(
    "--lora",
    metavar="r=N",
    help="Train PEFT's adapters of this rank, and freeze the model: r=16, or "
    "r=16,alpha=32,targets=q_proj+v_proj. The weights keep their dtype. "
    "[alpha=r, all projections of a layer]",
)
DTYPE = click.option(
    "--dtype",
    metavar="DTYPE",
    help="Of parameters, gradients and optimizer state: float32 or bfloat16. [the config's; float32 without]",
)
TEXT = click.option(
    "--text", type=path, help="A file or folder of text, or a file of tokens. [Python's library]"
)
TOKENIZER = click.option("--tokenizer", type=path, help="The tokenizer's directory. [bytes are tokens]")
HOST_DIR = click.option(
    "--host-dir", type=path, metavar="DIR", help="A folder on a disk for the long tensors of streamed layers."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def one_line_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Print an error of the lab as one line and exit with 2, as click does for its own usage errors."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        from cluster.errors import ClusterError, RankError

        try:
            return command(*args, **kwargs)
        except (LabError, ClusterError) as error:
            click.echo(f"lab: {error}", err=True)
            sys.exit(2)
        except RankError as error:
            # Some errors of the lab are found on a rank only, as those of its machine's kernels.
            if not isinstance(error.cause, LabError):
                raise
            click.echo(f"lab: {error.cause}", err=True)
            sys.exit(2)
        except OSError as error:
            # A path of the user's that the system does not take; other errors of the system name no file.
            if error.filename is None:
                raise
            click.echo(f"lab: {abbreviate(str(error.filename))}: {error.strerror}", err=True)
            sys.exit(2)
        except ModuleNotFoundError as error:
            # The lab runs from its sources, and one of its dependencies is not installed.
            click.echo(
                f"lab: this command needs {error.name}, which is not installed; `lab doctor` lists what is",
                err=True,
            )
            sys.exit(2)

    return wrapped


@contextmanager
def status(first: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on stderr if that is a terminal, and yield the function that changes its text."""
    from rich.console import Console

    with Console(stderr=True).status(first) as line:
        yield line.update


def grow_segments() -> None:
    """Let the segments of CUDA's allocator grow, unless the environment sets the allocator already.

    When the device is nearly full, segments of fixed sizes reserve several GiB more than they hold. Torch
    reads the variable once, at the first use of CUDA, so a command calls this before it imports torch.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def pick(keys: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``values`` with these keys, in the order of ``keys``."""
    return {key: values[key] for key in keys}


def print_answer(answer: object) -> None:
    """Print a text as it is, and anything else as JSON."""
    click.echo(answer if isinstance(answer, str) else json.dumps(answer, indent=2))
