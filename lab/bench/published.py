"""Figures that other people measured and published, each with the plan of the nearest step.

The rows are in ``published.toml``, and those of papers are made from ``paper_figures.py``. Nothing that is
planned is stored, and no rate is fitted to a row. What a figure of memory means decides what it is compared
with, see ``PLANNED``.
"""

from __future__ import annotations

import shlex
import statistics
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from multiprocessing import get_context
from typing import Any, Literal

from cluster.limits import cores
from cluster.progress import progress
from lab.bench.paper_figures import Published, rows
from lab.bench.table import Row, Say, rows_text
from lab.errors import LabError
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.hardware import make_machine
from lab.planning.plan import Plan, plan_job
from lab.recipe.jobs import Job, Machine, make_job
from lab.recipe.ladder import TILE
from lab.recipe.recipe import parse_knobs
from lab.units import GiB, format_tokens

Nearness = Literal["exact", "near", "not"]
"""Whether the plan is of the measured step, of a step near to it, or of one that is only drawn beside it."""

UNITS = {"GiB": GiB, "GB": 10**9}


def _allocated(plan: Plan) -> int:
    return plan.device_peak - outside_workspace(plan.ranks)


def _of_card(plan: Plan, *, expandable: bool = False) -> int:
    """What the allocator reserves, and what CUDA takes outside of it."""
    reserved = plan.reserved_peak(expandable=expandable)
    assert reserved is not None
    return reserved


def _reserved(plan: Plan, *, expandable: bool = False) -> int:
    return _of_card(plan, expandable=expandable) - outside_workspace(plan.ranks)


PLANNED: dict[str, tuple[str, Callable[[Plan], int]]] = {
    "active": ("allocated", _allocated),
    "allocated": ("allocated", _allocated),
    "peak": ("allocated", _allocated),
    "not stated": ("allocated", _allocated),
    "estimate": ("allocated", _allocated),
    "reserved": ("reserved", _reserved),
    "reserved, expandable": ("reserved", partial(_reserved, expandable=True)),
    "nvidia-smi": ("of the card", _of_card),
    "limit, expandable": ("of the card", partial(_of_card, expandable=True)),
    "sum of a figure": ("allocated", lambda plan: plan.device_peak),
}
"""The meanings of figures of memory: the kind of the bytes, and those of a plan that they are compared with.

Where the source has expandable segments, so has the simulated allocator. "limit" is the memory of the card,
which the longest context that ran has nearly filled. A figure of a paper that adds up all that a device holds
has CUDA's own bytes in it."""


@dataclass(frozen=True)
class Measured:
    """A row: a step that was measured, and the plan that is nearest to it.

    Attributes:
        name: Its name.
        source: The name of its source in ``sources()``.
        config: What was run, in the words of the source.
        state: The dtypes of parameters, gradients and optimizer state, as far as the source says them.
        plan: The arguments of ``lab plan``.
        fit: See ``Nearness``.
        ran: Whether the step ran; otherwise it was out of memory.
        memory: The bytes of a device: a number, its unit, and what it means; None if they were not reported.
        time: Seconds, "s", or "tokens/s a GPU"; None if they were not reported.
        lacks: What the source has and no recipe expresses.
        memory_cause: Why the plan's bytes are off; empty if they are not, or if the cause is not found.
        time_cause: Why the plan's seconds are off.
    """

    name: str
    source: str
    config: str
    plan: str
    fit: Nearness
    state: str = ""
    ran: bool = True
    memory: tuple[float, str, str] | None = None
    time: tuple[float, str] | None = None
    lacks: tuple[str, ...] = ()
    memory_cause: str = ""
    time_cause: str = ""

    @property
    def command(self) -> str:
        """The command that prints the plan. Its paths begin at the top of the repository."""
        return f"lab plan {self.plan}"

    def make_job(self) -> tuple[Job, Machine]:
        """Return the nearest step, and the machine that it is planned for.

        Raises:
            LabError: See ``lab.plan``.
        """
        given = vars(_PARSER.parse_args(shlex.split(self.plan)))
        model, knobs, machine = given.pop("model"), given.pop("set"), make_machine(device=given.pop("device"))
        if "/" in model:
            model = str(files("lab.bench").joinpath("models", model.rpartition("/")[2]))
        return make_job(model, **given, **parse_knobs(knobs)), machine


_PARSER = ArgumentParser(allow_abbrev=False)
"""Reads ``Measured.plan``: options of ``lab plan``."""
_PARSER.add_argument("model")
_PARSER.add_argument("--set", action="append", default=[])
for _name in ("tokens", "recipe", "device", "dtype", "lora"):
    _PARSER.add_argument(f"--{_name}")
for _name in ("ranks", "rows", "accumulate"):
    _PARSER.add_argument(f"--{_name}", type=int, default=1)


