"""``lab bench``: one command a bench."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.commands.base import JSON, TEXT, TOKENIZER, grow_segments, plainly, status

if TYPE_CHECKING:
    from lab.bench.table import Row, Say


@click.group()
def bench() -> None:
    """Measure ratios, each within one run on this machine."""
    grow_segments()


OUT = click.option(
    "--out", type=click.Path(path_type=Path), help="Append each row to this file too, as JSON."
)


def _note(said: str) -> None:
    click.echo(f"lab: {said}", err=True)


def _show(name: str, measure: Callable[[Say], Iterable[Row]], as_json: bool, out: Path | None = None) -> None:
    """Measure while a line says what goes on, and print the rows; to ``out`` they go as they are measured."""
    from lab.bench.lines import appending
    from lab.bench.table import write

    rows = []
    with status(name) as say, nullcontext() if out is None else appending(out, _note) as append:
        for row in measure(say):
            rows.append(row)
            if append is not None:
                append(row)
    click.echo(write(rows, as_json=as_json))


@bench.command()
@JSON
@plainly
def meter(as_json: bool) -> None:
    """A training step with the memory meter over the same step without it."""
    from lab.bench.meter import measure_meter

    _show("meter", measure_meter, as_json)


@bench.command()
@JSON
@plainly
def parity(as_json: bool) -> None:
    """Each technique's worst gradient error against plain transformers, for each kind of model."""
    from lab.bench.parity import measure_parity

    _show("parity", measure_parity, as_json)


@bench.command("compile")
@JSON
@plainly
def compiled(as_json: bool) -> None:
    """A tile of norm and of MLP run by torch.compile over the same without."""
    from lab.bench.compiled import measure_compiled

    _show("compile", measure_compiled, as_json)


@bench.command()
@JSON
@plainly
def planning(as_json: bool) -> None:
    """What a plan of Llama3-8B at 5M tokens takes: walked, remembered, in closed form."""
    from lab.bench.planning import measure_planning

    _show("planning", measure_planning, as_json)


@bench.command()
@click.option("--tokens", type=click.IntRange(8), default=128, show_default=True, help="Of the shortest.")
@click.option("--doublings", type=click.IntRange(1), default=4, show_default=True, help="Of the context.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Timed, each.")
@JSON
@plainly
def growth(tokens: int, doublings: int, steps: int, as_json: bool) -> None:
    """Seconds and bytes of a step over context, rung by rung, and over ranks."""
    from lab.bench.growth import measure_growth

    _show("growth", partial(measure_growth, tokens, doublings, steps), as_json)


@bench.command()
@click.option("--times", type=click.IntRange(1), default=10, show_default=True, help="Of each fault.")
@JSON
@plainly
def faults(times: int, as_json: bool) -> None:
    """Each fault, caused for real: seconds to the message and to recovery, processes left over."""
    from lab.bench.faults import measure_faults

    _show("faults", partial(measure_faults, times), as_json)


@bench.command()
@click.option(
    "--tokens", multiple=True, help="A length, as often as wanted. [64K, 256K, 1M; 256, 512 on CPU]"
)
@OUT
@JSON
@plainly
def attention(tokens: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Attention kernels over a large matrix product, and their worst error on slices."""
    from lab.bench.attention import measure_attention
    from lab.units import parse_tokens

    _show("attention", partial(measure_attention, [parse_tokens(length) for length in tokens]), as_json, out)


@bench.command()
@click.argument("names", metavar="[NOTEBOOK]...", nargs=-1)
@click.option("--times", type=click.IntRange(1), default=10, show_default=True, help="Of the whole sequence.")
@JSON
@plainly
def notebooks(names: tuple[str, ...], times: int, as_json: bool) -> None:
    """The notebooks executed again and again: failures, changed facts and seconds of each."""
    from lab.bench.notebooks import measure_notebooks

    _show("notebooks", partial(measure_notebooks, list(names), times), as_json)


@bench.command()
@click.option("--draws", type=click.IntRange(0), default=0, help="Random models and recipes to try too. [0]")
@click.option("--seed", type=int, default=0, help="Seed of the draws. [0]")
@click.option("--replay", metavar="JSON", help="Examine only this draw; a failed draw prints its JSON.")
@JSON
@plainly
def inputs(draws: int, seed: int, replay: str | None, as_json: bool) -> None:
    """What arrives from outside: models, batches, adapters; right, or refused with the message."""
    from lab.bench.inputs import measure_inputs

    _show("inputs", partial(measure_inputs, draws, seed, replay), as_json)


@bench.command()
@JSON
@plainly
def upipe_vs_deepspeed(as_json: bool) -> None:
    """Our Ulysses and our UPipe over DeepSpeed's Ulysses: seconds of a step, peak bytes of attention."""
    from lab.bench.upipe_vs_deepspeed import measure_upipe_vs_deepspeed

    _show("upipe-vs-deepspeed", measure_upipe_vs_deepspeed, as_json)


@bench.command()
@click.option("--minutes", type=float, required=True, help="What cannot end in them is not begun.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
@click.option("--machine", type=click.Choice(["cuda", "cpu"]), help="cpu: the same list, of tiny. [a GPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON a row.")
@plainly
def gpu(minutes: float, out: Path, machine: str | None, as_json: bool) -> None:
    """What a first hour on a GPU measures, one line of JSON a result; goes on where it was stopped."""
    from lab.bench.gpu import measure_gpu, row_text

    with status("gpu") as say:
        for row in measure_gpu(out, minutes, say, _note, machine=machine):
            click.echo(json.dumps(row) if as_json else row_text(row))


@bench.command()
@click.argument("model")
@click.option("--ranks", type=click.IntRange(1), required=True, help="GPUs in all, of which this is one.")
@click.option("--tokens", "contexts", multiple=True, required=True, help="Give it once a context: 128K.")
@click.option("--layers", type=int, help="The model's first layers alone. [all]")
@click.option("--steps", type=int, default=5, show_default=True, help="Timed, each; 0: the metered one.")
@click.option("--device-memory", help="Stands for a smaller GPU: 80GiB.")
@TEXT
@TOKENIZER
@OUT
@JSON
@plainly
def rehearsals(
    model: str, contexts: tuple[str, ...], out: Path | None, as_json: bool, **settings: Any
) -> None:
    """Every recipe of MODEL rehearsed: planned over measured bytes, seconds beside each other."""
    from lab.bench.rehearsals import measure_rehearsals
    from lab.units import parse_tokens

    _show(
        "rehearsals",
        partial(measure_rehearsals, model, [parse_tokens(given) for given in contexts], **settings),
        as_json,
        out,
    )
