"""``lab bench gpu``: measures items on a GPU, the most valuable first, and skips those in its files."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from cluster.errors import ClusterError
from cluster.watchdog import ProcessId, end_after, this_process, wait_for_owner
from lab.bench.gpu_items import ITEMS, Item
from lab.bench.json_lines import Note, append_lines, read_lines
from lab.bench.results import SHOWN
from lab.bench.table import Say
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.rehearsing.rehearse import DeviceType

PATIENCE = 1.5
"""An item is ended when it takes so many times its expected seconds."""

LEAST_SECONDS = 20.0
"""No item is ended earlier, unless the time is over: the start of CUDA may take so long."""

START_LIMIT = 120.0
"""The most seconds until CUDA answers, after torch and transformers were imported."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables from which torch reads its allocator's settings. Each item has its own."""

Work = Callable[..., dict[str, Any]]
"""A function that a process calls, by its name; its arguments and its result can be pickled."""


def measure_gpu(
    out: Path,
    minutes: float,
    say: Say,
    note: Note,
    *,
    machine: str | None = None,
    only: Sequence[str] = (),
    again: bool = False,
    items: Sequence[Item] = ITEMS,
    small: bool = True,
) -> Iterator[dict[str, Any]]:
    """Measure the items that the files in ``out`` do not have for this machine, this torch and this lab.

    A row is appended to gpu.jsonl, or to cpu.jsonl, and yielded when it is on the disk. It has the name of
    the item, the machine, the versions, the recipe and the figures; or the error of the item in "failed".
    Its "time" is when it was measured, in seconds since 1970. Its "sources" are the hash of the lab's sources
    on which the figures depend: where they have changed, an item is measured anew.

    An item that failed, or that was ended because it took too long, is measured again with ``again`` alone.
    An item for which the GPU could not be used, because another process fills it, gets no row and is reported
    to ``note``.

    An item does not start if it is expected to take longer than the time left. An item that runs when the
    time is over is ended, gets no row, and is reported to ``note``.

    Args:
        out: The folder of the files.
        minutes: The time for all items.
        say: Shows what is measured now.
        note: Reports incomplete lines of the files, and at the end the items that are missing.
        machine: "cuda", or "cpu" to measure the same items at the size of ``tiny``; None for a GPU.
        only: Words. Items with all words of one of these texts in their name are measured, and no others.
        again: Whether items that the files have are measured too; the later row counts.
        items: The items.
        small: Whether a CPU measures ``Item.small`` of each.

    Raises:
        LabError: ``minutes`` is not a positive number; no item has the words of a text of ``only``; there is
            no GPU, or it cannot be used; or ``out`` cannot be written, is written by another process, or is
            the folder for figures of GPUs only.
    """
    if not (minutes > 0 and math.isfinite(minutes)):
        raise LabError(f"minutes={minutes:g}: it takes a number above 0, for instance 25")
    chosen = {words: [item for item in items if _has_words(item, words)] for words in only}
    for words, found in chosen.items():
        if not found:
            raise LabError(
                f"no item has the words {words!r} in its name: `lab bench results` prints the names"
            )
    items = [item for item in items if not only or any(item in found for found in chosen.values())]
    deadline = time.monotonic() + 60 * minutes
    where, machine_name, torch = _find_machine(machine)
    if machine is None and where == "cpu":
        raise LabError("torch sees no GPU here: --machine cpu measures the CPU, at a small size")
    if where == "cpu" and out.absolute().parts[-2:] == ("notebooks", "results"):
        raise LabError(f"{out} is for what GPUs measured: give another folder for a CPU's figures")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"{out} cannot be made: {error.strerror}") from error
    scaled = {item.name: item.small() if small and where == "cpu" else item for item in items}
    with append_lines(out / f"{'gpu' if where == 'cuda' else 'cpu'}.jsonl", note) as append:
        rows = [row for file in sorted(out.glob("*.jsonl")) for row in read_lines(file, note)]
        here = {"machine": machine_name, "torch": torch}
        done = set[str]()
        for name, item in scaled.items():
            left = deadline - time.monotonic()
            identity = {"name": name, "sources": item.sources, **here}
            if not again and any(identity.items() <= row.items() for row in rows):
                done.add(name)
            if name in done or item.seconds > left:
                continue
            say(f"{name}, about {item.seconds:.0f} s; {left / 60:.1f} min left")
            limit = max(PATIENCE * item.seconds, LEAST_SECONDS)
            start = time.monotonic()
            figures = _in_a_process(_measure, item, where, limit=min(limit, left))
            took = time.monotonic() - start
            if figures is None and left < limit:
                note(f"{name} ran for {took:.0f} s when the time was over: it was ended and has no row")
                break
            if figures is None:
                too_long = f"it took more than {limit:.0f} s, where {item.seconds:.0f} s were expected"
                figures = {"failed": too_long}
            if figures.get("error") == ClusterError.__name__:
                note(f"{name} stays missing: {figures['failed']}")
                continue
            fields = asdict(item) | {"knobs": dict(item.knobs), **identity, "time": time.time()}
            expected = {"expected": fields.pop("seconds"), "took": took}
            append(row := {**fields, **expected, **figures})
            done.add(name)
            yield row
    missing = {name: item.seconds for name, item in scaled.items() if name not in done}
    if missing:
        needed = sum(missing.values()) / 60
        how = f"--again --only {' --only '.join(map(repr, missing))}" if again else "the same command"
        note(
            f"{len(missing)} of {len(scaled)} are not measured yet and take about {needed:.0f} min: "
            f"{how} goes on with them"
        )


