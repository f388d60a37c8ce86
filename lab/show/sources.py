"""The library's own code, shown where a notebook talks about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

_PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Source:
    """Code as displayed: highlighted in a notebook, plain elsewhere.

    ``place`` is its file and line, such as ``lab/step/compose.py:12``.
    """

    place: str
    code: str

    def __repr__(self) -> str:
        return f"# {self.place}\n{self.code}"

    def _repr_markdown_(self) -> str:
        # Every front end highlights this in the colours of its own theme. No code has a line of four tildes.
        return f"`{self.place}`\n\n~~~~python\n{self.code}\n~~~~"


def source(thing: Callable[..., Any] | type) -> Source:
    """Show the code of a function or class, and where it stands in the project."""
    thing = inspect.unwrap(thing)
    lines, first = inspect.getsourcelines(thing)
    path = Path(inspect.getsourcefile(thing) or "").resolve()
    # What is not the project's is named by its module: a machine's own paths say nothing to a reader.
    where = path.relative_to(_PROJECT).as_posix() if path.is_relative_to(_PROJECT) else thing.__module__
    return Source(f"{where}:{first}", dedent("".join(lines)).rstrip())
