"""``lab bench``: a command for each benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.commands.base import (
    JSON,
    RECIPE,
    TEXT,
    TOKENIZER,
    grow_segments,
    integer,
    number,
    one_line_errors,
    path,
    status,
)

if TYPE_CHECKING:
    from lab.bench.table import Row, Say


@click.group()
def bench() -> None:
    """Run a benchmark. The ratios of one run are comparable; seconds depend on the machine."""
    grow_segments()


OUT = click.option("--out", type=path, help="Also append each row to this file, as JSON.")


def _note(message: str) -> None:
    click.echo(f"lab: {message}", err=True)


def _print_rows(
    name: str, measure: Callable[[Say], Iterable[Row]], as_json: bool, out: Path | None = None
) -> None:
    """Measure under a status line and print the rows; ``out`` gets each row as soon as it is measured."""
    from lab.bench.lines import append_lines
    from lab.bench.table import rows_text

    rows = []
    with status(name) as say, nullcontext() if out is None else append_lines(out, _note) as append:
        for row in measure(say):
            rows.append(row)
            if append is not None:
                append(row)
    click.echo(rows_text(rows, as_json=as_json))


@bench.command()
@JSON
@one_line_errors
def meter(as_json: bool) -> None:
    """Compare a training step under the memory meter with the same step without it."""
    from lab.bench.meter import measure_meter

    _print_rows("meter", measure_meter, as_json)


@bench.command()
@JSON
@one_line_errors
def parity(as_json: bool) -> None:
    """Compare the gradients of each technique with plain transformers', for each family of models."""
    from lab.bench.parity import measure_parity

    _print_rows("parity", measure_parity, as_json)


@bench.command("compile")
@JSON
@one_line_errors
def compile_(as_json: bool) -> None:
    """Compare a tile of a norm and of an MLP under torch.compile with the same tile without it."""
    from lab.bench.compiled import measure_compiled

    _print_rows("compile", measure_compiled, as_json)


@bench.command()
@JSON
@one_line_errors
def planning(as_json: bool) -> None:
    """Time a plan of Llama3-8B at 5M tokens: computed, from the cache, and in closed form."""
    from lab.bench.planning import measure_planning

    _print_rows("planning", measure_planning, as_json)


@bench.command()
@click.option(
    "--tokens", type=click.IntRange(8), default=128, show_default=True, help="Tokens of the shortest context."
)
@click.option(
    "--doublings",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="How often the context is doubled.",
)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Timed steps of each.")
@JSON
@one_line_errors
def growth(tokens: int, doublings: int, steps: int, as_json: bool) -> None:
    """Measure seconds and bytes of a step: on each rung as the context grows, then as ranks are added."""
    from lab.bench.growth import measure_growth

    _print_rows("growth", partial(measure_growth, tokens, doublings, steps), as_json)


@bench.command()
@click.argument("models", nargs=-1)
@RECIPE
@click.option("--tokens", default="3M", show_default=True, help="The length of the sequence.")
@JSON
@one_line_errors
def degrees(models: tuple[str, ...], recipe: str, tokens: str, as_json: bool) -> None:
    """Plan each legal pair of degrees of MODELS (all presets) on 8, 16 and 32 ranks, and the ladder's."""
    from lab.bench.degrees import compare_degrees
    from lab.units import parse_tokens

    _print_rows("degrees", partial(compare_degrees, models, recipe, parse_tokens(tokens)), as_json)


@bench.command()
@click.option(
    "--times", type=click.IntRange(1), default=10, show_default=True, help="How often each fault is caused."
)
@JSON
@one_line_errors
def faults(times: int, as_json: bool) -> None:
    """Cause each fault, and measure the seconds to its message and to recovery, and processes left."""
    from lab.bench.faults import measure_faults

    _print_rows("faults", partial(measure_faults, times), as_json)


