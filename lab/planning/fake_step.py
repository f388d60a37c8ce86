"""One training step on fake tensors, as one rank of N: the real techniques and the real step, no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor

from lab import models
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.memory.workspace import NO_WORKSPACE
from lab.planning.costs import CostCounter, Costs
from lab.planning.hardware import cuda_workspace, hardware
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.one_rank import one_rank
from lab.step.training_step import make_optimizer, train_step, update
from lab.techniques.slices import short_loops


@dataclass(frozen=True)
class Question:
    """What a step is to be planned for; everything that its bytes and seconds depend on.

    ``ring_rank`` is the one that is planned, as in ``one_rank``.
    """

    model: models.ModelLike
    recipe: Recipe
    tokens: int
    ranks: int
    rows: int
    ranks_per_node: int
    device: str
    workspace: bool
    ring_rank: int = 1


def fake_step(question: Question, layers: int) -> tuple[Timeline, Costs]:
    """Train the model's first ``layers`` layers for one step; what a rank held, and what the step costs."""
    counter = CostCounter(hardware(question.device), question.ranks_per_node)
    workspace = cuda_workspace(question.ranks) if question.workspace else NO_WORKSPACE
    meter = Meter(clock=counter.now, workspace=workspace)
    with (
        one_rank(question.recipe, question.ranks, "fake", ring_rank=question.ring_rank) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        short_loops(),
        layouts_remembered(),
    ):
        model = models.build(question.model, weights=False)
        del model.model.layers[layers:]
        model.train()
        # Fake tensors have torch's kernel alone, and nothing is compiled where operators are watched; the
        # others take the same tensors and give the same.
        apply_recipe(model, replace(question.recipe, kernel="torch", compile="none"), mesh)
        optimizer = make_optimizer(model, learning_rate=1e-3)
        # The first update makes DTensor work out its layouts.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        update(model, optimizer, clip_norm=1.0)
        ids = torch.zeros(question.rows, question.tokens, dtype=torch.int64)
        batch = shard_batch(ids, question.recipe, mesh)
        with counter:
            train_step(model, optimizer, batch, meter=meter)
    return meter.timeline(), counter.total


@contextmanager
def layouts_remembered() -> Iterator[None]:
    """In the block DTensor works out each operator's layout once, as it does for real tensors.

    It does so on fake tensors in the size of the whole model, which would be counted as the step's. Where it
    meets fake tensors it would do it every time, for it takes that for tracing.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding_non_cached = propagator.propagate_op_sharding  # type: ignore[assignment]
    try:
        yield
    finally:
        del propagator.propagate_op_sharding_non_cached
