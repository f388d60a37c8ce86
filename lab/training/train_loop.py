"""The loop of ``lab train`` on one rank: a step, what is told of it, a checkpoint; all ranks stop alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.errors import CheckpointError, DivergedError
from lab.memory.cuda import AllocatedPeak
from lab.memory.meter import Meter
from lab.step.on_ranks import Training, diverged, worker
from lab.step.training_step import NoMeter, train_step
from lab.training.checkpoints import Checkpointer
from lab.training.loss_file import LossFile
from lab.training.manifest import Manifest, checkpoints_in, sweep


@dataclass(frozen=True)
class Step:
    """What is told of one step, ``step`` of ``steps``, the first being 1.

    ``loss`` is the global mean before the update; ``seconds`` the time since the step before; ``device_peak``
    the most bytes that any rank's device held in a step so far, what the start took left out (on CPU metered
    in the first step after a start, for all are alike); ``seconds_left`` what the steps to come will take at
    the pace so far.
    """

    step: int
    steps: int
    loss: float
    seconds: float
    tokens_per_second: float
    tokens_per_second_and_rank: float
    device_peak: int
    seconds_left: float

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


@dataclass(frozen=True)
class Course:
    """What a rank is told beside the training itself: where checkpoints go, and the one it goes on from."""

    training: Training
    folder: Path
    every: int
    keep: int
    manifest: Manifest
    start: Path | None


def train_on_this_rank(course: Course, watch: Callable[[Step], None] | None = None) -> tuple[Step, ...]:
    """Runs on every rank."""
    from cluster.live import publish

    told, leads = course.training, dist.get_rank() == 0
    first = course.manifest.step
    losses = LossFile(course.folder)

    def begin() -> None:
        sweep(course.folder)
        losses.cut(first)

    _first_rank_does(begin)
    ready = worker(told)
    checkpoints = Checkpointer(course.folder, keep=course.keep)
    if course.start is not None:
        checkpoints.restore(course.start, ready.model, ready.optimizer)
    allocated = AllocatedPeak(ready.device)
    made: list[Step] = []
    began = before = time.perf_counter()
    peak = 0
    for step in range(first + 1, told.steps + 1):
        batch = ready.batch(step - 1)
        meter = Meter() if step == first + 1 and ready.device.type == "cpu" else None
        value = train_step(
            ready.model, ready.optimizer, batch, meter=meter or NoMeter(), clip_norm=told.clip_norm
        )
        loss = float(value)
        # The loss is the same number on every rank, so all ranks end alike.
        if not math.isfinite(loss):
            raise _with_last_checkpoint(course, checkpoints, step, loss)
        if meter is not None:
            peak = meter.timeline().device_peak
        peak = _most(allocated.bytes() or peak, ready.device)
        now = time.perf_counter()
        pace = told.rows * told.tokens / (now - before)
        left = (now - began) / (step - first) * (told.steps - step)
        made.append(
            Step(step, told.steps, loss, now - before, pace, pace / dist.get_world_size(), peak, left)
        )
        before = now
        if leads:
            losses.add(made[-1].to_json())
            (watch or publish)(made[-1])
        # Ranks learn of a failed save at different moments; they stop for it at the same step.
        if not _most(checkpoints.writing, ready.device):
            checkpoints.wait()
        if step % course.every == 0 or step == told.steps:
            # The save before may have failed for want of room that the losses would want too.
            checkpoints.wait()
            # A finite loss may still have a gradient, and so an update, that is not.
            if _most(not checkpoints.is_finite(ready.model, ready.optimizer), ready.device):
                raise _with_last_checkpoint(course, checkpoints, step, loss)
            _first_rank_does(losses.settle)
            checkpoints.save(ready.model, ready.optimizer, replace(course.manifest, step=step))
    checkpoints.close()
    return tuple(made)


def _with_last_checkpoint(course: Course, checkpoints: Checkpointer, step: int, loss: float) -> DivergedError:
    """The error that names the last good checkpoint, once a save that is under way has ended."""
    try:
        checkpoints.close()
        good = checkpoints_in(course.folder)
        kept = "there is no earlier checkpoint"
        if good:
            kept = f"the last good checkpoint is {good[-1]} (lab export makes a model of it)"
    except CheckpointError as error:
        kept = str(error)
    return diverged(course.training, step, loss, kept)


def _first_rank_does(work: Callable[[], None]) -> None:
    """Do something on disk that rank 0 does for all; what it is refused every rank is."""
    said: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except CheckpointError as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise CheckpointError(said[0])


def _most(value: int, device: torch.device) -> int:
    """The largest of all ranks' values."""
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
