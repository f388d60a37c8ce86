"""Train: steps on real ranks that outlive their processes, by checkpoints; one unbroken file of losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from cluster.timeouts import DEFAULT_SECONDS, check_timeout, set_timeout
from lab import models
from lab.errors import CheckpointError, DivergedError, HostFileError
from lab.planning.host_folder import check_host_dir, file_bytes, planned_folder
from lab.recipe.jobs import WEIGHT_DECAY, Schedule, TrainSettings, make_job
from lab.recipe.recipe import Recipe
from lab.step.kernel_limits import check_kernel
from lab.step.on_ranks import read_source
from lab.techniques.attention.kernels import kernel_support
from lab.techniques.host_file import HostFolder
from lab.training.collective_time import check_kernel_on_cluster, on_cluster, on_this_rank
from lab.training.manifest import Manifest, checkpoints_in, config_document, newest
from lab.training.planning_process import answer_on_all_ranks
from lab.training.train_loop import CheckpointSettings, StepRecord, from_first_rank, train_on_this_rank
from lab.units import check_counts, parse_path

if TYPE_CHECKING:
    from cluster.ranks import Cluster


@dataclass(frozen=True, eq=False)
class Trained:
    """What training brings back: the steps of this call, and the folder that holds the checkpoints."""

    title: str
    steps: tuple[StepRecord, ...]
    checkpoint: Path

    @property
    def losses(self) -> tuple[float, ...]:
        """The global mean loss of each step."""
        return tuple(step.loss for step in self.steps)


def train(
    model: models.ModelLike = "tiny",
    recipe: str | Recipe = "upipe",
    *,
    tokens: int | str,
    steps: int,
    checkpoint: str | Path,
    cluster: Cluster | None,
    every: int = 100,
    keep: int = 2,
    resume: bool = False,
    rows: int = 1,
    accumulate: int = 1,
    dtype: str | None = None,
    text: str | Path | None = None,
    tokenizer: str | Path | None = None,
    validate: str | Path | None = None,
    learning_rate: float = 1e-3,
    warmup: int = 0,
    schedule: Schedule = "constant",
    weight_decay: float = WEIGHT_DECAY,
    clip_norm: float = 1.0,
    seed: int = 0,
    timeout: float | None = None,
    host_dir: str | Path | None = None,
    watch: Callable[[StepRecord], None] | None = None,
    **knobs: Any,
) -> Trained:
    """Train up to step ``steps`` on all ranks of a cluster, with a checkpoint each ``every`` and at the end.

    A cluster that is not started is for this call alone, once all that can be checked is. Without a cluster
    this process is one rank of the process group that it has joined, as under torchrun; ``watch`` is then
    called on rank 0 alone. ``checkpoint`` is a folder that all ranks share: the newest
    ``keep`` checkpoints, and ``losses.jsonl`` with one line a step. With ``resume`` training goes on from the
    newest: on as many ranks with the losses that it would have had unbroken, bit for bit (on CPU; CUDA's
    attention sums its gradients in no fixed order), on other ranks or with another recipe up to rounding.

    A step has ``accumulate`` micro-batches of ``rows`` rows each. Its text, its loss and its gradients are
    those of one batch with all these rows.

    The learning rate rises linearly over ``warmup`` steps to ``learning_rate``. Then it stays there, or with
    ``schedule="cosine"`` it falls to 0 at the last step. ``weight_decay`` is AdamW's, for every parameter.

    ``text`` and ``validate`` are files or folders of text, or token files: ``*.uint16.bin`` or
    ``*.uint32.bin``, of which each rank reads only its own part (``lab.step.write_tokens`` makes one). The
    mean loss over all of ``validate`` is computed at each checkpoint, without gradients, and is
    ``StepRecord.validation_loss``.

    ``dtype`` is that of the parameters, as in ``lab.run``; a checkpoint is continued with its own.

    ``host_dir`` is as in ``lab.run``: a folder for the long tensors of streamed layers.

    A collective may take ``timeout`` seconds. By default it is the cluster's or torchrun's own; on GPUs it is
    three times the longest layer of the plan where that is more, which is printed then.

    Raises:
        LabError: a model, recipe, text or size that cannot work, before anything is launched.
        HostFileError: a folder in memory, or on a disk that is too small; a recipe that streams nothing.
        ClusterError: a timeout that is no number of seconds from 0.01 to 30 days.
        CheckpointError: a folder that cannot be started in or gone on from; a checkpoint that could not be
            written, which leaves the ones before it as they are.
        DivergedError: the loss of a step or of the validation, or what a checkpoint would hold, is not
            finite; the text names the last good checkpoint, which stays.
        RankError: a rank failed; the text names it and holds its traceback.
    """
    check_counts({"every": every, "keep": keep})
    if timeout is not None:
        check_timeout(timeout)
    ranks = cluster.ranks if cluster is not None else dist.get_world_size()
    settings = TrainSettings(
        steps=steps,
        text=text,
        tokenizer=tokenizer,
        learning_rate=learning_rate,
        clip_norm=clip_norm,
        seed=seed,
        warmup=warmup,
        schedule=schedule,
        weight_decay=weight_decay,
        validate=validate,
    )
    config = models.config_of(model, dtype)
    shape = models.shape_of(config)
    sizes: dict[str, Any] = {"tokens": tokens, "ranks": ranks, "rows": rows, "accumulate": accumulate}
    job = make_job(model, recipe, dtype=dtype, shape=shape, **sizes, **knobs)
    source = read_source(job, settings, shape.V)
    host_path = check_host_dir(job, host_dir)
    if cluster is None and torch.cuda.is_available():
        device = torch.device("cuda")
        check_kernel(job.recipe, config, job.tokens, device.type, lambda: kernel_support(device))
    manifest = Manifest(
        config=config_document(config),
        text=source.digest(),
        tokens=job.tokens,
        rows_per_step=job.step_rows,
        seed=seed,
        learning_rate=learning_rate,
        warmup=warmup,
        schedule=schedule,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        steps=steps,
        recipe=job.recipe.to_json(),
        ranks=ranks,
    )
    folder = parse_path(checkpoint).absolute()

    def open_folder() -> tuple[Path | None, int]:
        return _start(folder, manifest, steps) if resume else _check_unused(folder)

    # A checkpoint is read from the first byte to the last: by one process, not by every rank.
    start, done = from_first_rank(open_folder) if cluster is None else open_folder()
    saving = CheckpointSettings(folder, every, keep, replace(manifest, step=done), start)
    if cluster is None:
        if timeout is None and torch.cuda.is_available():
            timeout = on_this_rank(job, DEFAULT_SECONDS["cuda"])
        if timeout is not None:
            set_timeout(timeout)
        host_folder = None
        if host_path is not None:
            nbytes = answer_on_all_ranks("how large the file of streamed layers is", file_bytes, job)
            host_folder = HostFolder(host_path, nbytes)
        records = train_on_this_rank(job, settings, saving, host_folder, watch)
    else:
        host_folder = planned_folder(job, host_path)
        with nullcontext() if cluster.started else cluster:
            check_kernel_on_cluster(job, config, cluster)
            seconds = on_cluster(job, cluster) if timeout is None else timeout
            call = partial(
                cluster.apply, train_on_this_rank, job, settings, saving, host_folder, timeout=seconds
            )
            records = _watched(call, watch)
    return Trained(job.title, records, folder)


def _start(folder: Path, manifest: Manifest, steps: int) -> tuple[Path, int]:
    """The checkpoint to go on from, and the steps it has behind it."""
    start, earlier = newest(folder)
    manifest.check_continues(earlier, start)
    if earlier.step >= steps:
        raise CheckpointError(
            f"{start} has {earlier.step} of {steps} steps already: give more steps to go on"
        )
    return start, earlier.step


def _check_unused(folder: Path) -> tuple[None, int]:
    """Refuse a folder whose checkpoints would be overwritten; make it where there is none.

    Returns:
        No checkpoint to go on from, and no steps.
    """
    checkpoints = checkpoints_in(folder)
    if checkpoints:
        raise CheckpointError(
            f"{folder} holds checkpoints up to {checkpoints[-1].name}: go on with --resume, or give another "
            "folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"no checkpoints can be kept in {folder}: {error.strerror}") from error
    return None, 0


def _watched(
    call: Callable[..., list[tuple[StepRecord, ...]]], watch: Callable[[StepRecord], None] | None
) -> tuple[StepRecord, ...]:
    """Call the ranks, and hand the records of their steps to ``watch`` as they come.

    Raises:
        CheckpointError, DivergedError, HostFileError: a rank raised it.
        RankError: a rank failed otherwise.
    """
    from cluster.errors import RankError

    def on_record(_: int, record: object) -> None:
        if watch is not None and isinstance(record, StepRecord):
            watch(record)

    try:
        return call(on_record=on_record)[0]
    except RankError as error:
        if error.kind == CheckpointError.__name__:
            raise CheckpointError(error.message) from error
        if isinstance(error.cause, DivergedError | HostFileError):
            raise error.cause from error
        raise
