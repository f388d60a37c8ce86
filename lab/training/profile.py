"""Profile: the last of a few training steps on real ranks, in seconds and in bytes, with its trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab import models
from lab.memory.profiling import Profile, ProfilingMeter
from lab.memory.timeline import Timeline
from lab.recipe.jobs import Job, TrainSettings
from lab.recipe.recipe import Recipe
from lab.step.on_ranks import check_finite, make_rank_state, make_training
from lab.training.on_cluster import train_on_cluster

if TYPE_CHECKING:
    from cluster.ranks import Cluster


@dataclass(frozen=True, eq=False)
class Profiled:
    """What profiling brings back: ``losses`` one a step (the global mean), ``profiles`` one a rank."""

    job: Job
    settings: TrainSettings
    losses: tuple[float, ...]
    profiles: tuple[Profile, ...]

    @property
    def title(self) -> str:
        """One line that names the steps."""
        return self.job.title

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The bytes of all steps, one timeline a rank."""
        return tuple(profile.timeline for profile in self.profiles)

    def save(self, folder: str | Path) -> list[Path]:
        """Write each rank's trace, and its memory snapshot where it has one; return the files.

        ``rankN.json.gz`` opens in ui.perfetto.dev, ``rankN.pickle`` in pytorch.org/memory_viz: both read the
        file in the browser and send it nowhere.
        """
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        written = {}
        for rank, profile in enumerate(self.profiles):
            written[root / f"rank{rank}.json.gz"] = profile.trace
            if profile.snapshot is not None:
                written[root / f"rank{rank}.pickle"] = profile.snapshot
        for path, content in written.items():
            path.write_bytes(content)
        return list(written)


def profile(
    model: models.ModelLike = "tiny",
    recipe: str | Recipe = "plain",
    *,
    tokens: int | str,
    cluster: Cluster,
    steps: int = 2,
    rows: int = 1,
    text: str | Path | None = None,
    tokenizer: str | Path | None = None,
    learning_rate: float = 1e-3,
    clip_norm: float = 1.0,
    seed: int = 0,
) -> Profiled:
    """Train ``steps`` steps as ``lab.run`` does, all of them metered, the last one profiled too.

    The last step is slower than one of ``lab.run``: the profiler and the meter both look at every operator.
    ``Profile.meter_seconds`` says how much of it is theirs. Collectives may take as long as in ``lab.run``.

    Raises:
        LabError: as ``lab.run``, before anything is launched.
        RankError: a rank failed.
        DivergedError: the loss of a step is not finite.
    """
    settings = TrainSettings(steps, text, tokenizer, learning_rate, clip_norm, seed)
    training = make_training(model, recipe, settings, tokens=tokens, ranks=cluster.ranks, rows=rows)
    results = train_on_cluster(cluster, training, _profile)
    return Profiled(training.job, settings, results[0][0], tuple(profile for _, profile in results))


def _profile(job: Job, settings: TrainSettings) -> tuple[tuple[float, ...], Profile]:
    """Runs on every rank."""
    state = make_rank_state(job, settings)
    meter = ProfilingMeter()

    def one(step: int) -> float:
        return check_finite(settings, step + 1, float(state.train_step(step, meter)))

    losses = [one(step) for step in range(settings.steps - 1)]
    with meter.profile_step() as result:
        losses.append(one(settings.steps - 1))
    return tuple(losses), result[0]
