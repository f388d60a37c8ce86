"""One training step on fake tensors, as one rank of N: the real techniques and the real step, no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab import models
from lab.batches import shard_batch
from lab.compose import apply_recipe
from lab.costs import CostCounter, Costs
from lab.errors import LabError
from lab.hardware import hardware
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.memory.workspace import NO_WORKSPACE, cuda_workspace
from lab.recipe import Recipe
from lab.step import make_optimizer, train_step, update
from lab.techniques.slices import shortened

_TURN = Lock()
"""A process has one default group: plans made in several threads at once take turns."""


@dataclass(frozen=True)
class Question:
    """What a step is to be planned for; everything that its bytes and seconds depend on."""

    model: models.ModelLike
    recipe: Recipe
    tokens: int
    ranks: int
    rows: int
    ranks_per_node: int
    device: str
    workspace: bool


def fake_step(question: Question, layers: int) -> tuple[Timeline, Costs]:
    """Train the model's first ``layers`` layers for one step; what a rank held, and what the step costs."""
    counter = CostCounter(hardware(question.device), question.ranks_per_node)
    workspace = cuda_workspace(question.ranks) if question.workspace else NO_WORKSPACE
    meter = Meter(clock=counter.now, workspace=workspace)
    # Of a ring the second rank: it meets all its queries with half of the keys of the first, and holds more
    # than the first, which never does. Else the first, for where shards are not equal the last is smaller.
    rank = question.recipe.ulysses if question.recipe.ring > 1 else 0
    with _one_of(question.ranks, rank) as mesh, FakeTensorMode(allow_non_fake_inputs=True), shortened():
        model = models.build(question.model, weights=False)
        del model.model.layers[layers:]
        model.train()
        # Fake tensors have torch's kernel alone; the others take the same tensors and give the same.
        apply_recipe(model, replace(question.recipe, kernel="torch"), mesh)
        optimizer = make_optimizer(model, learning_rate=1e-3)
        # The first update makes DTensor work out its layouts, on fake tensors of its own in the size of the
        # whole model; it remembers them.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        update(model, optimizer, clip_norm=1.0)
        ids = torch.zeros(question.rows, question.tokens, dtype=torch.int64)
        batch = shard_batch(ids, question.recipe, mesh)
        with counter:
            train_step(model, optimizer, batch, meter=meter)
    return meter.timeline(), counter.total


@contextmanager
def _one_of(ranks: int, rank: int) -> Iterator[DeviceMesh]:
    """A group in which every collective returns at once, with whatever lies in its buffers."""
    with _TURN:
        if dist.is_initialized():
            raise LabError(
                "this process is one of a group of ranks, and a plan makes its own: plan elsewhere"
            )
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            yield init_device_mesh("cpu", (ranks,))
        finally:
            dist.destroy_process_group()
