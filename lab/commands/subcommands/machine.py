"""``lab doctor``: what this machine has."""

from __future__ import annotations

import click

from lab.commands.base import one_line_errors


@click.command()
@one_line_errors
def doctor() -> None:
    """Say what this machine has, what the lab would use, and what is missing."""
    from lab.commands.doctor import report

    click.echo(report())


COMMANDS = (doctor,)
