"""``lab bench``: a command for each benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from lab.commands.base import (
    JSON,
    MACHINE,
    PART,
    RECIPE,
    TEXT,
    integer,
    number,
    path,
    status,
)

if TYPE_CHECKING:
    from lab.bench.table import Row, Say
    from lab.rehearsing.rehearse import DeviceType

    Measure: TypeAlias = Callable[[Say], Iterable[Row]]
    """Measures rows, and shows what is measured now."""


@click.group()
def bench() -> None:
    """Run a benchmark. The ratios of one run are comparable; seconds depend on the machine."""


OUT = click.option("--out", type=path, help="Also append each row to this file, as JSON.")


def _note(message: str) -> None:
    click.echo(f"lab: {message}", err=True)


def prints_rows(
    parent: click.Group, name: str | None = None
) -> Callable[[Callable[..., Measure]], click.Command]:
    """Return a decorator that makes a command of a function, whose result measures the rows to print.

    If the command has ``OUT``, the file gets each row as soon as it is measured.

    Args:
        parent: The group of the command.
        name: The name of the command; None for that of the function.
    """

    def make_command(function: Callable[..., Measure]) -> click.Command:
        @parent.command(name)
        @JSON
        @wraps(function)
        def command(as_json: bool, out: Path | None = None, **settings: Any) -> None:
            from lab.bench.json_lines import append_lines
            from lab.bench.table import rows_text

            measure, rows = function(**settings), []
            shown = click.get_current_context().info_name or ""
            with status(shown) as say, nullcontext() if out is None else append_lines(out, _note) as append:
                for row in measure(say):
                    rows.append(row)
                    if append is not None:
                        append(row)
            click.echo(rows_text(rows, as_json=as_json))

        return command

    return make_command


@prints_rows(bench)
def meter() -> Measure:
    """Compare a training step under the memory meter with the same step without it."""
    from lab.bench.meter import measure_meter

    return measure_meter


@prints_rows(bench, "compile")
def compile_() -> Measure:
    """Compare a tile of a norm and of an MLP under torch.compile with the same tile without it."""
    from lab.bench.compiled import measure_compiled

    return measure_compiled


@prints_rows(bench)
@click.argument("model", default="llama3-8b")
@RECIPE
@click.option("--tokens", default="4M", show_default=True, help="The longest context.")
@click.option("--ranks", type=integer, default=8, show_default=True, help="The ranks of the process group.")
def planning(model: str, recipe: str, tokens: str, ranks: int) -> Measure:
    """Time plans of MODEL at several lengths, its ladder, its longest context, and what fits."""
    from lab.bench.planning import measure_planning

    return partial(measure_planning, model, recipe, tokens, ranks)


@prints_rows(bench)
@click.option("--tokens", multiple=True, help="A length; may be repeated. [64K, 256K, 1M; 256, 512 on CPU]")
@OUT
def attention(tokens: tuple[str, ...]) -> Measure:
    """Compare attention kernels with a large matrix product, and check slices of their results."""
    from lab.bench.attention import measure_attention
    from lab.units import parse_tokens

    return partial(measure_attention, [parse_tokens(length) for length in tokens])


@prints_rows(bench)
def upipe_vs_deepspeed() -> Measure:
    """Compare this lab's Ulysses and UPipe with DeepSpeed's Ulysses, in seconds and peak bytes."""
    from lab.bench.upipe_vs_deepspeed import measure_upipe_vs_deepspeed

    return measure_upipe_vs_deepspeed


@prints_rows(bench)
def tiling_vs_deepspeed() -> Measure:
    """Compare the tiled MLP and loss with DeepSpeed's and TRL's: seconds, peak bytes, errors of gradients."""
    from lab.bench.tiling_vs_deepspeed import compare_tiles

    return compare_tiles


@bench.command()
@click.option("--minutes", type=number, required=True, help="Nothing starts that would take longer.")
@click.option("--out", type=path, required=True, help="The folder of the results.")
@click.option("--machine", type=MACHINE, help="cpu runs the same list with tiny. [cuda]")
@click.option(
    "--only",
    metavar="WORDS",
    multiple=True,
    help="Only items with these words in their name; may be repeated.",
)
@click.option("--again", is_flag=True, help="Measure also what the folder has.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per row.")
def gpu(
    minutes: float, out: Path, machine: str | None, only: tuple[str, ...], again: bool, as_json: bool
) -> None:
    """Measure a list of figures on a GPU, one line of JSON each; skip those that are in the folder."""
    from lab.bench.gpu import measure_gpu, row_text

    with status("gpu") as say:
        for row in measure_gpu(out, minutes, say, _note, machine=machine, only=only, again=again):
            click.echo(json.dumps(row) if as_json else row_text(row))


@bench.command("machine")
@click.argument("file", type=path)
@click.option("--machine", type=MACHINE, help="cpu measures the CPU, at a small size. [cuda]")
def machine_(file: Path, machine: str | None) -> None:
    """Measure the rates of products, kernels and copies, and write them into FILE, a name such as my.json.

    Planning commands take it: --device my.json.
    """
    from lab.bench.gpu import row_text
    from lab.bench.machine import measure_machine

    with status("machine") as say:
        for row in measure_machine(file, say, machine=machine):
            click.echo(row_text(row))


@bench.command()
@click.option("--machine", type=MACHINE, default="cuda", help="As for gpu. [cuda]")
def gpu_plans(machine: DeviceType) -> None:
    """Make the plans of the rehearsals of ``lab bench gpu``, so that a GPU does not wait for them.

    They are kept in the user's cache, which XDG_CACHE_HOME moves. They are found on another machine that has
    the same lab and the same releases of torch and transformers.
    """
    from lab.bench.gpu_items import ITEMS
    from lab.bench.gpu_row import make_plans

    with status("gpu-plans") as say:
        for item in ITEMS:
            if item.kind in ("hollow", "rehearse"):
                say(item.name)
                make_plans(item if machine == "cuda" else item.small(), machine)


@bench.command()
@click.argument("folder", type=path, required=False)
@JSON
def results(folder: Path | None, as_json: bool) -> None:
    """Show what GPUs measured; plan each step again, and compare bytes, reserved bytes and seconds.

    FOLDER has the results of ``lab bench gpu``; without it, they are those that come with the lab.
    """
    from lab.bench.replanned import replan
    from lab.bench.results import FOLDER, results_text
    from lab.bench.table import rows_text

    folder = folder or FOLDER
    with status("results") as say:
        rows = [*replan(folder, _note, say)]
    if as_json:
        click.echo(rows_text(rows, as_json=True))
        return
    machines = dict.fromkeys(row["machine"] for row in rows)
    by_machine = [[row for row in rows if row["machine"] == machine] for machine in machines]
    texts = [rows_text(part, as_json=False) for part in by_machine]
    click.echo("\n\n".join([results_text(lambda _: None, folder=folder), *texts]))


@prints_rows(bench)
@click.argument("model")
@click.option(
    "--ranks", type=click.IntRange(1), required=True, help="GPUs in all; this machine is one of them."
)
@click.option("--tokens", "contexts", multiple=True, required=True, help="A context, 128K; may be repeated.")
@PART
@click.option(
    "--steps",
    type=integer,
    default=5,
    show_default=True,
    help="Timed steps of each; 0 times the metered step.",
)
@TEXT
@OUT
def rehearsals(model: str, contexts: tuple[str, ...], **settings: Any) -> Measure:
    """Rehearse every recipe with MODEL: planned over measured bytes, and seconds."""
    from lab.bench.rehearsals import measure_rehearsals
    from lab.units import parse_tokens

    return partial(measure_rehearsals, model, [parse_tokens(context) for context in contexts], **settings)


@bench.command()
@click.argument("names", metavar="[ROW]...", nargs=-1)
@JSON
def published(names: tuple[str, ...], as_json: bool) -> None:
    """Compare figures that other people published with plans of the same steps: those of ROWs, or all."""
    from lab.bench.published import compare_all, measured, published_text, to_json

    chosen = measured(names)
    with status("published") as say:
        found = compare_all(chosen, say)
    click.echo(json.dumps(to_json(found), indent=2) if as_json else published_text(found))


COMMANDS = (bench,)