@dataclass(frozen=True)
class Compared:
    """A row, and what is planned for it.

    Attributes:
        row: The row.
        memory: The planned bytes of the figure's meaning, in its unit; None without a figure or a plan.
        time: The planned time in the figure's unit.
        fits: Whether the plan says that the step fits the device that it is planned for.
        refusal: Why there is no plan; empty if there is one.
    """

    row: Measured
    memory: float | None = None
    time: float | None = None
    fits: bool | None = None
    refusal: str = ""

    @property
    def memory_ratio(self) -> float | None:
        """Planned by measured bytes: below 1 is optimistic."""
        return self.memory / self.row.memory[0] if self.memory and self.row.memory else None

    @property
    def time_ratio(self) -> float | None:
        """Planned by measured seconds: below 1 is optimistic."""
        if not self.time or not self.row.time:
            return None
        measured, unit = self.row.time
        return self.time / measured if unit == "s" else measured / self.time

    @property
    def kind(self) -> str:
        """The group of the row's figure of memory in the distribution."""
        assert self.row.memory is not None
        kind = PLANNED[self.row.memory[2]][0]
        return f"memory, {kind}, {self.row.fit}" if kind == "allocated" else f"memory, {kind}"

    @property
    def causes(self) -> Iterator[str]:
        """A sentence for each figure that is off: by more than 5% of memory, or 10% of time."""
        off = ((self.memory_ratio, 0.05, "memory", self.row.memory_cause),)
        for ratio, most, what, cause in (*off, (self.time_ratio, 0.1, "time", self.row.time_cause)):
            if ratio is not None and abs(ratio - 1) > most:
                yield f"{self.row.name}, {what} {ratio:.2f}: {cause or 'cause not found'}"
        if self.refusal:
            yield f"{self.row.name}, no plan: {self.refusal}"

    def to_row(self) -> dict[str, Any]:
        """The row as plain values."""
        memory, time = self.row.memory or (None, "", ""), self.row.time or (None, "")
        return {
            "row": self.row.name,
            "source": self.row.source,
            "fit": self.row.fit if self.row.ran else f"{self.row.fit}; OOM",
            "memory": memory[2],
            "in": memory[1],
            "measured": memory[0],
            "planned": self.memory,
            "ratio": self.memory_ratio,
            "time in": time[1].replace("tokens/s a GPU", "tokens/s"),
            "measured ": time[0],
            "planned ": self.time,
            "ratio ": self.time_ratio,
        }


# ---- the rows ----------------------------------------------------------------------------------------------


def _document() -> dict[str, Any]:
    return tomllib.loads(files("lab.bench").joinpath("published.toml").read_text())


def sources() -> dict[str, str]:
    """Return the sources by name."""
    found: dict[str, str] = _document()["sources"]
    return found


