"""``lab open``, ``check``, ``execute`` and ``book``: notebooks to work in, as programs, and as pages."""

from __future__ import annotations

import signal
import sys
from datetime import datetime
from pathlib import Path

import click

from lab.commands.base import once, path, status

COPIES = click.option(
    "--folder",
    type=path,
    metavar="DIR",
    help="The folder of your copies. [my_notebooks]",
)


@click.command("open")
@click.option("--teacher", is_flag=True, help="Open copies that have outputs and solutions.")
@COPIES
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@click.option("--port", type=click.IntRange(1, 65535), default=8888, show_default=True)
@click.option(
    "--ip",
    default="127.0.0.1",
    help="The address to listen on. Beyond loopback, other machines can try the server's token.",
)
def open_(teacher: bool, folder: Path | None, no_browser: bool, port: int, ip: str) -> None:
    """Open JupyterLab on your own copies of the notebooks. A copy that exists is left as it is."""
    from lab.jupyter.copies import PARTICIPANT, TEACHER, make_copies
    from lab.jupyter.serving import check_address, serve

    check_address(port, ip)
    copies = make_copies(folder or (TEACHER if teacher else PARTICIPANT), teacher=teacher)
    click.echo(f"lab: your notebooks are in {copies.folder.resolve()}; {len(copies.made)} are new", err=True)
    if copies.outdated:
        click.echo(
            f"lab: kept, though the lab has another version: {', '.join(copies.outdated)}; move a file away, "
            "and lab open makes a new copy",
            err=True,
        )
    serve(copies.folder.resolve(), port=port, browser=not no_browser, ip=ip)


@click.command()
@click.argument("notebook")
@COPIES
@click.option("--solution", is_flag=True, help="Print the lab's solution instead.")
def check(notebook: str, folder: Path | None, solution: bool) -> None:
    """Check the stub that you have filled in: `lab check 02` for the one of 02_ulysses.

    It reads your saved notebook.
    """
    from lab.jupyter.stubs import check as stubs

    name = stubs.find_stub(notebook)
    if solution:
        click.echo(stubs.solution_of(name))
        return
    path = stubs.find_copy(name, folder)
    saved = datetime.fromtimestamp(path.stat().st_mtime).strftime("%H:%M:%S")
    source = stubs.stub_of(path)
    click.echo(f"{path}, saved at {saved}; checking takes some seconds, and {stubs.SECONDS:.0f} at most")
    wrong = False
    for answer in stubs.check(name, source):
        if answer.wrong is None:
            click.secho(f"✓ {answer.title}", fg="green")
        else:
            wrong = True
            click.secho(f"✗ {answer.title}: {answer.wrong}", fg="red")
    sys.exit(wrong)


@click.command()
@click.argument("notebooks", nargs=-1)
@click.option(
    "-p", "parameters", nargs=2, multiple=True, callback=once, metavar="NAME VALUE", help="Set a parameter."
)
@click.option("--out", type=path, help="Where the executed copies go. [runs/<date>]")
@click.option("--in-place", is_flag=True, help="Store the outputs in the notebooks themselves, too.")
@click.option("--stale", is_flag=True, help="Only those whose code, or the code they show, has changed.")
def execute(
    notebooks: tuple[str, ...],
    parameters: tuple[tuple[str, str], ...],
    out: Path | None,
    in_place: bool,
    stale: bool,
) -> None:
    """Execute NOTEBOOKS (all of them when none is named) into copies, with their own ranks."""
    from lab.jupyter import executing

    for ends in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ends) == signal.SIG_DFL:  # nohup ignores the second one
            signal.signal(ends, signal.default_int_handler)
    failed = executing.execute(list(notebooks), dict(parameters), out, in_place=in_place, stale=stale)
    if failed:
        click.echo(f"lab: {len(failed)} failed: {', '.join(failed)}", err=True)
        sys.exit(1)


@click.command()
@click.option("--out", type=path, default="build/book", show_default=True, help="The folder of the pages.")
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


COMMANDS = (open_, check, execute, book)
