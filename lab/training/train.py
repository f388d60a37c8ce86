"""Train: steps on real ranks that outlive their processes, by checkpoints; one unbroken file of losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from cluster.timeouts import DEFAULT_SECONDS, check_timeout
from cluster.torch_private import set_timeout
from lab import models
from lab.planning.host_folder import check_host_dir, file_bytes, planned_folder
from lab.recipe.jobs import WEIGHT_DECAY, Schedule, TrainSettings
from lab.recipe.recipe import Recipe
from lab.step.kernel_limits import check_kernel
from lab.step.on_ranks import Training, make_training
from lab.techniques.attention.kernels import kernel_support
from lab.techniques.host_file import HostFolder
from lab.training.collective_time import on_this_rank
from lab.training.first_rank import from_first_rank
from lab.training.manifest import Manifest
from lab.training.on_cluster import train_on_cluster
from lab.training.planning_process import answer_on_all_ranks
from lab.training.train_loop import CheckpointSettings, StepRecord, train_on_this_rank
from lab.units import check_counts, parse_path

if TYPE_CHECKING:
    from cluster.ranks import Cluster


@dataclass(frozen=True, eq=False)
class Trained:
    """What training brings back: the steps of this call, and the folder that holds the checkpoints.

    ``weights`` is that of ``Training``, and empty where training went on from a checkpoint.
    """

    title: str
    steps: tuple[StepRecord, ...]
    checkpoint: Path
    weights: str = ""

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
        steps, text, tokenizer, learning_rate, clip_norm, seed, warmup, schedule, weight_decay, validate
    )
    sizes: dict[str, Any] = {"tokens": tokens, "ranks": ranks, "rows": rows, "accumulate": accumulate}
    training = make_training(model, recipe, settings, dtype=dtype, weights=not resume, **sizes, **knobs)
    host_path = check_host_dir(training.job, host_dir)
    saving = CheckpointSettings(parse_path(checkpoint).absolute(), every, keep, Manifest.of(training), resume)
    return train_job(training, saving, cluster, timeout=timeout, host_path=host_path, watch=watch)


def train_job(
    training: Training,
    saving: CheckpointSettings,
    cluster: Cluster | None,
    *,
    timeout: float | None = None,
    host_path: Path | None = None,
    watch: Callable[[StepRecord], None] | None = None,
) -> Trained:
    """Train with checkpoints, as ``train`` does with what it has read and checked.

    Args:
        training: What is trained, and how.
        saving: Where and when checkpoints are written, and whether training goes on from one.
        cluster: The ranks; None for this process as one rank.
        timeout: As that of ``train``.
        host_path: The folder for the long tensors of streamed layers, see ``check_host_dir``.
        watch: As that of ``train``.
    """
    job, title = training.job, training.job.title
    if saving.resume and not callable(job.model):
        # The weights are those of the checkpoint: none of the directory are read.
        job = replace(job, model=training.config)
        training = replace(training, job=job)
    if cluster is None and torch.cuda.is_available():
        device = torch.device("cuda")
        check_kernel(job, training.config, device.type, lambda: kernel_support(device))
    # A checkpoint is read from the first byte to the last: by one process, not by every rank.
    saving = from_first_rank(saving.open) if cluster is None else saving.open()
    if cluster is not None:

        def note(_: int, record: object) -> None:
            if watch is not None and isinstance(record, StepRecord):
                watch(record)

        host_folder = planned_folder(job, host_path)
        with nullcontext() if cluster.started else cluster:
            [records, *_] = train_on_cluster(
                cluster, training, train_on_this_rank, saving, host_folder, timeout=timeout, on_record=note
            )
        return Trained(title, records, saving.folder, training.weights)
    if timeout is None and torch.cuda.is_available():
        timeout = on_this_rank(job, DEFAULT_SECONDS["cuda"])
    if timeout is not None:
        set_timeout(timeout)
    host_folder = None
    if host_path is not None:
        nbytes = answer_on_all_ranks("how large the file of streamed layers is", file_bytes, job)
        host_folder = HostFolder(host_path, nbytes)
    records = train_on_this_rank(job, training.settings, saving, host_folder, watch)
    return Trained(title, records, saving.folder, training.weights)