def measured(names: Iterable[str] = ()) -> tuple[Measured, ...]:
    """Return the rows of these names; all rows if none is given.

    Raises:
        LabError: There is no row of a name.
    """
    document = _document()
    document.pop("sources")
    every = []
    for name, fields in document.items():
        lists = {field: tuple(fields[field]) for field in ("memory", "time", "lacks") if field in fields}
        every.append(Measured(name, **fields | lists))
    by_name = {row.name: row for row in (*every, *_of_papers())}
    chosen = tuple(names) or tuple(by_name)
    for name in chosen:
        if name not in by_name:
            close = get_close_matches(name, by_name, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise LabError(f"no row named {name!r}{hint}: there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in chosen)


def _of_papers() -> Iterator[Measured]:
    """Yield a row for each step of ``paper_figures.py`` that a recipe stands for and that was measured."""
    for figure in rows(what="throughput"):
        if figure.rung and figure.value is not None:
            name = f"upipe-paper {figure.model} {figure.method} {format_tokens(figure.tokens or 0)}"
            time = None if figure.number is None else (figure.number, "tokens/s a GPU")
            yield _of_figure(figure, name, "upipe", "exact", ran=time is not None, time=time)
    for method in ("alst", "upipe"):
        parts = rows(source="UPipe project page, memory figure", method=method)
        total = sum(part.number or 0 for part in parts)
        memory = (round(total, 1), "GiB", "sum of a figure")
        yield _of_figure(parts[0], f"upipe figure {method} 3M", "upipe", "exact", memory=memory)
    steps = [row for row in rows(what="step") if row.source.startswith("ALST")]
    # That of 8 GPUs is among the steps.
    for figure in (*steps, *(row for row in rows(what="longest context", method="alst") if row.ranks != 8)):
        tokens = figure.tokens or int(figure.number or 0)
        name = f"alst-{tokens // 1000}k" if tokens < 10**6 else f"alst-{tokens / 1e6:g}m"
        time = (figure.number or 0, "s") if figure.what == "step" else None
        yield _of_figure(figure, name, "alst", "near", time=time, **_alst(figure))


def _alst(figure: Published) -> dict[str, Any]:
    """Return what all of ALST's rows have. All but the baseline have Liger's kernels."""
    # Its configurations have FlashAttention-2 or torch's kernel.
    knobs: dict[str, Any] = {"optimizer": "host", "kernel": "torch"}
    more: dict[str, Any] = {"memory": (79.2, "GiB", "limit, expandable"), "knobs": knobs}
    if figure.method != "baseline":
        more["lacks"] = ("fused norms, RoPE and SwiGLU",)
        knobs["norm_tile"] = TILE
        if "mlp" not in figure.method and figure.method != "alst":
            more["memory_cause"] = _AT_LIMIT
    return more


_AT_LIMIT = (
    "torch gives cached blocks back where the device is full; the simulated allocator, which has no limit, "
    "keeps them"
)


def _of_figure(
    figure: Published, name: str, source: str, fit: Nearness, knobs: dict[str, Any] | None = None, **more: Any
) -> Measured:
    tokens = figure.tokens or int(figure.number or 0)
    words = [figure.model, "--tokens", format_tokens(tokens) if tokens % 1024 == 0 else str(tokens)]
    words += ["--ranks", str(figure.ranks), "--recipe", str(figure.rung), "--device", "h100"]
    for knob, value in (figure.knobs | (knobs or {})).items():
        words += ["--set", f"{knob}={'none' if value is None else value}"]
    return Measured(name, source, f"{figure.source}: {figure.method}", " ".join(words), fit, **more)


# ---- the comparison ----------------------------------------------------------------------------------------


def compare(row: Measured) -> Compared:
    """Plan the step of a row. A plan that is refused is a result."""
    try:
        plan = plan_job(*row.make_job())
    except LabError as error:
        return Compared(row, refusal=str(error))
    memory = time = None
    if row.memory is not None:
        _, unit, meaning = row.memory
        memory = PLANNED[meaning][1](plan) / UNITS[unit]
    if row.time is not None:
        seconds = plan.step_seconds
        time = seconds if row.time[1] == "s" else plan.tokens * plan.job.step_rows / plan.ranks / seconds
    return Compared(row, memory, time, plan.fits)


@progress("planning what other people measured")
def compare_all(chosen: Sequence[Measured], say: Say = lambda _: None) -> list[Compared]:
    """Plan the steps of rows, in as many processes as there are cores."""
    if len(chosen) < 2:
        return [compare(row) for row in chosen]
    found = []
    with ProcessPoolExecutor(cores(), get_context("forkserver")) as pool:
        for number, one in enumerate(pool.map(compare, chosen), 1):
            say(f"planned {number} of {len(chosen)}: {one.row.name}")
            found.append(one)
    return found


def distribution(found: Iterable[Compared]) -> list[Row]:
    """Return a row for each kind of figure: how many there are, and where the ratios lie.

    Rows that no plan is near to are left out.
    """
    groups: dict[str, list[float]] = {}
    for one in found:
        if one.row.fit != "not":
            if one.memory_ratio is not None:
                groups.setdefault(one.kind, []).append(one.memory_ratio)
            if one.time_ratio is not None:
                groups.setdefault(f"seconds, {one.row.fit}", []).append(one.time_ratio)
    return [
        {
            "planned / measured": kind,
            "n": len(ratios),
            "lowest": min(ratios),
            "median": statistics.median(ratios),
            "highest": max(ratios),
            "within 5%": sum(abs(ratio - 1) <= 0.05 for ratio in ratios),
            "within 10%": sum(abs(ratio - 1) <= 0.1 for ratio in ratios),
        }
        for kind, ratios in sorted(groups.items())
    ]


def lacking(found: Iterable[Compared]) -> list[Row]:
    """Return what the sources have and no recipe expresses, and how many sources have it."""
    of: dict[str, set[str]] = {}
    for one in found:
        for what in one.row.lacks:
            of.setdefault(what, set()).add(one.row.source)
    listed = sorted(of.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        {"not expressible": what, "sources": len(who), "which": ", ".join(sorted(who))}
        for what, who in listed
    ]


def otherwise(found: Iterable[Compared]) -> list[str]:
    """Return a sentence for each row whose step ran although its plan does not fit, or the reverse."""
    said = {True: "ran, and the plan does not fit", False: "was out of memory, and the plan fits"}
    return [f"{one.row.name} {said[one.row.ran]}" for one in found if one.fits not in (None, one.row.ran)]


def to_json(found: Sequence[Compared]) -> dict[str, Any]:
    """Return all of it as plain values."""
    rows = [
        one.to_row()
        | {"command": one.row.command, "config": one.row.config, "state": one.row.state}
        | {"ran": one.row.ran, "fits": one.fits, "lacks": one.row.lacks, "causes": [*one.causes]}
        for one in found
    ]
    parts = {"distribution": distribution(found), "not_expressible": lacking(found)}
    return {"rows": rows, **parts, "other_outcome": otherwise(found), "sources": sources()}


def published_text(found: Sequence[Compared]) -> str:
    """Return all of it as tables and sentences."""
    used = {one.row.source: None for one in found}
    every = sources()
    tables: list[list[Row]] = [[one.to_row() for one in found], distribution(found), lacking(found)]
    parts = [rows_text(table, as_json=False) for table in tables if table]
    lists = {
        "off by more than 5% of memory or 10% of time": [said for one in found for said in one.causes],
        "another outcome": otherwise(found),
        "sources": [f"{name}: {every[name]}" for name in used],
        "commands": [f"{one.row.name}: {one.row.command}" for one in found],
    }
    parts += ["\n  ".join((title, *lines)) for title, lines in lists.items() if lines]
    return "\n\n".join(parts)
