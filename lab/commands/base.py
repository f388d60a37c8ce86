"""What the commands share: errors as one line, a status line, knobs and sizes as options, answers as JSON."""

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

TOKENS = click.option("--tokens", required=True, help="Context: 8192, 128K, 5M (5 x 2^20).")
RECIPE = click.option("--recipe", default="upipe", help="A rung of the ladder, or fast. [upipe]")
SET = click.option(
    "--set",
    "knobs",
    multiple=True,
    metavar="KNOB=VALUE",
    help=f"Set a knob by hand: {', '.join(BY_NAME)}.",
)
TEXT = click.option("--text", type=click.Path(), help="File or folder. [Python's library]")
TOKENIZER = click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="Its directory. [bytes are tokens]"
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def plainly(command: Callable[P, T]) -> Callable[P, T]:
    """Print what the lab refuses as one line and exit with 2, as click does for its own usage errors."""

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
            # What only the ranks can know (which kernels their machine has) they refuse as plainly.
            if not isinstance(error.cause, LabError):
                raise
            click.echo(f"lab: {error.cause}", err=True)
            sys.exit(2)
        except ModuleNotFoundError as error:
            # The lab run from its sources, where not all that it depends on is installed.
            click.echo(
                f"lab: this command needs {error.name}, which is not installed; `lab doctor` says what is",
                err=True,
            )
            sys.exit(2)

    return wrapped


@contextmanager
def status(first: str) -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr that says what goes on; nothing anywhere else."""
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield status.update


def grow_segments() -> None:
    """Have CUDA's allocator use segments that grow, unless the environment sets the allocator already.

    Near the limit, segments of fixed sizes reserve several GiB more than they hold. Torch reads the variable
    once, at the first use of CUDA: a command calls this before it imports torch.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def only(keys: Iterable[str], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Some of the facts."""
    return {key: facts[key] for key in keys}


def answer(said: object) -> None:
    """Print text as it is and everything else as JSON."""
    click.echo(said if isinstance(said, str) else json.dumps(said, indent=2))
