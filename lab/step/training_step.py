"""The training step of every verb: forward, backward, clipping, optimizer, under a meter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.errors import RecipeError
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


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy over all labels of the global batch, a scalar, the same number on every rank.

    After ``.backward()`` each parameter's gradient is the dense model's: a rank contributes the gradient of
    its own labels, divided by the global count, and the ranks' contributions are summed.

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
        input_ids=batch.input_ids, position_ids=batch.position_ids, shifted_labels=batch.labels
    ).loss
    return sum_over_ranks(local, batch.group) / batch.label_count


def make_optimizer(model: nn.Module, *, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with its state made at once, so that the first step uses as much memory as every other.

    Frozen parameters have no state.

    Raises:
        RecipeError: every parameter is frozen.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise RecipeError(
            "every parameter of this model is frozen: set requires_grad on those to train, before the recipe"
        )
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
    return optimizer


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    meter: StepMeter,
    clip_norm: float = 1.0,
) -> Tensor:
    """One optimizer step; returns the loss before it, a detached scalar.

    Gradients are clipped to ``clip_norm`` by their global norm over all parameters and ranks.
    """
    with meter.measure(model, optimizer):
        with meter.phase("forward"):
            value = loss(model, batch)
        with meter.phase("backward"):
            value.backward()
        with meter.phase("optimizer"):
            update(model, optimizer, clip_norm=clip_norm)
    return value.detach()


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
