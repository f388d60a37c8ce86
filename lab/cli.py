"""The ``lab`` command, one function a subcommand. Heavy imports stay inside: ``lab --help`` is instant."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

P = ParamSpec("P")
T = TypeVar("T")


def _plainly(command: Callable[P, T]) -> Callable[P, T]:
    """Print what the lab refuses as one line and exit with 2, as click does for its own usage errors."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        from cluster.errors import ClusterError
        from lab.errors import LabError

        try:
            return command(*args, **kwargs)
        except (LabError, ClusterError) as error:
            click.echo(f"lab: {error}", err=True)
            sys.exit(2)

    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Learn, plan and prove multi-million-token training."""


@main.command("open")
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@click.option("--port", type=click.IntRange(1, 65535), default=8888, show_default=True)
@_plainly
def open_(no_browser: bool, port: int) -> None:
    """Open JupyterLab on the first notebook."""
    from lab.jupyter import serve

    serve(port=port, browser=not no_browser)


@main.command()
@click.argument("notebooks", nargs=-1)
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="Set a parameter.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the executed copies go [runs/<date>].")
@_plainly
def run(notebooks: tuple[str, ...], parameters: tuple[tuple[str, str], ...], out: Path | None) -> None:
    """Execute NOTEBOOKS (all of them when none is named) into copies, with their own ranks."""
    from lab.notebooks import execute

    failed = execute(list(notebooks), dict(parameters), out)
    if failed:
        click.echo(f"lab: {len(failed)} failed: {', '.join(failed)}", err=True)
        sys.exit(1)


@main.group()
def bench() -> None:
    """Measure ratios, each within one run on this machine."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plainly
def meter(as_json: bool) -> None:
    """A training step with the memory meter over the same step without it."""
    from lab.bench.meter import measure_meter
    from lab.bench.table import write

    click.echo(write(measure_meter(), as_json=as_json))


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plainly
def parity(as_json: bool) -> None:
    """Each technique's worst gradient error against plain transformers, for each kind of model."""
    from lab.bench.parity import measure_parity
    from lab.bench.table import write

    click.echo(write(measure_parity(), as_json=as_json))


@main.command()
@_plainly
def doctor() -> None:
    """Say what this machine has, what the lab would use, and what is missing."""
    from lab.doctor import report

    click.echo(report())
