"""The cell magic `%%ranks`, which runs a cell of a notebook on all ranks.

After `%load_ext cluster`, `%%ranks` runs a cell on the cluster whose variable in the notebook is `cluster`,
and `%%ranks other` on the cluster in the variable `other`. A cell's variables stay on each rank for later
cells. The variables `rank`, `ranks`, `torch` and `dist` are set from the beginning.
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
from cluster.progress import progress
from cluster.ranks import Cluster

FILE = "<ranks>"

# The variables of the cells, in the process of one rank.
_variables: dict[str, Any] = {}


def run_cell(source: str) -> None:
    """Run a cell on this rank. Publishes the lines that it prints, and the value of its last expression."""
    if not _variables:
        _variables.update(__name__="__main__", torch=torch, dist=dist)
    _variables.update(rank=dist.get_rank(), ranks=dist.get_world_size())
    # A traceback shows the lines of the cell from this cache.
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    body = ast.parse(source, FILE)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(_Lines()) as out:
        exec(compile(body, FILE, "exec"), _variables)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), FILE, "eval"), _variables)
            if value is not None:
                print(repr(value))
        out.flush()


class _Lines(io.TextIOBase):
    """Publishes whole lines, so that the output of several ranks can be merged by lines."""

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        """Add `text`, and publish the lines that are complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            publish(line)
        return len(text)

    def flush(self) -> None:
        """Publish the last line, where it is not complete."""
        if self._rest:
            publish(self._rest)
        self._rest = ""


def merge_output(output: Mapping[int, list[str]], ranks: int) -> Iterator[str]:
    """Yield the lines of all ranks, each with the ranks that printed it.

    A line that several ranks printed at the same place is yielded once.

    Args:
        output: The lines that each rank printed.
        ranks: The number of ranks.
    """
    for number in range(max(map(len, output.values()), default=0)):
        ranks_of: dict[str, list[int]] = {}
        for rank, lines in sorted(output.items()):
            if number < len(lines):
                ranks_of.setdefault(lines[number], []).append(rank)
        for line, same in ranks_of.items():
            yield f"{'all ranks' if len(same) == ranks > 1 else name_ranks(same)}: {line}"


@magics_class
class RanksMagic(Magics):
    """The magics that `%load_ext cluster` registers."""

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run a cell on all ranks of a cluster.

        Args:
            line: The name of the cluster's variable. An empty line stands for `cluster`.
            cell: The source of the cell.

        Raises:
            ClusterError: The variable does not hold a cluster.
            SyntaxError: The cell is not valid Python.
            RankError: The cell failed on a rank. The output up to the failure is printed first.
        """
        name = line.strip() or "cluster"
        target = (self.shell.user_ns if self.shell else {}).get(name)
        if not isinstance(target, Cluster):
            raise ClusterError(
                f"%%ranks: the variable {name!r} holds no cluster; "
                f"{name} = lab.Cluster(ranks=4).start() would work"
            )
        ast.parse(cell, FILE)  # a syntax error is raised here, not on the ranks
        output: dict[int, list[str]] = {rank: [] for rank in range(target.ranks)}
        try:
            with progress(f"{target.ranks} ranks run the cell"):
                target.apply(run_cell, cell, on_record=lambda rank, text: output[rank].append(str(text)))
        finally:
            for text in merge_output(output, target.ranks):
                sys.stdout.write(text + "\n")


def load(shell: InteractiveShell) -> None:
    """Register `%%ranks` with the shell of a notebook."""
    shell.register_magics(RanksMagic)
