"""``lab open``, ``lab execute`` and ``lab book``: notebooks in JupyterLab, as programs, and as pages."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lab.commands.base import one_line_errors, path, status


@click.command("open")
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@click.option("--port", type=click.IntRange(1, 65535), default=8888, show_default=True)
@click.option(
    "--ip",
    default="127.0.0.1",
    help="The address to listen on. Beyond loopback, other machines can try the server's token.",
)
@one_line_errors
def open_(no_browser: bool, port: int, ip: str) -> None:
    """Open JupyterLab on the first notebook."""
    from lab.jupyter.serving import serve

    serve(port=port, browser=not no_browser, ip=ip)


@click.command()
@click.argument("notebooks", nargs=-1)
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="Set a parameter.")
@click.option("--out", type=path, help="Where the executed copies go. [runs/<date>]")
@one_line_errors
def execute(notebooks: tuple[str, ...], parameters: tuple[tuple[str, str], ...], out: Path | None) -> None:
    """Execute NOTEBOOKS (all of them when none is named) into copies, with their own ranks."""
    from lab.jupyter import executing

    failed = executing.execute(list(notebooks), dict(parameters), out)
    if failed:
        click.echo(f"lab: {len(failed)} failed: {', '.join(failed)}", err=True)
        sys.exit(1)


@click.command()
@click.option("--out", type=path, default="build/book", show_default=True, help="The folder of the pages.")
@one_line_errors
def book(out: Path) -> None:
    """Build HTML pages of the stored notebooks and the public functions."""
    from lab.jupyter.book.build import build

    with status("building the book"):
        warnings = build(out)
    for line in warnings:
        click.echo(line, err=True)
    click.echo(f"{out / 'index.html'}")
    if warnings:
        sys.exit(1)


COMMANDS = (open_, execute, book)
