"""The ``lab`` command: its group, and the subcommands of a notebook's reader. ``lab --help`` is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from lab.commands.base import plainly
from lab.commands.benches import bench
from lab.commands.clusters import cluster
from lab.commands.planning import fit, ladder, max_context, plan
from lab.commands.rehearsing import rehearse
from lab.commands.training import export, run, train


class _OneLine(click.Group):
    """Says what is wrong with a command line in one line too; click takes four."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and exit with click's code."""
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            click.echo(f"lab: {' '.join(error.format_message().split())}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("lab: interrupted", err=True)
            sys.exit(1)


@click.group(cls=_OneLine, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Learn, plan and prove multi-million-token training."""


@main.command("open")
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@click.option("--port", type=click.IntRange(1, 65535), default=8888, show_default=True)
@click.option("--ip", default="127.0.0.1", help="Where to listen; beyond loopback, others can try its token.")
@plainly
def open_(no_browser: bool, port: int, ip: str) -> None:
    """Open JupyterLab on the first notebook."""
    from lab.jupyter.serving import serve

    serve(port=port, browser=not no_browser, ip=ip)


@main.command()
@click.argument("notebooks", nargs=-1)
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="Set a parameter.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the executed copies go [runs/<date>].")
@plainly
def execute(notebooks: tuple[str, ...], parameters: tuple[tuple[str, str], ...], out: Path | None) -> None:
    """Execute NOTEBOOKS (all of them when none is named) into copies, with their own ranks."""
    from lab.jupyter import executing

    failed = executing.execute(list(notebooks), dict(parameters), out)
    if failed:
        click.echo(f"lab: {len(failed)} failed: {', '.join(failed)}", err=True)
        sys.exit(1)


@main.command()
@plainly
def doctor() -> None:
    """Say what this machine has, what the lab would use, and what is missing."""
    from lab.commands.doctor import report

    click.echo(report())


for command in (plan, ladder, max_context, fit, rehearse, run, train, export, cluster, bench):
    main.add_command(command)
