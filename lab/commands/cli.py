"""The ``lab`` command, with the subcommands of every file in ``lab/commands/subcommands``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import click

from lab.commands import subcommands
from lab.commands.base import OneLineErrors


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Learn, plan and prove multi-million-token training."""


for _file in iter_modules(subcommands.__path__, f"{subcommands.__name__}."):
    for _command in import_module(_file.name).COMMANDS:
        main.add_command(_command)
