"""The source code of a function or class, shown in a notebook."""

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
    """Source code, which a notebook displays with highlighting.

    Attributes:
        place: The file and the line, such as ``lab/step/compose.py:12``.
        code: The code.
    """

    place: str
    code: str

    def __repr__(self) -> str:
        return f"# {self.place}\n{self.code}"

    def _repr_markdown_(self) -> str:
        # Front ends highlight a fenced block in the colours of their theme. No code has a line of four
        # tildes.
        return f"`{self.place}`\n\n~~~~python\n{self.code}\n~~~~"


def source(thing: Callable[..., Any] | type) -> Source:
    """Show the code of a function or class, with its file and line."""
    thing = inspect.unwrap(thing)
    lines, first = inspect.getsourcelines(thing)
    path = Path(inspect.getsourcefile(thing) or "").resolve()
    # Code of other packages is named by its module: its path would be different on every machine.
    where = path.relative_to(_PROJECT).as_posix() if path.is_relative_to(_PROJECT) else thing.__module__
    return Source(f"{where}:{first}", dedent("".join(lines)).rstrip())
