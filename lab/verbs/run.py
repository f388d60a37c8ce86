"""Run: train on real ranks, and bring back losses, seconds and every rank's memory timeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from lab import models
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.recipe import Recipe
from lab.rungs import title_of
from lab.step import train_step
from lab.verbs.on_ranks import Training, checked, worker

if TYPE_CHECKING:
    # A machine without ipyparallel can still import the lab, to plan and to rehearse.
    from cluster.ranks import Cluster


@dataclass(frozen=True, eq=False)
class Progress:
    """One message of a running rank: where it is, and the timeline's rows since its previous message."""

    rank: int
    ranks: int
    step: int
    steps: int
    loss: float | None
    timeline: Timeline


@dataclass(frozen=True, eq=False)
class Run:
    """What a run brings back.

    ``losses`` and ``seconds`` have one entry a step (the loss is the global mean, the time rank 0's);
    ``timelines`` one a rank.
    """

    title: str
    training: Training
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    timelines: tuple[Timeline, ...]

    @property
    def device_peak(self) -> int:
        """The most device bytes any rank held."""
        return max(timeline.device_peak for timeline in self.timelines)

    @property
    def host_peak(self) -> int:
        """The most host bytes any rank held."""
        return max(timeline.host_peak for timeline in self.timelines)


Watch: TypeAlias = Callable[[Progress | Run], None]
"""Called with each message of each rank while the run goes on, and once with the run at its end."""


def run(
    model: models.ModelLike = "tiny",
    recipe: str | Recipe = "plain",
    *,
    tokens: int | str,
    cluster: Cluster,
    steps: int = 3,
    rows: int = 1,
    text: str | Path | None = None,
    tokenizer: str | Path | None = None,
    learning_rate: float = 1e-3,
    clip_norm: float = 1.0,
    seed: int = 0,
    watch: Watch | None = None,
) -> Run:
    """Train ``steps`` steps of ``rows`` rows of ``tokens`` tokens on all ranks of a cluster.

    ``text`` is a file or folder (by default the Python standard library's sources), ``tokenizer`` a local
    directory (by default bytes are the tokens).

    Raises:
        LabError: a model, recipe, text or size that cannot work, before anything is launched.
        RankError: a rank failed; the text names it and holds its traceback.
    """
    training, _, _ = checked(
        model,
        recipe,
        ranks=cluster.ranks,
        tokens=tokens,
        steps=steps,
        rows=rows,
        text=text,
        tokenizer=tokenizer,
        learning_rate=learning_rate,
        clip_norm=clip_norm,
        seed=seed,
    )

    def on_record(rank: int, record: object) -> None:
        if watch is not None and isinstance(record, Progress):
            watch(record)

    results = cluster.apply(_train, training, on_record=on_record)
    losses, seconds, _ = results[0]
    finished = Run(
        title=title_of(model, recipe, cluster.ranks, training.tokens),
        training=training,
        losses=losses,
        seconds=seconds,
        timelines=tuple(timeline for _, _, timeline in results),
    )
    if watch is not None:
        watch(finished)
    return finished


def _train(training: Training) -> tuple[tuple[float, ...], tuple[float, ...], Timeline]:
    """Runs on every rank."""
    from cluster.live import publish

    rank, ranks = dist.get_rank(), dist.get_world_size()
    ready = worker(training)
    losses: list[float] = []
    seconds: list[float] = []

    def grown(rows: Timeline) -> None:
        last = losses[-1] if losses else None
        publish(Progress(rank, ranks, len(losses), training.steps, last, rows))

    meter = Meter(on_growth=grown)
    for step in range(training.steps):
        start = time.perf_counter()
        batch = ready.batch(step)
        # The loss is read at once: kept as a tensor it would be four bytes in the next step's timeline.
        losses.append(
            float(train_step(ready.model, ready.optimizer, batch, meter=meter, clip_norm=training.clip_norm))
        )
        seconds.append(time.perf_counter() - start)
    return tuple(losses), tuple(seconds), meter.timeline()
