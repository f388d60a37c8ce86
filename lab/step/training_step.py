"""The training step of every verb: forward, backward, clipping, optimizer, under a meter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.errors import RecipeError
from lab.recipe.jobs import WEIGHT_DECAY
from lab.step.batches import Batch
from lab.techniques.exchange import sum_over_ranks, wait_for_release
from lab.torch_private import local_part, uncompiled


class StepMeter(Protocol):
    """What a step asks of a meter: to count while it runs, and to be told its parts."""

    def measure(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Count one step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name a part of it."""


class NoMeter:
    """Counts nothing."""

    def measure(self, *_: Any) -> AbstractContextManager[None]:
        """A step, not counted."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of it, not counted."""
        return nullcontext()


def loss(model: nn.Module, batch: Batch, *, label_count: int | None = None) -> Tensor:
    """The mean cross-entropy over all labels of the global batch, a scalar, the same number on every rank.

    After ``.backward()`` each parameter's gradient is the dense model's: a rank contributes the gradient of
    its own labels, divided by the global count, and the ranks' contributions are summed.

    With ``label_count``, the sum over the labels of this batch is divided by this number instead. Given the
    labels of several micro-batches, the sum of their losses is the mean over all of them, and the sum of
    their gradients is its gradient.

    Raises:
        RecipeError: no recipe was applied to the model; see ``apply_input_checks``.
    """
    inner = uncompiled(model)
    sequence = getattr(inner.forward, "sequence", None)
    if sequence is None:
        raise RecipeError(
            "lab.loss needs a model with a recipe: call lab.apply_recipe(model, recipe, mesh) first"
        )
    # The same on every rank, so that none waits for another.
    if not isinstance(batch, Batch) or (batch.ulysses, batch.ring) != sequence:
        raise RecipeError(
            f"a batch that was not made for ulysses={sequence[0]}, ring={sequence[1]}: give what "
            "lab.shard_batch(input_ids, recipe, mesh) makes with the model's own recipe"
        )
    if batch.highest_token >= inner.config.vocab_size:
        raise RecipeError(
            f"input_ids with token {batch.highest_token}: the model's vocabulary ends at "
            f"{inner.config.vocab_size - 1}; take the tokenizer that belongs to the model"
        )
    local: Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        shifted_labels=batch.labels,
        documents=batch.documents,
        padding=batch.padding,
    ).loss
    return sum_over_ranks(local, batch.group) / (batch.label_count if label_count is None else label_count)


def make_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float = WEIGHT_DECAY
) -> torch.optim.AdamW:
    """AdamW with its state made at once, so that the first step uses as much memory as every other.

    Frozen parameters have no state. As by torch's default, the weights of norms and the biases decay like all
    other parameters: one group of parameters has one setting.

    Raises:
        RecipeError: every parameter is frozen.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise RecipeError(
            "every parameter of this model is frozen: set requires_grad on those to train, before the recipe"
        )
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay, fused=True)
    make_moments(optimizer)
    return optimizer


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW's state where there is none, so that the first step uses as much memory as the others."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *batches: Batch,
    meter: StepMeter,
    clip_norm: float = 1.0,
) -> Tensor:
    """One optimizer step; returns the loss before it, a detached scalar.

    Each of several micro-batches has a forward and a backward, which adds to the gradients. The loss and the
    gradients are those of one batch with all their rows: means over all labels, and not means of means.
    Gradients are clipped to ``clip_norm`` by their global norm over all parameters and ranks.
    """
    labels = sum(batch.label_count for batch in batches)
    total = part = torch.zeros((), device=batches[0].labels.device)
    with meter.measure(model, optimizer):
        for index, batch in enumerate(batches):
            with meter.phase("forward"):
                # As in transformers' Trainer, a part of the loss is held until the next phase begins.
                if index > 0:
                    total = total + part
                value = loss(model, batch, label_count=labels)
            with meter.phase("backward"):
                value.backward()
            # Without its graph, which is dropped before the next forward.
            part = value.detach()
            del value
        with meter.phase("optimizer"):
            total = total + part
            update(model, optimizer, clip_norm=clip_norm)
    return total


def gradient_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients of the model, a scalar in the memory of the gradients.

    Each rank takes the norm of its shards, and the squares are summed over the ranks. ``DTensor`` would sum
    a square for each parameter, and a run would hold its buffers of them longer than a plan does.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([local_part(gradient) for gradient in gradients], foreach=True)
    mesh = getattr(gradients[0], "device_mesh", None) if gradients else None
    if mesh is None:
        return norm
    squares = norm.square()
    # FSDP shards over the last axis; over those before it, it replicates.
    with wait_for_release(squares):
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    return squares.sqrt()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, *, clip_norm: float) -> None:
    """Clip the gradients, let the optimizer step, and drop them."""
    total = gradient_norm(model)
    nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, total, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
