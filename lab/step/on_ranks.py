"""Shared by the verbs that train on real ranks: what a rank is told, checked first, and what it makes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig, PreTrainedModel

from lab import models
from lab.errors import DivergedError, LabError
from lab.recipe.ladder import recipe_for
from lab.recipe.recipe import Recipe
from lab.step import data
from lab.step.batches import Batch, shard_batch
from lab.step.compose import start
from lab.step.training_step import make_optimizer
from lab.units import check_counts, parse_tokens


@dataclass(frozen=True)
class Training:
    """What a rank needs to know to train; everything in it travels to the ranks."""

    model: models.ModelLike
    recipe: Recipe
    tokens: int
    steps: int
    rows: int
    text: str | Path | None
    tokenizer: str | Path | None
    learning_rate: float
    clip_norm: float
    seed: int


def checked(
    model: models.ModelLike,
    recipe: str | Recipe,
    *,
    ranks: int,
    tokens: int | str,
    steps: int,
    rows: int = 1,
    text: str | Path | None = None,
    tokenizer: str | Path | None = None,
    learning_rate: float = 1e-3,
    clip_norm: float = 1.0,
    seed: int = 0,
    **knobs: Any,
) -> tuple[Training, PretrainedConfig, Tensor]:
    """What to tell the ranks, with the model's config and the encoded text, int64 [n].

    Raises:
        LabError: a model, recipe, text, size, learning rate or clip_norm that cannot work.
    """
    check_counts({"steps": steps, "rows": rows})
    _check_update(learning_rate, clip_norm)
    length = parse_tokens(tokens)
    if length < 2:
        raise LabError(f"tokens={length}: there is no next token to predict; give 2 or more")
    config = models.config_of(model)
    training = Training(
        model=model,
        recipe=recipe_for(recipe, model, ranks, length, config=config, **knobs),
        tokens=length,
        steps=steps,
        rows=rows,
        text=text,
        tokenizer=tokenizer,
        learning_rate=learning_rate,
        clip_norm=clip_norm,
        seed=seed,
    )
    source = data.encode(data.read_text(text), tokenizer=tokenizer, vocab_size=config.vocab_size)
    data.batch(source, rows=rows, length=length, step=0)
    return training, config, source


def _check_update(learning_rate: float, clip_norm: float) -> None:
    """Refuse numbers with which an update would make parameters NaN, or go the wrong way."""
    if not (_is_number(learning_rate) and 0 <= learning_rate < math.inf):
        raise LabError(
            f"learning_rate={learning_rate!r}: it takes a finite number, 0 or more, for instance 0.001"
        )
    if not (_is_number(clip_norm) and clip_norm > 0):
        raise LabError(
            f"clip_norm={clip_norm!r}: it takes a number above 0, for instance 1.0, or inf for no clipping"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def diverged(training: Training, step: int, loss: float, kept: str = "") -> DivergedError:
    """The error for a loss that is not finite, or for such parameters after a step whose loss is finite.

    ``step`` is counted from 1. ``kept`` says which checkpoint is the last good one, where any are written.
    """
    if math.isfinite(loss):
        what = f"after step {step} (loss {loss:.4g}) a parameter or the optimizer's state is not finite"
    else:
        what = f"the loss of step {step} is {loss}"
    if step == 1 and not math.isfinite(loss):
        helps = "no update had been made yet: check the model's initial weights"
    else:
        helps = (
            f"start again{' in another folder' if kept else ''} with a lower learning_rate than "
            f"{training.learning_rate:g} or a lower clip_norm than {training.clip_norm:g}"
        )
    return DivergedError("; ".join(part for part in (what, kept, helps) if part), step, loss)


def finite(training: Training, step: int, loss: float) -> float:
    """Return the loss of a step, counted from 1.

    Raises:
        DivergedError: it is not finite.
    """
    if not math.isfinite(loss):
        raise diverged(training, step, loss)
    return loss


@dataclass(frozen=True, eq=False)
class Worker:
    """What one rank trains with: its model under the recipe, its optimizer, its part of each batch."""

    training: Training
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    source: Tensor

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(self.mesh.device_type)

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of one step, counted from 0."""
        told = self.training
        ids = data.batch(self.source, rows=told.rows, length=told.tokens, step=step).to(self.device)
        return shard_batch(ids, told.recipe, self.mesh)


def worker(training: Training) -> Worker:
    """Make it; every rank of the process group calls this."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return worker_on(training, init_device_mesh(device, (dist.get_world_size(),)))


def worker_on(training: Training, mesh: DeviceMesh) -> Worker:
    """The same on a mesh over all ranks."""
    model = start(training.model, training.recipe, mesh, seed=training.seed)
    optimizer = make_optimizer(model, learning_rate=training.learning_rate)
    source = data.encode(
        data.read_text(training.text), tokenizer=training.tokenizer, vocab_size=model.config.vocab_size
    )
    return Worker(training, model, optimizer, mesh, source)
