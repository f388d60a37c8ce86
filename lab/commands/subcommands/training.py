"""``lab run``, ``lab train`` and ``lab export``: training without a notebook."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.commands.base import (
    DTYPE,
    HOST_DIR,
    JSON,
    LORA,
    PROFILE,
    RECIPE,
    ROWS,
    SET,
    TEXT,
    TOKENS,
    UPDATES,
    integer,
    number,
    path,
    pick,
    print_answer,
    status,
)

if TYPE_CHECKING:
    from cluster.ranks import Cluster
    from lab.training.train_loop import StepRecord


OTHERS_SECONDS = 10
"""How long a rank other than 0 waits before it prints its error.

An error that all ranks have is printed once: by rank 0, after which torchrun ends the ranks that still wait.
"""


@click.command()
@click.argument("model")
@TOKENS
@RECIPE
@SET
@LORA
@DTYPE
@click.option("--steps", type=integer, default=3, help="Training steps. [3]")
@ROWS
@TEXT
@UPDATES
@click.option("--device-memory", help="A rank that needs more is out of memory: 80GiB.")
@HOST_DIR
@click.option("--ranks", type=integer, default=4, help="Ranks to start. [4]")
@PROFILE
@JSON
def run(model: str, recipe: str, knobs: tuple[str, ...], ranks: int, as_json: bool, **settings: Any) -> None:
    """Train MODEL for a few steps on ranks, and print losses, measured and planned peaks; keep nothing."""
    from lab.jupyter.executing import refuse_notebook

    refuse_notebook(model)
    from lab.commands.report import run_json, run_text
    from lab.planning.host_folder import check_host_dir
    from lab.planning.plan import plan_job
    from lab.recipe.jobs import Disk, Machine, TrainSettings
    from lab.recipe.recipe import parse_knobs
    from lab.step.on_ranks import make_training
    from lab.training.records import Progress
    from lab.training.run import run_job
    from lab.units import parse_bytes

    cluster = _cluster(ranks, **pick(("profile", "fields"), settings))
    # What the ranks would refuse is refused before they are started.
    how = TrainSettings(
        **pick(("steps", "text", "tokenizer", "learning_rate", "clip_norm", "seed"), settings)
    )
    sizes = pick(("tokens", "rows", "accumulate", "lora", "dtype"), settings)
    training = make_training(model, recipe, how, ranks=ranks, **sizes, **parse_knobs(knobs))
    memory, host_path = settings["device_memory"], check_host_dir(training.job, settings["host_dir"])
    limit = None if memory is None else parse_bytes(memory)
    with status(f"starting {ranks} ranks") as say:

        def watch(message: object) -> None:
            if isinstance(message, Progress) and message.rank == 0:
                loss = "" if message.loss is None else f", loss {message.loss:.4f}"
                say(f"step {message.step + 1} of {message.steps}{loss}")

        with cluster:
            say(f"planning {model}")
            disk = None if host_path is None else Disk()
            planned = plan_job(training.job, Machine(workspace=cluster.device_type == "cuda", disk=disk))
            measured = run_job(training, cluster, limit=limit, host_path=host_path, watch=watch)
    print_answer(run_json(measured, planned) if as_json else run_text(measured, planned))


@click.command()
@click.argument("model")
@TOKENS
@RECIPE
@SET
@DTYPE
@click.option("--steps", type=integer, required=True, help="Steps in all, including those before a resume.")
@ROWS
@TEXT
@click.option("--validate", type=path, metavar="TEXT", help="A text whose loss each checkpoint reports.")
@click.option("--checkpoint", type=path, required=True, help="Folder for checkpoints.")
@click.option("--every", type=integer, default=100, help="Steps between two checkpoints. [100]")
@click.option("--keep", type=integer, default=2, help="How many of the newest checkpoints to keep. [2]")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint.")
@UPDATES
@click.option("--warmup", type=integer, default=0, help="Steps in which the learning rate rises. [0]")
@click.option("--schedule", default="constant", help="Of the learning rate: constant or cosine. [constant]")
@click.option("--weight-decay", type=number, default=0.01, help="The weight decay of AdamW. [0.01]")
@click.option("--ranks", type=integer, help="Ranks to start; torchrun starts its own. [4]")
@PROFILE
@click.option("--start-timeout", type=number, default=60.0, help="Seconds for the ranks to start. [60]")
@click.option("--timeout", type=number, help="Seconds for a collective. [gloo 60; NCCL 600 or 3 layers]")
@HOST_DIR
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per step.")
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
        cluster = _cluster(4 if ranks is None else ranks, profile, fields, start_timeout=start_timeout)
        _train(cluster, as_json, settings)


@click.command()
@click.argument("checkpoint", type=path)
@click.argument("out", type=path)
@click.option("--max-file", metavar="BYTES", default="5GB", help="Of weights in a file, and in memory. [5GB]")
def export(checkpoint: Path, out: Path, max_file: str) -> None:
    """Write the newest checkpoint in the folder CHECKPOINT as a Hugging Face directory OUT."""
    from lab.training.checkpoints import export

    click.echo(f"{export(checkpoint, out, max_file=max_file)} is now in {out}")


def _cluster(ranks: int, profile: str, fields: tuple[str, ...], **settings: Any) -> Cluster:
    from cluster.profiles.parsing import parse_fields
    from cluster.ranks import Cluster

    return Cluster(ranks, profile, **settings, **parse_fields(profile, fields))


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
    from lab import models
    from lab.recipe.recipe import parse_knobs
    from lab.training.train import train

    knobs = parse_knobs(settings.pop("knobs"))
    if (
        prints
        and not settings["resume"]
        and (note := models.weights_note(settings["model"], settings["dtype"]))
    ):
        click.echo(note, err=as_json)
    with _step_printer(as_json) if prints else nullcontext() as watch:
        train(cluster=cluster, watch=watch, **settings, **knobs)


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
