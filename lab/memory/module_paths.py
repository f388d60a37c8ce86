"""Which module is at work, in forward and in backward, without touching the autograd graph."""

from __future__ import annotations

from bisect import bisect_right

from lab.torch_private import next_sequence_number, running_sequence_number


class ModulePaths:
    """The path of the running module: of the innermost forward, or of the forward that backward undoes.

    Autograd numbers its nodes in order of creation, so a module's forward owns a range of numbers; the node
    that runs in backward is looked up in these ranges (torch's profiler ties the two passes the same way).
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._outer: list[str] = []
        self._starts: list[int] = []
        self._paths: list[str] = []
        self._undone = ""

    def enter(self, path: str) -> None:
        """The module of this path begins its forward."""
        # A module that backward runs again belongs to what backward undoes, and so does what follows it.
        self._outer.append(self.current())
        self._open.append(path)
        self._begin(path)

    def leave(self) -> None:
        """The innermost module ends its forward."""
        self._open.pop()
        self._begin(self._outer.pop())

    def current(self) -> str:
        """The path now; empty outside every module."""
        if self._open:
            return self._open[-1]
        number = running_sequence_number()
        if number is None:
            return ""
        found = bisect_right(self._starts, number) - 1
        # Gradient accumulation has the highest number of all: it belongs to the node that ran before it.
        if 0 <= found < len(self._starts) - 1:
            self._undone = self._paths[found]
        return self._undone

    def _begin(self, path: str) -> None:
        start = next_sequence_number()
        if self._starts and self._starts[-1] == start:
            self._paths[-1] = path
        else:
            self._starts.append(start)
            self._paths.append(path)
