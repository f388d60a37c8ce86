"""A stub: what its cell defines, and the checks of that."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

FILE = "<your cell>"


class Wrong(Exception):
    """What a check found wrong in a reader's code, as one line."""


@dataclass(frozen=True)
class Stub:
    """What the cell that is tagged ``stub`` must define, and how that is checked.

    Attributes:
        name: The function or class that the cell defines.
        checks: Each takes what the cell defined, and raises ``Wrong``. The first line of its docstring says
            what it checks. On several ranks, each rank calls it at the same time.
        ranks: The ranks that check it; None for a process without a group.
    """

    name: str
    checks: tuple[Callable[[Any], None], ...]
    ranks: int | None = None

    def check(self, number: int, source: str) -> None:
        """Run a reader's cell and one of the checks in this process.

        Raises:
            Wrong: The cell fails, does not define the name, or is wrong.
        """
        # A traceback shows the lines of the cell from this cache.
        linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
        variables = {"__name__": "__main__", "torch": torch, "dist": dist}
        try:
            exec(compile(source, FILE, "exec"), variables)
            if self.name not in variables:
                raise Wrong(f"the cell does not define {self.name}")
            self.checks[number](variables[self.name])
        except Wrong:
            raise
        except NotImplementedError:
            raise Wrong(f"{self.name} is not written yet") from None
        except SyntaxError as error:
            raise Wrong(_describe_syntax(error, source.splitlines())) from None
        except (Exception, GeneratorExit) as error:
            raise Wrong(_describe(error)) from None


def checks_in(module: dict[str, Any]) -> tuple[Callable[[Any], None], ...]:
    """Return what a module names ``check_...``, in the order in which it stands there.

    Args:
        module: The names of the module and their values, ``globals()``.
    """
    return tuple(value for name, value in module.items() if name.startswith("check_"))


def title(check: Callable[[Any], None]) -> str:
    """Return what a check checks: the first line of its docstring, without the full stop."""
    return (check.__doc__ or "").strip().partition("\n")[0].removesuffix(".")


def _describe_syntax(error: SyntaxError, lines: list[str]) -> str:
    """Return what is no Python in a cell of these lines, in one line."""
    number = error.lineno or 0
    if lines[number - 1 : number] and lines[number - 1].lstrip().startswith(("%", "!")):
        return f"line {number} of the cell is a command of IPython, not Python: write it in another cell"
    return f"line {number} of the cell is not valid Python: {error.msg}"


def _describe(error: BaseException) -> str:
    """Return the error in one line, with the last line of the reader's cell that it passed through."""
    what = traceback.format_exception_only(error)[0].partition("\n")[0]
    if "does not require grad" in what:
        what += "; a second forward needs torch.enable_grad(), and an x that requires a gradient"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    return f"line {lines[-1].lineno} of the cell, `{lines[-1].line}`, raised {what}" if lines else what
