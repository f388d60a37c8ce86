"""``lab doctor``: what this machine has, or what a model does."""

from __future__ import annotations

import click

from lab.commands.base import DTYPE, status
from lab.errors import LabError


@click.command()
@click.option("--model", help="Say what this model does differently from Llama: a preset, or a directory.")
@DTYPE
@click.option("--warm", is_flag=True, help="First make what a notebook would wait for: DeepSpeed's operator.")
def doctor(model: str | None, dtype: str | None, warm: bool) -> None:
    """Say what this machine has, what the lab would use, and what is missing."""
    from lab.commands.doctor import model_report, report, warm_up

    if warm:
        with status("warming up") as say:
            for line in warm_up(say):
                click.echo(line)
    if model is None and dtype is not None:
        raise LabError("--dtype is that of a model's parameters: give --model, or leave --dtype out")
    click.echo(report() if model is None else model_report(model, dtype))


COMMANDS = (doctor,)
