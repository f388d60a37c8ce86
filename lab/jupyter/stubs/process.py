"""The process that runs a reader's cell and its checks: ``python -m lab.jupyter.stubs.process MODULE FD``.

It reads the cell from its input up to its end marker. Then it writes lines of JSON to the file descriptor:
the ids of its own processes when the ranks are ready; for each check its title, and what was wrong or null;
and null at the end. What the cell prints goes to the output. The first check that fails is the last. At the
end the process waits until its input is closed: the one that started it can then see what the cell has left
running.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module

from cluster.errors import HANG, ClusterError, RankError
from cluster.processes import family
from cluster.ranks import Cluster
from lab.jupyter.stubs import END
from lab.jupyter.stubs.stub import Stub, Wrong, title

PR_SET_CHILD_SUBREAPER = 36
"""The option of prctl(2) that makes a process the parent of its orphaned descendants."""

COLLECTIVE_SECONDS = 5.0
"""Ranks that do not meet in a collective are found after this time. The checks' own take milliseconds."""


def report(stub: Stub, source: str, ready: Callable[[], object]) -> Iterator[tuple[str, str | None]]:
    """Run the checks of a stub until one fails.

    Args:
        stub: The stub.
        source: A reader's cell.
        ready: Called when the ranks have started, before the cell runs.

    Yields:
        The title of each check, and what was wrong or None.
    """
    with _runner(stub, source) as run:
        ready()
        for number, check in enumerate(stub.checks):
            wrong = run(number)
            yield title(check), wrong
            if wrong is not None:
                return


@contextmanager
def _runner(stub: Stub, source: str) -> Iterator[Callable[[int], str | None]]:
    if stub.ranks is None:
        yield lambda number: _here(stub, source, number)
    else:
        with Cluster(ranks=stub.ranks, timeout=COLLECTIVE_SECONDS) as cluster:
            yield lambda number: _on_ranks(cluster, stub, source, number)


def _here(stub: Stub, source: str, number: int) -> str | None:
    try:
        stub.check(number, source)
    except Wrong as wrong:
        return str(wrong)
    return None


def _on_ranks(cluster: Cluster, stub: Stub, source: str, number: int) -> str | None:
    try:
        cluster.apply(stub.check, number, source)
    except RankError as error:
        said = str(error.cause) if isinstance(error.cause, Wrong) else str(error).partition("\n")[0]
        # The rest is about the sources of gloo.
        return (
            f"not all ranks join the collective in {said.partition(', raised')[0]}" if HANG in said else said
        )
    except ClusterError as error:
        return str(error)
    return None


def main(module: str, descriptor: str) -> None:
    """Run the checks of one stub, and wait until the input is closed."""
    _adopt_orphans()
    source, _, _ = _read_until_end().partition(END)
    given = _without_input()
    stub: Stub = import_module(module).STUB
    with os.fdopen(int(descriptor), "w", buffering=1) as answers:
        print_line = partial(print, file=answers)

        def ready() -> None:
            print_line(json.dumps({"own": [one.pid for one in family([os.getpid()])]}))

        try:
            for one in report(stub, source, ready):
                print_line(json.dumps(one))
        except ClusterError as error:
            print_line(json.dumps(("The ranks start", str(error))))
        sys.stdout.flush()
        print_line("null")
    os.read(given, 1)


def _adopt_orphans() -> None:
    """Stay an ancestor of whatever the cell starts, also where a process between them ends (on Linux)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _without_input() -> int:
    """Leave the cell an input that is at its end; return a file descriptor of the one that was given.

    A cell that asks for input gets an error, and does not wait for what nobody can type.
    """
    given, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return given


def _read_until_end() -> str:
    """Read the input up to its end marker; it stays open."""
    read = b""
    while not read.endswith(END.encode()):
        read += os.read(sys.stdin.fileno(), 1 << 16)
    return read.decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
