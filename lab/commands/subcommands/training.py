"""``lab run``, ``lab train`` and ``lab export``: training without a notebook."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.commands.base import (
    DTYPE,
    HOST_DIR,
    JSON,
    LORA,
    RECIPE,
    SET,
    TEXT,
    TOKENIZER,
    TOKENS,
    integer,
    number,
    one_line_errors,
    path,
    pick,
    print_answer,
    status,
)

if TYPE_CHECKING:
    from lab.training.train_loop import StepRecord


OTHERS_SECONDS = 10
"""How long a rank other than 0 waits before it prints its error.

An error that all ranks have is printed once: by rank 0, after which torchrun ends the ranks that still wait.
"""


ACCUMULATE = click.option(
    "--accumulate", type=integer, default=1, help="Batches whose gradients a step sums. [1]"
)


@click.command()
@click.argument("model")
@TOKENS
@RECIPE
@SET
@LORA
@DTYPE
@click.option("--steps", type=integer, default=3, help="Training steps. [3]")
@click.option("--rows", type=integer, default=1, help="Sequences in a batch. [1]")
@ACCUMULATE
@TEXT
@TOKENIZER
@click.option("--lr", "learning_rate", type=number, default=1e-3, help="Learning rate. [0.001]")
@click.option("--clip-norm", type=number, default=1.0, help="The largest norm of the gradient. [1]")
@click.option(
    "--seed", type=integer, default=0, help="The seed of weights that the model does not bring. [0]"
)
@click.option("--device-memory", help="A rank that needs more is out of memory: 80GiB.")
@HOST_DIR
@click.option("--ranks", type=integer, default=4, help="Ranks to start. [4]")
@click.option("--profile", default="local", help="Where ranks run; see lab cluster profiles. [local]")
@click.option(
    "--profile-set", "fields", multiple=True, metavar="FIELD=VALUE", help="Override a field of the profile."
)
@JSON
@one_line_errors
def run(
    model: str,
    recipe: str,
    knobs: tuple[str, ...],
    ranks: int,
    profile: str,
    fields: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Train MODEL for a few steps on ranks, and print losses, measured and planned peaks; keep nothing."""
    from cluster.profiles.parsing import parse_fields
    from lab.jupyter.executing import refuse_notebook

    refuse_notebook(model)
    from cluster.ranks import Cluster
    from lab import models
    from lab.commands.report import run_json, run_text
    from lab.planning.host_folder import check_host_dir
    from lab.planning.plan import plan_job
    from lab.recipe.jobs import Disk, Machine, TrainSettings, make_job
    from lab.recipe.recipe import parse_knobs
    from lab.step.on_ranks import read_source
    from lab.training.records import Progress
    from lab.training.run import run
    from lab.units import parse_bytes

    cluster = Cluster(ranks, profile, **parse_fields(profile, fields))
    sizes = {"tokens": settings.pop("tokens"), **pick(("rows", "accumulate", "lora", "dtype"), settings)}
    job = make_job(model, recipe, ranks=ranks, **sizes, **parse_knobs(knobs))
    # What the ranks would refuse is refused before they are started.
    of_others = ("rows", "accumulate", "lora", "dtype", "device_memory", "host_dir")
    told = {name: value for name, value in settings.items() if name not in of_others}
    read_source(job, TrainSettings(**told), models.shape_of(model, job.dtype).V)
    if settings["device_memory"] is not None:
        parse_bytes(settings["device_memory"])
    disk = None if check_host_dir(job, settings["host_dir"]) is None else Disk()
    with status(f"starting {ranks} ranks") as say:

        def watch(message: object) -> None:
            if isinstance(message, Progress) and message.rank == 0:
                loss = "" if message.loss is None else f", loss {message.loss:.4f}"
                say(f"step {message.step + 1} of {message.steps}{loss}")

        with cluster:
            say(f"planning {model}")
            planned = plan_job(job, Machine(workspace=cluster.device_type == "cuda", disk=disk))
            measured = run(model, job.recipe, tokens=job.tokens, cluster=cluster, watch=watch, **settings)
    print_answer(run_json(measured, planned) if as_json else run_text(measured, planned))


