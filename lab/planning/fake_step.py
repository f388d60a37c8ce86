"""One training step on fake tensors, as one rank of N: the real techniques and the real step, no bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from lab import models
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.memory.workspace import NO_WORKSPACE, Workspace
from lab.planning.costs import CostCounter, Costs
from lab.planning.cuda_workspace import cuda_workspace
from lab.planning.hardware import hardware
from lab.recipe.jobs import Job, Machine
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.one_rank import one_rank
from lab.step.training_step import train_step, update
from lab.techniques.slices import short_loops
from lab.torch_private import PlanningMode, cached_layouts


class Walk(NamedTuple):
    """A step that was planned operator by operator.

    Attributes:
        timeline: What the rank held: n rows.
        costs: What the step has cost at each row, from its beginning [n].
    """

    timeline: Timeline
    costs: list[Costs]

    def costs_of(self, rows: slice) -> Costs:
        """Return what these rows cost."""
        before: Costs = self.costs[rows.start - 1] if rows.start else Costs()
        until: Costs = self.costs[rows.stop - 1]
        return until + before * -1


def fake_step(job: Job, machine: Machine, layers: int, *, ring_rank: int = 1) -> tuple[Timeline, Costs]:
    """Train the model's first ``layers`` layers for one step, as the first rank of ``ring_rank``.

    Returns:
        What the rank held, and what the step costs.
    """
    timeline, costs = walk(job, machine, layers, ring_rank=ring_rank)
    return timeline, costs[-1]


def workspace_of(job: Job, machine: Machine) -> Workspace:
    """Return the bytes to add to those of a rank's tensors: on CPU ranks, none."""
    return cuda_workspace(job.ranks) if machine.workspace else NO_WORKSPACE


def walk(job: Job, machine: Machine, layers: int, *, ring_rank: int = 1) -> Walk:
    """Do the same as ``fake_step``, and return the costs by row."""
    counter = CostCounter(hardware(machine.device), machine.ranks_per_node)
    costs: list[Costs] = []

    def clock() -> float:
        # The meter reads it when it is made, and then at each row.
        costs.append(counter.total)
        return counter.now()

    meter = Meter(clock=clock, workspace=workspace_of(job, machine), run=counter.observe)
    counter.on_host, counter.is_tile = meter.on_host, meter.is_tile
    with (
        one_rank(job.recipe, job.ranks, "fake", ring_rank=ring_rank) as mesh,
        PlanningMode(allow_non_fake_inputs=True),
        short_loops(),
        cached_layouts(),
    ):
        model = models.build(job.model, dtype=job.dtype, lora=job.lora, weights=False)
        del model.model.layers[layers:]
        model.train()
        # Fake tensors have torch's kernel alone, and nothing is compiled where operators are watched; the
        # others take the same tensors and give the same.
        fake = replace(job.recipe, kernel="torch", compile="none")
        applied = apply_recipe(model, fake, mesh, checked=True)
        optimizer = applied.make_optimizer(learning_rate=1e-3)
        # The first update makes DTensor work out its layouts.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        update(model, optimizer, clip_norm=1.0)
        ids = torch.zeros(job.rows, job.tokens, dtype=torch.int64)
        documents = None if job.documents is None else [job.documents] * job.rows
        batches = [shard_batch(ids, job.recipe, mesh, documents=documents) for _ in range(job.accumulate)]
        train_step(model, optimizer, *batches, meter=meter)
    return Walk(meter.timeline(), costs[1:])