@bench.command()
@click.option("--tokens", multiple=True, help="A length; may be repeated. [64K, 256K, 1M; 256, 512 on CPU]")
@OUT
@JSON
@one_line_errors
def attention(tokens: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Compare attention kernels with a large matrix product, and check slices of their results."""
    from lab.bench.attention import measure_attention
    from lab.units import parse_tokens

    _print_rows(
        "attention", partial(measure_attention, [parse_tokens(length) for length in tokens]), as_json, out
    )


@bench.command()
@click.argument("names", metavar="[NOTEBOOK]...", nargs=-1)
@click.option(
    "--times", type=click.IntRange(1), default=10, show_default=True, help="How often all are executed."
)
@JSON
@one_line_errors
def notebooks(names: tuple[str, ...], times: int, as_json: bool) -> None:
    """Execute the notebooks several times: failures, changed facts and seconds of each."""
    from lab.bench.notebooks import measure_notebooks

    _print_rows("notebooks", partial(measure_notebooks, list(names), times), as_json)


@bench.command()
@click.option(
    "--draws", type=click.IntRange(0), default=0, help="Also try so many random models and recipes. [0]"
)
@click.option("--seed", type=integer, default=0, help="Seed of the draws. [0]")
@click.option("--replay", metavar="JSON", help="Check only this draw; a failed draw prints its JSON.")
@JSON
@one_line_errors
def inputs(draws: int, seed: int, replay: str | None, as_json: bool) -> None:
    """Check that models, batches and adapters from outside are computed right or refused."""
    from lab.bench.inputs import measure_inputs

    _print_rows("inputs", partial(measure_inputs, draws, seed, replay), as_json)


@bench.command()
@JSON
@one_line_errors
def upipe_vs_deepspeed(as_json: bool) -> None:
    """Compare this lab's Ulysses and UPipe with DeepSpeed's Ulysses, in seconds and peak bytes."""
    from lab.bench.upipe_vs_deepspeed import measure_upipe_vs_deepspeed

    _print_rows("upipe-vs-deepspeed", measure_upipe_vs_deepspeed, as_json)


@bench.command()
@JSON
@one_line_errors
def tiling_vs_deepspeed(as_json: bool) -> None:
    """Compare the tiled MLP and loss with DeepSpeed's and TRL's: seconds, peak bytes, errors of gradients."""
    from lab.bench.tiling_vs_deepspeed import compare_tiles

    _print_rows("tiling-vs-deepspeed", compare_tiles, as_json)


@bench.command()
@click.option("--minutes", type=number, required=True, help="Nothing starts that would take longer.")
@click.option("--out", type=path, required=True, help="The folder of the results.")
@click.option(
    "--machine", type=click.Choice(["cuda", "cpu"]), help="cpu runs the same list with tiny. [cuda]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per row.")
@one_line_errors
def gpu(minutes: float, out: Path, machine: str | None, as_json: bool) -> None:
    """Measure a list of figures on a GPU, one line of JSON each; skip those that are in the folder."""
    from lab.bench.gpu import measure_gpu, row_text

    with status("gpu") as say:
        for row in measure_gpu(out, minutes, say, _note, machine=machine):
            click.echo(json.dumps(row) if as_json else row_text(row))


@bench.command()
@click.option("--machine", type=click.Choice(["cuda", "cpu"]), default="cuda", help="As for gpu. [cuda]")
@one_line_errors
def gpu_plans(machine: str) -> None:
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
                make_plans(
                    item if machine == "cuda" else item.small(), "cuda" if machine == "cuda" else "cpu"
                )


@bench.command()
@click.argument("model")
@click.option(
    "--ranks", type=click.IntRange(1), required=True, help="GPUs in all; this machine is one of them."
)
@click.option("--tokens", "contexts", multiple=True, required=True, help="A context, 128K; may be repeated.")
@click.option("--layers", type=integer, help="Only the first so many layers. [all]")
@click.option(
    "--steps",
    type=integer,
    default=5,
    show_default=True,
    help="Timed steps of each; 0 times the metered step.",
)
@click.option("--device-memory", help="Act as a GPU of this memory: 80GiB.")
@TEXT
@TOKENIZER
@OUT
@JSON
@one_line_errors
def rehearsals(
    model: str, contexts: tuple[str, ...], out: Path | None, as_json: bool, **settings: Any
) -> None:
    """Rehearse every recipe with MODEL: planned over measured bytes, and seconds."""
    from lab.bench.rehearsals import measure_rehearsals
    from lab.units import parse_tokens

    _print_rows(
        "rehearsals",
        partial(measure_rehearsals, model, [parse_tokens(context) for context in contexts], **settings),
        as_json,
        out,
    )


COMMANDS = (bench,)
