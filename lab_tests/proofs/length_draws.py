"""Random jobs at four lengths: what follows for the last one from the others, next to its own plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from lab import models
from lab.bench.table import Row, Say
from lab.errors import LabError
from lab.planning import answers, plan_cache
from lab.planning.answers import Answer, answer
from lab.planning.scaling import LENGTHS, Step, length_class
from lab.planning.whole_step import walk
from lab.recipe.jobs import MAX_TOKENS, Job, make_job
from lab.recipe.ladder import RECIPE_NAMES
from lab.recipe.recipe import KNOBS
from lab_tests.proofs.cases import MODELS, chunk_of
from lab_tests.support import reference

TILES = ("mlp_tile", "norm_tile", "loss_tile", "stream", "attention_tile")


@dataclass(frozen=True)
class Draw:
    """A job at lengths that the lab takes to be alike, the one that is asked for last.

    Attributes:
        seed: What it is drawn from.
        jobs: The job at each length.
        workspace: Whether the plans have the bytes that CUDA takes outside torch's view.
    """

    seed: int
    jobs: tuple[Job, ...]
    workspace: bool

    def __str__(self) -> str:
        job = self.jobs[-1]
        lora = "" if job.lora is None else f" lora {job.lora}"
        sizes = f"{job.ranks} ranks, {job.rows} x {job.accumulate} rows{lora}"
        windows = {window for window in models.shape_of(job.model).windows if window is not None}
        family = " ".join([job.model.model_type, *map(str, windows)])
        lengths = ", ".join(str(job.tokens) for job in self.jobs)
        return f"{self.seed}: {family}, {job.recipe.summary}, {sizes}, at {lengths}"


def draw(seed: int) -> Draw:
    """Draw a model, a recipe, degrees, rows and lengths from a seed."""
    chosen = random.Random(seed)
    while True:
        # Some are refused, and some have no lengths that are alike.
        with suppress(LabError):
            if (jobs := _jobs(chosen)) is not None:
                return Draw(seed, jobs, chosen.random() < 0.5)


def _jobs(chosen: random.Random) -> tuple[Job, ...] | None:
    """Draw a job, and lengths of its class; None if there are none.

    Raises:
        LabError: The job is refused.
    """
    family, *heads = chosen.choice(MODELS)
    # A flash kernel takes at most 256.
    dims = {} if chosen.random() < 0.3 else {"head_dim": chosen.choice((64, 128, 192, 256, 512))}
    model = reference.config(family, *heads, layers=chosen.choice((1, 1, 1, 2)), **dims)
    if getattr(model, "sliding_window", None) is not None:
        model.sliding_window = chosen.choice((96, 512, 1536, 4096, 16384))
    model.vocab_size = chosen.choice((101, 104))
    shape = models.shape_of(model)
    recipe, knobs = chosen.choice(RECIPE_NAMES), dict[str, Any]()
    if chosen.random() < 0.7:
        recipe = "plain"
        for row in KNOBS:
            knobs |= chosen.choice(row.tried or ({},))
        knobs["head_chunk"] = chunk_of(shape.H, knobs.get("ulysses", 1), chosen.choice((None, 2, 4)))
        tiles = (64, 96, 256, 1000, 1024, 4096, 16384)
        knobs |= {name: chosen.choice(tiles) for name in TILES if knobs.get(name)}
        knobs["compute_dtype"] = chosen.choice(("bfloat16", "float32"))
    given = {
        "ranks": chosen.choice((1, 2, 4, 4, 8)),
        "rows": chosen.choice((1, 1, 1, 2, 3)),
        "accumulate": chosen.choice((1, 1, 1, 1, 2, 7)),
        "lora": chosen.choice((None, None, "r=4")),
    }

    def job(tokens: int) -> Job:
        return make_job(model, recipe, tokens=tokens, shape=shape, **given, **knobs)

    first = job(2 ** chosen.randint(8, 18) + chosen.choice((0, 0, 1, -8, 40, 256)))
    which = length_class(first, shape)
    if which.only is not None:
        return None
    jobs, near = [first], chosen.random() < 0.5
    for _ in range(40):
        # Near each other, with a far one at the end; or most near, and some far.
        power = chosen.randint(*(0, 3) if near and len(jobs) < LENGTHS else (6, 12) if near else (0, 12))
        more = which.grid * chosen.randint(1, 2**power)
        if jobs[0].tokens + more < MAX_TOKENS // given["rows"]:
            further = job(first.tokens + more)
            if further.tokens not in {one.tokens for one in jobs} and length_class(further, shape) == which:
                jobs.append(further)
        if len(jobs) > LENGTHS:
            # The shortest is known, since a step is not extrapolated to shorter contexts.
            return tuple(jobs)
    return None


def check(drawn: Draw) -> tuple[Answer, list[str]]:
    """Return what is answered at the last length after plans at the others, and what is wrong with it."""
    with (
        TemporaryDirectory() as folder,
        patch.object(plan_cache, "folder", lambda kind: Path(folder) / kind),
        patch.object(answers, "SHIPPED", Path(folder)),
    ):
        *_, found = (answer(job, workspace=drawn.workspace) for job in drawn.jobs)
    own = walk(drawn.jobs[-1], workspace=drawn.workspace)
    wrong = [] if found.facts == own.facts else ["facts"]
    for one, other in zip(found.steps, own.steps, strict=True):
        wrong += differences(one, other)
    return found, wrong


def differences(found: Step, walked: Step) -> list[str]:
    """Return what differs between two steps: rows, operators, storages or work."""
    one, two = found.timeline, walked.timeline
    of_storages = ("first", "end", "size", "category", "module", "phase", "step", "moves", "made", "freed")
    columns = {
        "device": (one.device, two.device),
        "host": (one.host, two.host),
        **{name: (getattr(one.storages, name), getattr(two.storages, name)) for name in of_storages},
        **{name: (getattr(found.work, name), getattr(walked.work, name)) for name in ("kind", "other")},
    }
    unlike = [name for name, both in columns.items() if not np.array_equal(*both)]
    if [one.ops[i] for i in one.op] != [two.ops[i] for i in two.op]:
        unlike.append("operators")
    if [one.storages.kinds[i] for i in one.storages.kind] != [
        two.storages.kinds[i] for i in two.storages.kind
    ]:
        unlike.append("kinds of storages")
    for name in ("flops", "nbytes"):
        # Large ones have more than the 53 bits of a float.
        if not np.allclose(getattr(found.work, name), getattr(walked.work, name), rtol=1e-14, atol=0):
            unlike.append(name)
    return unlike


def draw_lengths(first: int, times: int, say: Say) -> Iterator[Row]:
    """Check draws from as many seeds, and yield a row for each: what is wrong, and what was answered."""
    for seed in range(first, first + times):
        drawn = draw(seed)
        say(str(drawn))
        found, wrong = check(drawn)
        yield {
            "draw": str(drawn),
            "answer": "follows" if found.lengths else "is planned",
            "rows": sum(len(step.timeline) for step in found.steps),
            "wrong": ", ".join(wrong) or "-",
        }