def _has_words(item: Item, words: str) -> bool:
    asked = {*words.split()}
    return bool(asked) and asked <= {*item.name.split()}


def row_text(row: dict[str, Any]) -> str:
    """Return a row in one line: its name, and its error or its most important figures."""
    if row.get("failed"):
        return f"{row['name']}: failed: {row['failed']}"
    columns = ("seconds", "plan_over_measured", *SHOWN)
    figures = (f"{name} {row[name]:.4g}" for name in columns if isinstance(row.get(name), int | float))
    first = " in a first step" if row.get("timed_steps") == 0 else ""
    return f"{row['name']}: {', '.join(figures) or 'done'}{first}"


def _find_machine(machine: str | None) -> tuple[DeviceType, str, str]:
    """Return where the items run ("cuda" or "cpu"), the name of the machine, and the version of torch.

    Another process asks CUDA, because a CUDA context in this process would take about 0.5 GiB of the GPU.

    Raises:
        LabError: There is no such machine, or it cannot be used.
    """
    answer = _in_a_process(_ask_machine, machine, limit=START_LIMIT)
    if answer is None:
        raise LabError(f"torch and the GPU did not start within {START_LIMIT:.0f} s: try again")
    if "trace" in answer:
        raise LabError(f"the GPU cannot be used: {(answer['trace'].splitlines() or ['no reason given'])[-1]}")
    if "error" in answer:
        raise LabError(answer["error"])
    return answer["where"], answer["name"], answer["torch"]


def _ask_machine(machine: str | None) -> dict[str, Any]:
    from lab.bench.gpu_row import find_machine

    return find_machine(machine)


def _measure(item: Item, where: DeviceType) -> dict[str, Any]:
    from lab.bench.gpu_row import figures

    return figures(item, where)


# ---- a process for each item -------------------------------------------------------------------------------


def _in_a_process(work: Work, *arguments: Any, limit: float) -> dict[str, Any] | None:
    """Return what ``work`` returns in a process of its own, or how that process ended.

    The process is forked from a server that has imported everything and used no CUDA. Neither this process
    nor the server has a CUDA context, and no process waits for an import but the first. The server ends with
    this process.

    The result is None if the process was ended after ``limit`` seconds. If this process is killed, the other
    one ends too.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.bench.gpu_imports"])
    receiver, sender = context.Pipe(duplex=False)
    with NamedTemporaryFile() as output:
        process = context.Process(target=_run, args=(work, arguments, sender, output.name, this_process()))
        process.start()
        sender.close()
        try:
            figures = receiver.recv() if receiver.poll(limit) else None
        except EOFError:
            process.join()
            code = process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            trace = output.read().decode(errors="replace")[-2000:]
            figures = {"failed": f"its process {how}", "trace": trace}
        finally:
            # End the process and those that it started. If it has ended, or has no group yet, there is none.
            assert process.pid is not None, "it has started"
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            receiver.close()
    return figures


def _run(work: Work, arguments: tuple[Any, ...], sender: Connection, output: str, owner: ProcessId) -> None:
    """Send the result of ``work``; what is printed goes to the file ``output``."""
    os.setsid()
    end_after(partial(wait_for_owner, *owner))
    try:
        file = os.open(output, os.O_WRONLY)
    except FileNotFoundError:
        # The command was interrupted before this process began.
        return
    os.dup2(file, 1)
    os.dup2(file, 2)
    for variable in ALLOCATOR_VARIABLES:
        os.environ.pop(variable, None)
    sender.send(work(*arguments))
