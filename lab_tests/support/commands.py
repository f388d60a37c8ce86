"""Runs commands of the lab in this process."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from click.testing import CliRunner, Result

from lab.commands.cli import main


def invoke(words: str | Iterable[str | Path | float]) -> Result:
    """Run a command line, or its words."""
    return CliRunner().invoke(main, shlex.split(words) if isinstance(words, str) else list(map(str, words)))


def answer(words: str | Iterable[str | Path | float]) -> str:
    """Return what a command prints."""
    run = invoke(words)
    assert run.exit_code == 0, run.output
    return run.stdout


def refusal(words: str | Iterable[str | Path | float], code: int = 2) -> str:
    """Return what a command says that refuses, with this exit code: its only line, after its name."""
    run = invoke(words)
    assert run.exit_code == code, run.exception
    assert run.stdout == ""
    assert run.stderr.startswith("lab: ")
    assert run.stderr.count("\n") == 1, run.stderr
    return run.stderr.removeprefix("lab: ").removesuffix("\n")
