"""Shared by the verbs that train: the text that is checked first, and the state that a rank trains with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from lab.errors import DivergedError, LabError
from lab.recipe.jobs import Job, TrainSettings
from lab.step import data
from lab.step.batches import Batch, shard_batch
from lab.step.compose import start
from lab.techniques.host_file import HostFile, HostFolder, open_host_file


def read_source(job: Job, settings: TrainSettings, vocab_size: int) -> Tensor:
    """Read and encode the text, and make one batch of it; return the encoded text, int64 [n].

    Raises:
        LabError: a text, a tokenizer or a length of which no batch can be made.
    """
    if job.tokens < 2:
        raise LabError(f"tokens={job.tokens}: there is no next token to predict; give 2 or more")
    text = data.read_text(settings.text)
    source = data.encode(text, tokenizer=settings.tokenizer, vocab_size=vocab_size)
    data.batch(source, rows=job.rows, length=job.tokens, step=0)
    return source


def diverged(settings: TrainSettings, step: int, loss: float, checkpoint: str = "") -> DivergedError:
    """The error for a loss that is not finite, or for such parameters after a step whose loss is finite.

    ``step`` is counted from 1. ``checkpoint`` says which is the last good one, where any are written.
    """
    if math.isfinite(loss):
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
        source: The encoded text, int64 [n].
        host_file: The file in which the long tensors of streamed layers lie; None for host memory.
    """

    job: Job
    settings: TrainSettings
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    source: Tensor
    host_file: HostFile | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(self.mesh.device_type)

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of one step, counted from 0."""
        job = self.job
        ids = data.batch(self.source, rows=job.rows, length=job.tokens, step=step).to(self.device)
        return shard_batch(ids, job.recipe, self.mesh)

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
    # The disk is asked first: nothing else is made for a folder that is refused.
    host_file = None if host_folder is None else open_host_file(host_folder, mesh.get_group())
    applied = start(job.model, job.recipe, mesh, lora=job.lora, seed=settings.seed, host_file=host_file)
    optimizer = applied.make_optimizer(learning_rate=settings.learning_rate)
    source = read_source(job, settings, applied.model.config.vocab_size)
    return RankState(job, settings, applied.model, optimizer, mesh, source, host_file)
