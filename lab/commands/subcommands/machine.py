"""``lab doctor``: what this machine has, or what a model does."""

from __future__ import annotations

import click

from lab.commands.base import one_line_errors, status


@click.command()
@click.option("--model", help="Say what this model does differently from Llama: a preset, or a directory.")
@click.option("--warm", is_flag=True, help="First make what a notebook would wait for: DeepSpeed's operator.")
@one_line_errors
def doctor(model: str | None, warm: bool) -> None:
    """Say what this machine has, what the lab would use, and what is missing."""
    from lab.commands.doctor import model_report, report, warm_up

    if warm:
        with status("warming up") as say:
            for line in warm_up(say):
                click.echo(line)
    click.echo(report() if model is None else model_report(model))


COMMANDS = (doctor,)
