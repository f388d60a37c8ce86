"""The cost of the memory meter: the seconds of a training step with it and without it."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lab import models
from lab.bench.table import Row, Say
from lab.memory.meter import Meter
from lab.recipe.recipe import Recipe
from lab.step import data
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.training_step import NoMeter, StepMeter, make_optimizer, train_step

REPEATS = 7
TOKENS = (128, 512, 2048)


def measure_meter(say: Say) -> list[Row]:
    """Return a row for each context: the median seconds of a step of ``tiny`` without and with the meter.

    The two steps take turns, so that a machine that slows down slows both. The meter adds a few microseconds
    to every operator, so its share is larger in a shorter context.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        mesh, recipe = init_device_mesh("cpu", (1,)), Recipe()
        model = models.build("tiny").train()
        apply_recipe(model, recipe, mesh)
        optimizer = make_optimizer(model, learning_rate=1e-3)
        source = data.encode(data.read_text())
        rows: list[Row] = []
        for tokens in TOKENS:
            say(f"{tokens} tokens")
            batch = shard_batch(data.batch(source, rows=1, length=tokens, step=0), recipe, mesh)

            def seconds(meter: StepMeter) -> float:
                start = time.perf_counter()
                train_step(model, optimizer, batch, meter=meter)  # noqa: B023  # called within the loop
                return time.perf_counter() - start

            seconds(Meter())
            pairs = [(seconds(NoMeter()), seconds(Meter())) for _ in range(REPEATS)]
            without, metered = (median(times) for times in zip(*pairs, strict=True))
            rows.append(
                {
                    "tokens": tokens,
                    "threads": torch.get_num_threads(),
                    "seconds without": without,
                    "seconds with": metered,
                    "with / without": median(with_ / without for without, with_ in pairs),
                }
            )
        return rows
    finally:
        dist.destroy_process_group()
