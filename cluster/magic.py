"""`%%ranks`: a notebook's cell on all ranks, what they print told apart, the cause of a failure first.

`%load_ext cluster`, then `%%ranks` runs a cell on the cluster that is called `cluster` in the notebook, and
`%%ranks other` on the one called `other`. Names that a cell sets stay on each rank for the cells that follow;
`rank`, `ranks`, `torch` and `dist` are there from the beginning.
"""

import ast
import contextlib
import io
import linecache
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class

from cluster.errors import ClusterError, name_ranks
from cluster.live import publish
from cluster.ranks import Cluster

FILE = "<ranks>"

# Of one rank's process: what its cells have set.
_names: dict[str, Any] = {}


def run_cell(source: str) -> None:
    """Run a cell on this rank; publish what it prints, a line at a time, and the value of its last line."""
    if not _names:
        _names.update(__name__="__main__", torch=torch, dist=dist)
    _names.update(rank=dist.get_rank(), ranks=dist.get_world_size())
    # So that a traceback shows the cell's lines.
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    body = ast.parse(source, FILE)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(_Lines()) as out:
        exec(compile(body, FILE, "exec"), _names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), FILE, "eval"), _names)
            if value is not None:
                print(repr(value))
        out.flush()


class _Lines(io.TextIOBase):
    """Publishes whole lines, for ranks that print at once to be told apart."""

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> int:
        """Take text, publish the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            publish(line)
        return len(text)

    def flush(self) -> None:
        """Publish the line that was begun, if one was."""
        if self._begun:
            publish(self._begun)
        self._begun = ""


def told_apart(printed: Mapping[int, list[str]], ranks: int) -> Iterator[str]:
    """What the ranks printed: line by line, the same from several ranks once, with whose it is."""
    for number in range(max(map(len, printed.values()), default=0)):
        said: dict[str, list[int]] = {}
        for rank, lines in sorted(printed.items()):
            if number < len(lines):
                said.setdefault(lines[number], []).append(rank)
        for line, same in said.items():
            yield f"{'all ranks' if len(same) == ranks > 1 else name_ranks(same)}: {line}"


@magics_class
class RanksMagic(Magics):
    """Holds the magic for `%load_ext cluster`."""

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on all ranks of the cluster whose name is on the line, `cluster` where none is.

        Raises:
            ClusterError: there is no such cluster.
            SyntaxError: the cell is not Python.
            RankError: the cell failed on a rank; what was printed until then is shown before.
        """
        name = line.strip() or "cluster"
        found = (self.shell.user_ns if self.shell else {}).get(name)
        if not isinstance(found, Cluster):
            raise ClusterError(f"%%ranks: {name!r} is no cluster here; {name} = lab.Cluster(ranks=4).start()")
        ast.parse(cell, FILE)  # a cell that is no Python fails here, not on the ranks
        printed: dict[int, list[str]] = {rank: [] for rank in range(found.ranks)}
        try:
            found.apply(run_cell, cell, on_record=lambda rank, text: printed[rank].append(str(text)))
        finally:
            for text in told_apart(printed, found.ranks):
                sys.stdout.write(text + "\n")


def load(shell: InteractiveShell) -> None:
    """Make `%%ranks` known to a notebook."""
    shell.register_magics(RanksMagic)
