"""The ``lab`` command, with the subcommands of every file in ``lab/commands/subcommands``."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click

from lab.commands import subcommands


class _OneLineErrors(click.Group):
    """A group that prints an error in its command line as one line; click prints four."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
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


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Learn, plan and prove multi-million-token training."""


for _file in iter_modules(subcommands.__path__, f"{subcommands.__name__}."):
    for _command in import_module(_file.name).COMMANDS:
        main.add_command(_command)
