"""The cost of the memory meter: the seconds of a training step with it and without it."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch

from lab.bench.table import Row, Say
from lab.bench.timing import rounds
from lab.memory.meter import Meter
from lab.recipe.jobs import Job, TrainSettings
from lab.recipe.recipe import Recipe
from lab.step.on_ranks import make_rank_state
from lab.step.one_rank import one_rank
from lab.step.training_step import NoMeter, train_step

REPEATS = 7
TOKENS = (128, 512, 2048)


def measure_meter(say: Say) -> list[Row]:
    """Return a row for each context: the median seconds of a step of ``tiny`` without and with the meter.

    The two steps take turns, so that a machine that slows down slows both. The meter adds a few microseconds
    to every operator, so its share is larger in a shorter context.
    """
    rows: list[Row] = []
    for tokens in TOKENS:
        say(f"{tokens} tokens")
        job = Job("tiny", Recipe(), tokens, ranks=1)
        with one_rank(job.recipe, job.ranks, "loopback") as mesh:
            state = make_rank_state(job, TrainSettings(steps=1), mesh)
            step = partial(train_step, state.model, state.optimizer, state.batch(0))
            meter = Meter()
            step(meter=meter)
            times = rounds(REPEATS, partial(step, meter=NoMeter()), partial(step, meter=meter))
        without, metered = map(median, zip(*times, strict=True))
        rows.append(
            {
                "tokens": tokens,
                "threads": torch.get_num_threads(),
                "seconds without": without,
                "seconds with": metered,
                "with / without": median(with_ / without for without, with_ in times),
            }
        )
    return rows