@click.command()
@click.argument("model")
@TOKENS
@RECIPE
@SET
@DTYPE
@click.option("--steps", type=integer, required=True, help="Steps in all, including those before a resume.")
@click.option("--rows", type=integer, default=1, help="Sequences in a batch. [1]")
@ACCUMULATE
@TEXT
@TOKENIZER
@click.option("--validate", type=path, metavar="TEXT", help="A text whose loss each checkpoint reports.")
@click.option("--checkpoint", type=path, required=True, help="Folder for checkpoints.")
@click.option("--every", type=integer, default=100, help="Steps between two checkpoints. [100]")
@click.option("--keep", type=integer, default=2, help="How many of the newest checkpoints to keep. [2]")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint.")
@click.option("--lr", "learning_rate", type=number, default=1e-3, help="Learning rate. [0.001]")
@click.option("--warmup", type=integer, default=0, help="Steps in which the learning rate rises. [0]")
@click.option("--schedule", default="constant", help="Of the learning rate: constant or cosine. [constant]")
@click.option("--weight-decay", type=number, default=0.01, help="The weight decay of AdamW. [0.01]")
@click.option("--clip-norm", type=number, default=1.0, help="The largest norm of the gradient. [1]")
@click.option(
    "--seed", type=integer, default=0, help="The seed of weights that the model does not bring. [0]"
)
@click.option("--ranks", type=integer, help="Ranks to start; torchrun starts its own. [4]")
@click.option("--profile", default="local", help="Where ranks run; see lab cluster profiles. [local]")
@click.option(
    "--profile-set", "fields", multiple=True, metavar="FIELD=VALUE", help="Override a field of the profile."
)
@click.option("--start-timeout", type=number, default=60.0, help="Seconds for the ranks to start. [60]")
@click.option("--timeout", type=number, help="Seconds for a collective. [gloo 60; NCCL 600 or 3 layers]")
@HOST_DIR
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per step.")
@one_line_errors
def train(
    ranks: int | None,
    profile: str,
    fields: tuple[str, ...],
    start_timeout: float,
    as_json: bool,
    **settings: Any,
) -> None:
    """Train MODEL with checkpoints: on ranks of its own, or as one rank of torchrun."""
    from cluster import torchrun

    if torchrun.launched():
        _train_as_rank(ranks, as_json, settings)
    else:
        from cluster.profiles.parsing import parse_fields
        from cluster.ranks import Cluster

        overrides = parse_fields(profile, fields)
        count = 4 if ranks is None else ranks
        _train(Cluster(count, profile, start_timeout=start_timeout, **overrides), as_json, settings)


@click.command()
@click.argument("checkpoint", type=path)
@click.argument("out", type=path)
@click.option("--max-file", metavar="BYTES", default="5GB", help="Of weights in a file, and in memory. [5GB]")
@one_line_errors
def export(checkpoint: Path, out: Path, max_file: str) -> None:
    """Write the newest checkpoint in the folder CHECKPOINT as a Hugging Face directory OUT."""
    from lab.training.checkpoints import export

    click.echo(f"{export(checkpoint, out, max_file=max_file)} is now in {out}")


def _train_as_rank(ranks: int | None, as_json: bool, settings: dict[str, Any]) -> None:
    from cluster import torchrun
    from lab.errors import LabError

    torchrun.check_ranks(ranks)
    with torchrun.process_group() as rank:
        try:
            _train(None, as_json, settings, prints=rank == 0)
        except LabError as error:
            if rank == 0:
                raise
            time.sleep(OTHERS_SECONDS)
            raise LabError(f"rank {rank}: {error}") from error


def _train(cluster: Any, as_json: bool, settings: dict[str, Any], *, prints: bool = True) -> None:
    from lab.recipe.recipe import parse_knobs
    from lab.training.train import train

    knobs = parse_knobs(settings.pop("knobs"))
    if not prints:
        train(cluster=cluster, **settings, **knobs)
        return
    with _step_printer(as_json) as print_step:
        train(cluster=cluster, watch=print_step, **settings, **knobs)


@contextmanager
def _step_printer(as_json: bool) -> Iterator[Callable[[StepRecord], None]]:
    """Yield the function that prints a step: as JSON, as a progress bar on a terminal, else as text."""
    if as_json:
        yield lambda step: click.echo(json.dumps(step.to_json()))
    elif not sys.stdout.isatty():
        yield lambda step: click.echo(_line(step))
    else:
        from rich.progress import BarColumn, Progress, TextColumn

        with Progress(BarColumn(bar_width=20), TextColumn("{task.description}")) as bar:
            task = bar.add_task("")
            yield lambda step: bar.update(
                task, total=step.steps, completed=step.step, description=_line(step)
            )


def _line(step: StepRecord) -> str:
    from lab.units import format_bytes, format_seconds

    loss = step.validation_loss
    validation = "" if loss is None else f"validation {loss:.4f}   "
    left = f"{format_seconds(step.seconds_left)} left" if step.step < step.steps else "done"
    return (
        f"step {step.step:>{len(str(step.steps))}}/{step.steps}   loss {step.loss:.4f}   {validation}"
        f"{step.tokens_per_second:,.0f} tokens/s, {step.tokens_per_second_and_rank:,.0f} per rank   "
        f"peak {format_bytes(step.device_peak)} per rank   {left}"
    )


COMMANDS = (run, train, export)
