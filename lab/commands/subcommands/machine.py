"""``lab doctor``: what this machine has, or what a model does."""

from __future__ import annotations

import click

from lab.commands.base import one_line_errors


@click.command()
@click.option("--model", help="Say what this model does differently from Llama: a preset, or a directory.")
@one_line_errors
def doctor(model: str | None) -> None:
    """Say what this machine has, what the lab would use, and what is missing."""
    from lab.commands.doctor import model_report, report

    click.echo(report() if model is None else model_report(model))


COMMANDS = (doctor,)
