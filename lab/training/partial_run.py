"""What a run measured until it ended too early, put together from the messages of its ranks."""

from __future__ import annotations

from collections import defaultdict

from lab.memory.timeline import Timeline
from lab.step.on_ranks import Training
from lab.training.records import Progress, Run


class PartialRun:
    """Puts a run together from the messages of its ranks, as far as they have come.

    Its timelines have no storages. At each row, bytes have the category that was known then: a tensor that
    will outlive its module is still a temporary buffer while the module runs.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._pieces: dict[int, list[Timeline]] = defaultdict(list)
        self._finished: dict[int, tuple[float, float]] = {}

    def add(self, message: Progress) -> None:
        """Take a message."""
        self._pieces[message.rank].append(message.timeline)
        if message.rank == 0 and message.loss is not None and message.seconds is not None:
            self._finished[message.step - 1] = (message.loss, message.seconds)

    def run(self, how: str) -> Run | None:
        """The run so far, ``how`` it ended in its title; None where no rank has said a thing.

        The last step that ended counts if a message came after it.
        """
        if not self._pieces:
            return None
        losses, seconds = zip(*self._finished.values(), strict=True) if self._finished else ((), ())
        job, settings = self._training.job, self._training.settings
        return Run(
            title=f"{job.title} · {how} in step {len(losses) + 1} of {settings.steps}",
            job=job,
            settings=settings,
            losses=losses,
            seconds=seconds,
            timelines=tuple(Timeline.join(self._pieces[rank]) for rank in sorted(self._pieces)),
            complete=False,
            weights=self._training.weights,
        )
