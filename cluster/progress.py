"""One line in a notebook on what goes on, where a cell waits for longer than a few seconds.

The line is on stderr, is written over every second, and is erased at the end. Elsewhere than in a notebook
nothing is written: commands have a status line of their own, and a test or a script asked for none.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

AFTER_SECONDS = 3.0
"""A wait that is shorter than this is silent."""
EVERY_SECONDS = 1.0


class _Line:
    """A line that a thread writes until it is told to end.

    Attributes:
        text: What goes on.
        hidden: Whether something else shows what goes on.
    """

    def __init__(self, text: str) -> None:
        self.text, self.hidden = text, False
        self._width, self._began = 0, time.monotonic()
        self._ended = threading.Event()
        # The thread runs in this context, so that its output goes to the cell that waits.
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._write_often), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Erase the line, if there is one."""
        self._ended.set()
        self._thread.join()
        if self._width:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _write_often(self) -> None:
        wait = AFTER_SECONDS
        while not self._ended.wait(wait):
            wait = EVERY_SECONDS
            if not self.hidden:
                self._write(f"{self.text} ({time.monotonic() - self._began:.0f} s)")

    def _write(self, text: str) -> None:
        # Spaces erase what a longer text has left.
        sys.stderr.write(f"\r{text:<{self._width}}")
        sys.stderr.flush()
        self._width = len(text)


_line: _Line | None = None


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Say in a notebook what goes on in the `with` block, or in a function that this decorates.

    Nothing is written in the first seconds. Of blocks inside each other, the outermost speaks.

    Args:
        text: What goes on, for example "planning".
    """
    global _line
    # Other threads belong to widgets, which show what they do.
    elsewhere = threading.current_thread() is not threading.main_thread()
    if _line is not None or elsewhere or notebook_shell() is None:
        yield
        return
    _line = _Line(text)
    try:
        yield
    finally:
        _line.end()
        _line = None


def say(text: str) -> None:
    """Change the text of the line of the outermost `progress`."""
    if _line is not None:
        _line.text = text


def hide_progress(watch: Callable[..., object] | None) -> None:
    """Write no line, where somebody watches who is told what goes on.

    Args:
        watch: The function that is told; None where nobody watches. If it has an attribute ``visible`` that
            is False, it shows nothing before the end, and the line is written.
    """
    if _line is not None and watch is not None:
        _line.hidden = getattr(watch, "visible", True)


def notebook_shell() -> Any:
    """Return IPython's shell, if this process is the kernel of a notebook; None in a terminal or a script."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    shows_pictures = shell is not None and "text/html" in shell.display_formatter.active_types
    return shell if shows_pictures else None
