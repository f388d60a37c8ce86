"""The loop of ``lab train`` on one rank: a step, its record, a checkpoint; all ranks stop alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.errors import CheckpointError, DivergedError
from lab.memory.cuda import AllocatedPeak
from lab.memory.meter import Meter
from lab.recipe.jobs import Job, TrainSettings
from lab.step.on_ranks import diverged, make_rank_state
from lab.step.training_step import NoMeter
from lab.techniques.host_file import HostFolder
from lab.training.checkpoints import Checkpointer
from lab.training.first_rank import from_first_rank
from lab.training.loss_file import LossFile
from lab.training.manifest import Manifest, checkpoints_in, newest, sweep


@dataclass(frozen=True)
class StepRecord:
    """What is reported of one step, ``step`` of ``steps``, the first being 1.

    ``loss`` is the global mean before the update; ``seconds`` the time since the step before; ``device_peak``
    the most bytes that any rank's device held in a step so far, what the start took left out (on CPU metered
    in the first step after a start, for all are alike); ``seconds_left`` what the steps to come will take at
    the pace so far. ``validation_loss`` is that of the validation's text after the update, None where it was
    not computed; its time is left out of ``seconds``.
    """

    step: int
    steps: int
    loss: float
    seconds: float
    tokens_per_second: float
    tokens_per_second_and_rank: float
    device_peak: int
    seconds_left: float
    validation_loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


@dataclass(frozen=True)
class CheckpointSettings:
    """Where and when checkpoints are written.

    Attributes:
        folder: A folder that all ranks share.
        every: Steps from one checkpoint to the next.
        keep: How many checkpoints stay, the newest.
        manifest: What a checkpoint says of its training; its ``step`` is the one to go on from, 0 at first.
        resume: Whether training goes on from the newest checkpoint.
        start: That checkpoint, once it is found.
    """

    folder: Path
    every: int
    keep: int
    manifest: Manifest
    resume: bool = False
    start: Path | None = None

    def open(self) -> CheckpointSettings:
        """Find the checkpoint to go on from, or make the folder; return the settings with the start.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged or of another training, or it has all
                steps. At a first start: checkpoints would be overwritten, or the folder cannot be made.
        """
        if self.resume:
            start, earlier = newest(self.folder)
            self.manifest.check_continues(earlier, start)
            if earlier.step >= self.manifest.steps:
                raise CheckpointError(
                    f"{start} has {earlier.step} of {self.manifest.steps} steps already: give more steps to "
                    "go on"
                )
            return replace(self, manifest=replace(self.manifest, step=earlier.step), start=start)
        checkpoints = checkpoints_in(self.folder)
        if checkpoints:
            raise CheckpointError(
                f"{self.folder} holds checkpoints up to {checkpoints[-1].name}: go on with --resume, or give "
                "another folder"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"no checkpoints can be kept in {self.folder}: {error.strerror}") from error
        return self


def train_on_this_rank(
    job: Job,
    settings: TrainSettings,
    saving: CheckpointSettings,
    host_folder: HostFolder | None = None,
    watch: Callable[[StepRecord], None] | None = None,
) -> tuple[StepRecord, ...]:
    """Runs on every rank."""
    with closing(LossFile(saving.folder)) as losses:

        def begin() -> None:
            losses.lock()
            sweep(saving.folder)
            losses.cut(saving.manifest.step)

        from_first_rank(begin)
        return _train(job, settings, saving, host_folder, watch, losses)


def _train(
    job: Job,
    settings: TrainSettings,
    saving: CheckpointSettings,
    host_folder: HostFolder | None,
    watch: Callable[[StepRecord], None] | None,
    losses: LossFile,
) -> tuple[StepRecord, ...]:
    from cluster.live import publish

    leads, first = dist.get_rank() == 0, saving.manifest.step
    state = make_rank_state(job, settings, host_folder=host_folder)
    checkpoints = Checkpointer(saving.folder, keep=saving.keep)
    if saving.start is not None:
        checkpoints.restore(saving.start, state.model, state.optimizer)
    allocated = AllocatedPeak(state.device)
    records: list[StepRecord] = []
    began = before = time.perf_counter()
    peak = 0
    for step in range(first + 1, settings.steps + 1):
        meter = Meter() if step == first + 1 and state.device.type == "cpu" else None
        loss = float(state.train_step(step - 1, meter or NoMeter()))
        # The loss is the same number on every rank, so all ranks end alike.
        if not math.isfinite(loss):
            raise _diverged(settings, saving, checkpoints, step, loss)
        if meter is not None:
            peak = meter.timeline().device_peak
        peak = _most(allocated.bytes() or peak, state.device)
        now = time.perf_counter()
        pace = job.step_rows * job.tokens / (now - before)
        left = (now - began) / (step - first) * (settings.steps - step)
        record = StepRecord(step, settings.steps, loss, now - before, pace, pace / job.ranks, peak, left)
        saves = step % saving.every == 0 or step == settings.steps
        if saves and state.validation is not None:
            validation = state.validation_loss()
            if not math.isfinite(validation):
                raise _diverged(settings, saving, checkpoints, step, loss, validation)
            record, now = replace(record, validation_loss=validation), time.perf_counter()
        records.append(record)
        before = now
        if leads:
            losses.add(record.to_json())
            (watch or publish)(record)
        # Ranks learn of a failed save at different moments; they stop for it at the same step.
        if not _most(checkpoints.writing, state.device):
            checkpoints.wait()
        if saves:
            # The save before may have failed for want of room that the losses would want too.
            checkpoints.wait()
            # A finite loss may still have a gradient, and so an update, that is not.
            if _most(not checkpoints.is_finite(state.model, state.optimizer), state.device):
                raise _diverged(settings, saving, checkpoints, step, loss)
            from_first_rank(losses.sync)
            checkpoints.save(state.model, state.optimizer, replace(saving.manifest, step=step))
    checkpoints.close()
    state.close()
    return tuple(records)


def _diverged(
    settings: TrainSettings,
    saving: CheckpointSettings,
    checkpoints: Checkpointer,
    step: int,
    loss: float,
    validation: float = 0.0,
) -> DivergedError:
    """The error that names the last good checkpoint, once a save that is under way has ended."""
    try:
        checkpoints.close()
        good = checkpoints_in(saving.folder)
        kept = "there is no earlier checkpoint"
        if good:
            kept = f"the last good checkpoint is {good[-1]} (lab export makes a model of it)"
    except CheckpointError as error:
        kept = str(error)
    return diverged(settings, step, loss, kept, validation)


def _most(value: int, device: torch.device) -> int:
    """The largest of all ranks' values."""
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
