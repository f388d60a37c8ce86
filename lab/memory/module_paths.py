"""The module that runs at an instant, in forward and in backward."""

from __future__ import annotations

from bisect import bisect_right

from lab.torch_private import next_sequence_number, running_sequence_number


class ModulePaths:
    """The path of the module that runs.

    In forward it is the innermost module. In backward it is the module whose forward made the autograd node
    that runs. Autograd numbers its nodes in the order in which forward makes them. So the nodes of each
    module's forward have a range of numbers, in which the node that runs is looked up. torch's profiler
    relates the two passes in the same way.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._outer: list[str] = []
        self._starts: list[int] = []
        self._paths: list[str] = []
        self._backward_path = ""

    def enter(self, path: str) -> None:
        """Note that the module of this path begins its forward."""
        # When backward recomputes a module, its nodes have new numbers. The nodes after them belong to the
        # module whose backward runs, so its path is restored on leaving.
        self._outer.append(self.current())
        self._open.append(path)
        self._begin(path)

    def leave(self) -> None:
        """Note that the innermost module ends its forward."""
        self._open.pop()
        self._begin(self._outer.pop())

    def current(self) -> str:
        """Return the path; it is empty where no module runs."""
        if self._open:
            return self._open[-1]
        number = running_sequence_number()
        if number is None:
            return ""
        index = bisect_right(self._starts, number) - 1
        # A node that accumulates a gradient has a number above all others. It belongs to the node before it.
        if 0 <= index < len(self._starts) - 1:
            self._backward_path = self._paths[index]
        return self._backward_path

    def _begin(self, path: str) -> None:
        start = next_sequence_number()
        if self._starts and self._starts[-1] == start:
            self._paths[-1] = path
        else:
            self._starts.append(start)
            self._paths.append(path)
