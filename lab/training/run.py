"""Run: train on real ranks, and bring back losses, seconds and every rank's memory timeline."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from cluster.errors import RankError, Stopped
from cluster.progress import hide_progress, progress, say
from lab import models
from lab.errors import DivergedError
from lab.memory.cuda import AllocatedPeak
from lab.memory.meter import Meter
from lab.memory.out_of_memory import OutOfMemory
from lab.memory.timeline import Timeline
from lab.models.lora import Lora
from lab.planning.host_folder import check_host_dir, planned_folder
from lab.recipe.jobs import Job, TrainSettings
from lab.recipe.recipe import Recipe
from lab.step.on_ranks import Training, check_finite, make_rank_state, make_training
from lab.techniques.host_file import HostFolder
from lab.training.on_cluster import train_on_cluster
from lab.training.partial_run import PartialRun
from lab.training.rank_out_of_memory import RankOutOfMemory
from lab.training.records import Ended, Progress, Run, Started, Watch
from lab.units import parse_bytes

if TYPE_CHECKING:
    # A machine without ipyparallel can still import the lab, to plan and to rehearse.
    from cluster.ranks import Cluster


@progress("training")
def run(
    model: models.ModelLike = "tiny",
    recipe: str | Recipe = "plain",
    *,
    tokens: int | str,
    cluster: Cluster,
    steps: int = 3,
    rows: int = 1,
    accumulate: int = 1,
    lora: Lora | str | None = None,
    dtype: str | None = None,
    text: str | Path | None = None,
    tokenizer: str | Path | None = None,
    learning_rate: float = 1e-3,
    clip_norm: float = 1.0,
    seed: int = 0,
    device_memory: int | str | None = None,
    host_dir: str | Path | None = None,
    watch: Watch | None = None,
    **knobs: Any,
) -> Run:
    """Train ``steps`` steps of ``rows`` rows of ``tokens`` tokens on all ranks of a cluster.

    A step has ``accumulate`` micro-batches of so many rows, whose gradients are summed; see ``lab.train``.

    On GPUs the timelines count what crosses the dispatcher, and ``Run.allocated`` what CUDA's allocator held.

    ``text`` is a file or folder, or a token file (by default the Python standard library's sources),
    ``tokenizer`` a local directory (by default bytes are the tokens). With ``device_memory`` a rank runs out
    of memory where it holds more bytes, as on a device of that size. On GPUs a collective may take three
    times the longest layer of the plan where that is more than the cluster's ``timeout``; it is printed then.

    With ``lora``, such as "r=16", adapters are trained and the model is frozen, as by ``lab.plan``. ``dtype``
    is that of the parameters, as there; weights in files are cast to it. ``knobs`` are set on a ladder's
    recipe by hand, as there.

    With ``host_dir`` the long tensors of streamed layers lie in a file of each rank in this folder, in place
    of host memory: the file has no name, and is as large as the plan says before the first step. Copies
    between a GPU and the file are slower than those of pinned memory.

    A run that is stopped (``Started.stop``, the button of ``lab.show.live()``) returns what it measured until
    then; one that is interrupted raises KeyboardInterrupt, and one that fails its error, each with that as
    ``partial``.

    Raises:
        LabError: a model, recipe, text or size that cannot work, before anything is launched.
        HostFileError: a folder in memory, or on a disk that is too small; a recipe that streams nothing.
        RankOutOfMemory: which rank, in what, and the cheapest rung that would have fit.
        DivergedError: the loss of a step is not finite.
        RankError: a rank failed; the text names it and holds its traceback.
    """
    hide_progress(watch)
    settings = TrainSettings(steps, text, tokenizer, learning_rate, clip_norm, seed)
    sizes: dict[str, Any] = {"tokens": tokens, "ranks": cluster.ranks, "rows": rows, "accumulate": accumulate}
    training = make_training(model, recipe, settings, lora=lora, dtype=dtype, **sizes, **knobs)
    limit = None if device_memory is None else parse_bytes(device_memory)
    host_path = check_host_dir(training.job, host_dir)
    return run_job(training, cluster, limit=limit, host_path=host_path, watch=watch)


def run_job(
    training: Training,
    cluster: Cluster,
    *,
    limit: int | None = None,
    host_path: Path | None = None,
    watch: Watch | None = None,
) -> Run:
    """Train on all ranks of a cluster, as ``run`` does with what it has read and checked.

    Args:
        training: What is trained, and how.
        cluster: The ranks.
        limit: The bytes of a device at which a rank is out of memory.
        host_path: The folder for the long tensors of streamed layers, see ``check_host_dir``.
        watch: As that of ``run``.
    """
    job, settings = training.job, training.settings
    folder = planned_folder(job, host_path)
    partial_run = PartialRun(training)
    tell = watch or _nobody

    def on_record(_rank: int, record: object) -> None:
        if isinstance(record, Progress):
            partial_run.add(record)
            say(f"training: {record.step} of {record.steps} steps are done")
            tell(record)

    def ended(how: str) -> Run | None:
        run = partial_run.run(how)
        tell(run or Ended(how))
        return run

    tell(Started(cluster.interrupt, cluster.ranks))
    try:
        results = train_on_cluster(cluster, training, _train, limit, folder, on_record=on_record)
    except Stopped:
        stopped = ended("stopped")
        if stopped is None:
            raise
        return stopped
    except KeyboardInterrupt as interrupt:
        raise Interrupted(ended("interrupted")) from interrupt
    except Exception as error:
        partial = ended("failed")
        if isinstance(error, RankError | DivergedError):
            error.partial = partial
        if isinstance(error, RankError) and isinstance(error.cause, OutOfMemory):
            raise RankOutOfMemory(error, error.cause, job) from error
        raise
    finished = Run(
        job.title,
        job,
        settings,
        results[0].losses,
        results[0].seconds,
        tuple(result.timeline for result in results),
        allocated=tuple(result.allocated for result in results if result.allocated is not None),
        weights=training.weights,
    )
    tell(finished)
    return finished


class Interrupted(KeyboardInterrupt):
    """The notebook's kernel was interrupted; ``partial`` is the run up to then, None where none had begun."""

    def __init__(self, partial: Run | None) -> None:
        where = f": {partial.title}" if partial is not None else ""
        super().__init__(f"the run was interrupted, and the error's .partial is what it measured{where}")
        self.partial = partial


def _nobody(_: object) -> None:
    """Watch nothing."""


@dataclass(frozen=True, eq=False)
class _Trained:
    """What one rank brings back; ``allocated`` is CUDA's peak in bytes, None on CPU."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    timeline: Timeline
    allocated: int | None


def _train(job: Job, settings: TrainSettings, limit: int | None, host_folder: HostFolder | None) -> _Trained:
    """Runs on every rank."""
    from cluster.live import publish

    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = make_rank_state(job, settings, host_folder=host_folder)
    losses: list[float] = []
    seconds: list[float] = []

    def grown(rows: Timeline) -> None:
        loss, took = (losses[-1], seconds[-1]) if seconds else (None, None)
        publish(Progress(rank, ranks, len(seconds), settings.steps, loss, rows, took))

    meter = Meter(on_growth=grown, limit=limit)
    allocated = AllocatedPeak(state.device)
    for step in range(settings.steps):
        start = time.perf_counter()
        # The loss is read at once: kept as a tensor it would be four bytes in the next step's timeline.
        loss = float(state.train_step(step, meter))
        losses.append(check_finite(settings, step + 1, loss))
        seconds.append(time.perf_counter() - start)
    state.close()
    return _Trained(tuple(losses), tuple(seconds), meter.timeline(), allocated.bytes())
