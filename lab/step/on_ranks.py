"""Shared by the verbs that train: what is checked first, and the state that a rank trains with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig, PreTrainedModel

from lab import models
from lab.errors import DataError, DivergedError, LabError
from lab.memory.cuda import use_expandable_segments
from lab.recipe.jobs import Job, TrainSettings, make_job
from lab.recipe.recipe import Recipe
from lab.step import data
from lab.step.batches import Batch, read_batch
from lab.step.compose import start
from lab.step.token_source import TokenSource, is_token_file, open_source
from lab.step.training_step import StepMeter, loss, train_step
from lab.techniques.agreement import check_same, refuse_together
from lab.techniques.host_file import HostFile, HostFolder, open_host_file

CHECKED = 2**20
"""The first tokens of a text that are read before anything is launched."""


@dataclass(frozen=True, eq=False)
class Training:
    """A job and how it is trained. All that one process can check of both has been checked.

    Attributes:
        job: What is trained.
        settings: How it is trained.
        config: The config of the job's model.
        source: The tokens of the text.
        weights: See ``models.weights_note``.
    """

    job: Job
    settings: TrainSettings
    config: PretrainedConfig
    source: TokenSource
    weights: str


def make_training(
    model: models.ModelLike,
    recipe: str | Recipe,
    settings: TrainSettings,
    *,
    dtype: str | None = None,
    weights: bool = True,
    **asked: Any,
) -> Training:
    """Make the job, and open the text and that of the validation. Nothing has been launched yet.

    Args:
        model: As ``Job.model``. A callable is called once.
        recipe: A recipe, or the name of one.
        settings: How the job is trained.
        dtype: As ``Job.dtype``.
        weights: Whether the weights of a directory are read.
        asked: The sizes and the knobs, as ``make_job`` takes them.

    Raises:
        LabError: as ``make_job`` and ``models.weights_note``; a text, a tokenizer or a length of which no
            batch can be made.
    """
    config = models.config_of(model, dtype)
    job = make_job(model, recipe, dtype=dtype, shape=models.shape_of(config), **asked)
    if job.tokens < 2:
        raise LabError(f"tokens={job.tokens}: there is no next token to predict; give 2 or more")
    texts = (settings.text,) if settings.validate is None else (settings.text, settings.validate)
    if settings.tokenizer is not None and all(is_token_file(text) for text in texts):
        raise DataError(
            f"tokenizer={str(settings.tokenizer)!r} with a file of tokens, which needs none: leave it out"
        )
    source, validation = _open_sources(settings, config.vocab_size)
    for opened in filter(None, (source, validation)):
        opened.read(torch.arange(min(len(opened), CHECKED)))
    if validation is not None and len(validation) < 2:
        raise DataError(f"validate={str(settings.validate)!r} has one token: give a text of 2 tokens or more")
    note = models.weights_note(model, dtype) if weights else ""
    return Training(job, settings, config, source, note)


def _open_sources(settings: TrainSettings, vocab_size: int) -> tuple[TokenSource, TokenSource | None]:
    """Open the text, and that of the validation if there is one."""
    tokenizer = settings.tokenizer
    source = open_source(settings.text, tokenizer=tokenizer, vocab_size=vocab_size)
    if settings.validate is None:
        return source, None
    return source, open_source(settings.validate, tokenizer=tokenizer, vocab_size=vocab_size)


def diverged(
    settings: TrainSettings, step: int, loss: float, checkpoint: str = "", validation: float = 0.0
) -> DivergedError:
    """The error for a loss that is not finite, or for such parameters after a step whose loss is finite.

    ``step`` is counted from 1. ``checkpoint`` says which is the last good one, where any are written.
    ``validation`` is the loss of the validation after the step.
    """
    if not math.isfinite(validation):
        what = f"the validation loss after step {step} (loss {loss:.4g}) is {validation}"
    elif math.isfinite(loss):
        what = f"after step {step} (loss {loss:.4g}) a parameter or the optimizer's state is not finite"
    else:
        what = f"the loss of step {step} is {loss}"
    if step == 1 and not math.isfinite(loss):
        helps = "no update had been made yet: check the model's initial weights"
    else:
        helps = (
            f"start again{' in another folder' if checkpoint else ''} with a lower learning_rate than "
            f"{settings.learning_rate:g} or a lower clip_norm than {settings.clip_norm:g}"
        )
    return DivergedError("; ".join(part for part in (what, checkpoint, helps) if part), step, loss)


def check_finite(settings: TrainSettings, step: int, loss: float) -> float:
    """Return the loss of a step, counted from 1.

    Raises:
        DivergedError: it is not finite.
    """
    if not math.isfinite(loss):
        raise diverged(settings, step, loss)
    return loss


@dataclass(frozen=True, eq=False)
class RankState:
    """What one rank trains with.

    Attributes:
        job: What is trained.
        settings: How it is trained.
        model: The model, under the job's recipe.
        optimizer: Its optimizer.
        mesh: The mesh over all ranks.
        source: The tokens of the text.
        validation: Those of the text of the validation; None for none.
        host_file: The file in which the long tensors of streamed layers lie; None for host memory.
    """

    job: Job
    settings: TrainSettings
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    source: TokenSource
    validation: TokenSource | None = None
    host_file: HostFile | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(self.mesh.device_type)

    def batch(self, number: int) -> Batch:
        """This rank's part of a micro-batch, counted from 0 through all steps; a step has ``accumulate``."""
        job = self.job
        windows = data.windows(len(self.source), rows=job.rows, length=job.tokens, step=number)
        return read_batch(self.source, windows, job.tokens, job.recipe, self.mesh)

    def train_step(self, step: int, meter: StepMeter) -> Tensor:
        """Train one step, counted from 0, by the settings; returns what ``lab.train_step`` returns."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_of(step + 1)
        accumulate = self.job.accumulate
        batches = [self.batch(step * accumulate + number) for number in range(accumulate)]
        return train_step(
            self.model, self.optimizer, *batches, meter=meter, clip_norm=self.settings.clip_norm
        )

    def validation_loss(self) -> float:
        """The mean loss over the text of the validation, without gradients; every rank calls this.

        The text is cut into rows of S tokens, and the last may be shorter. The mean is over all tokens but
        the first of each row. No more rows are computed at once than in training.
        """
        assert self.validation is not None, "the settings name a text"
        job, length = self.job, len(self.validation)
        rows = [range(start, min(start + job.tokens, length)) for start in range(0, length - 1, job.tokens)]
        labels, total = sum(len(row) - 1 for row in rows), 0.0
        for first in range(0, len(rows), job.rows):
            of_batch = rows[first : first + job.rows]
            batch = read_batch(self.validation, of_batch, job.tokens, job.recipe, self.mesh)
            with torch.no_grad():
                total += float(loss(self.model, batch, label_count=labels))
        return total

    def close(self) -> None:
        """Give the disk of the host file its bytes back, after the last step."""
        if self.host_file is not None:
            self.host_file.close()


def make_rank_state(
    job: Job,
    settings: TrainSettings,
    mesh: DeviceMesh | None = None,
    *,
    host_folder: HostFolder | None = None,
) -> RankState:
    """Make the model, the optimizer and the text; every rank of the process group calls this.

    ``mesh`` is over all ranks. By default it is that of the machine's devices: CUDA's where there are any.
    ``host_folder`` is where the long tensors of streamed layers lie, in place of host memory.

    Raises:
        LabError: as ``start``; a folder that cannot hold the ranks' files.
    """
    if mesh is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.device_type == "cuda":
        use_expandable_segments()
    # The disk is asked first: nothing else is made for a folder that is refused.
    host_file = None if host_folder is None else open_host_file(host_folder, mesh.get_group())
    applied = start(
        job.model,
        job.recipe,
        mesh,
        dtype=job.dtype,
        lora=job.lora,
        seed=settings.seed,
        host_file=host_file,
    )
    optimizer = applied.make_optimizer(
        learning_rate=settings.learning_rate, weight_decay=settings.weight_decay
    )
    vocab_size, group = applied.model.config.vocab_size, mesh.get_group()
    source, validation = refuse_together(partial(_open_sources, settings, vocab_size), group)
    sizes = (job.tokens, job.rows, job.accumulate)
    check_same(
        "the text, its tokens or the settings of the training differ",
        f"{[source.digest(), validation and validation.digest()]} {sizes} {_numbers(settings)}",
        group,
        "give every rank the same settings, and a copy of the same text",
    )
    return RankState(job, settings, applied.model, optimizer, mesh, source, validation, host_file)


def _numbers(settings: TrainSettings) -> str:
    """The settings without the paths, which may be others on another host."""
    return str(replace(settings, text=None, tokenizer=None, validate=None))
