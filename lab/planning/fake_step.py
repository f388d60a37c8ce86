"""One training step on fake tensors, as one rank of N: the real techniques and the real step, no bytes."""

from __future__ import annotations

from dataclasses import replace

import torch

from lab import models
from lab.memory.meter import Meter
from lab.memory.workspace import NO_WORKSPACE
from lab.planning.cuda_workspace import cuda_workspace
from lab.planning.scaling import Step
from lab.planning.work_counter import WorkCounter
from lab.recipe.jobs import Job
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.one_rank import one_rank
from lab.step.training_step import train_step, update
from lab.techniques.slices import short_loops
from lab.torch_private import PlanningMode, cached_layouts, pad_shards


def fake_step(job: Job, layers: int, *, workspace: bool, ring_rank: int = 1) -> Step:
    """Train the model's first ``layers`` layers for one step, as the first rank of ``ring_rank``.

    Returns:
        What the rank held, and the work of the step.
    """
    counter = WorkCounter()
    outside = cuda_workspace(job.ranks) if workspace else NO_WORKSPACE
    meter = Meter(clock=counter.now, workspace=outside, run=counter.observe)
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
        pad_shards(model)
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
    timeline = meter.timeline()
    # What comes after the last row is no part of the step.
    return Step(timeline, counter.work().take(slice(int(timeline.seconds[-1]))))
