"""What the subcommands share: options, errors as one line, a status line, answers as text or JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from lab.recipe.knobs import BY_NAME

P = ParamSpec("P")
T = TypeVar("T")

TOKENS = click.option("--tokens", required=True, help="The length of the context: 8192, 128K, 5M (5 x 2^20).")
RECIPE = click.option("--recipe", default="upipe", help="A rung of the ladder, or fast. [upipe]")
SET = click.option(
    "--set",
    "knobs",
    multiple=True,
    metavar="KNOB=VALUE",
    help=f"Set a knob of the recipe: {', '.join(BY_NAME)}.",
)
TEXT = click.option("--text", type=click.Path(), help="A file or folder of text. [Python's library]")
TOKENIZER = click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="The tokenizer's directory. [bytes are tokens]"
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def one_line_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Print an error of the lab as one line and exit with 2, as click does for its own usage errors."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        from cluster.errors import ClusterError, RankError
        from lab.errors import LabError

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
