"""What comes with the lab: the steps of the presets' named recipes, from which their plans follow at once."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from lab.bench.table import Row, Say
from lab.errors import LabError, RecipeError
from lab.models import shape_of as read_shape
from lab.models.presets import PRESETS
from lab.planning.answers import (
    SHAPES,
    SHIPPED,
    STAMP,
    WALKED,
    Entry,
    answer,
    entry_files,
    is_current,
    shape_of,
)
from lab.planning.longest import classes
from lab.planning.plan_cache import sources_hash
from lab.planning.scaling import LENGTHS, length_class
from lab.planning.scaling_file import decode, encode
from lab.planning.whole_step import walk
from lab.recipe.jobs import MAX_TOKENS, Job, make_job
from lab.recipe.ladder import RECIPE_NAMES
from lab.units import format_tokens

RANKS = (8,)
"""The ranks that the presets have entries for; ``tiny`` has those of ``TINY_RANKS``."""

TINY_RANKS = (2, 4)


@dataclass(frozen=True)
class Shipped:
    """An entry that comes with the lab: a job at each of its lengths."""

    jobs: tuple[Job, ...]

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return str(self.jobs[0].recipe_name)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.jobs[0].ranks

    @property
    def title(self) -> str:
        """The model, the recipe and the ranks."""
        return f"{self.jobs[0].model}, {self.recipe}, {self.ranks} ranks"

    @property
    def files(self) -> list[Path]:
        """Where its bytes are, one file for each ring rank."""
        return entry_files(self.jobs[0], workspace=True, shipped=True)

    @property
    def nbytes(self) -> int:
        """The bytes of its files; 0 if one is missing."""
        sizes = [file.stat().st_size if file.is_file() else 0 for file in self.files]
        if sizes[0] and self.jobs[0].recipe.ring > 1:
            _, facts = decode(self.files[0].read_bytes())
            sizes = sizes[: len(facts["ring_ranks"])]
            return sum(sizes) if all(sizes) else 0
        return sizes[0]

    def holds(self, length: int = 0) -> bool:
        """Return whether the entry is there, and a walk gives the same to the byte.

        Args:
            length: The index of the job that is walked.
        """
        if not self.nbytes:
            return False
        job = self.jobs[length]
        found = walk(job, workspace=True)
        entries = [decode(file.read_bytes()) for file in self.files[: len(found.steps)]]
        return all(
            facts == json.loads(json.dumps(asdict(found.facts))) and scaling.agrees(job.tokens, step)
            for (scaling, facts), step in zip(entries, found.steps, strict=True)
        )

    def make(self) -> None:
        """Walk the jobs, and write the entry."""
        entry = Entry.of({job.tokens: walk(job, workspace=True) for job in self.jobs})
        for file, scaling in zip(self.files, entry.scalings, strict=False):
            file.write_bytes(encode(scaling, asdict(entry.facts), small=True))


def shipped(models: Sequence[str] = tuple(PRESETS)) -> Iterator[Shipped]:
    """Yield all entries that come with the lab.

    An entry has the longest class of lengths that are alike: from 512K tokens on 8 ranks, or 1M with streamed
    layers. That of ``tiny`` has the short ones.
    """
    for model in models:
        for ranks in TINY_RANKS if model == "tiny" else RANKS:
            for name in RECIPE_NAMES:
                # The model or the number of ranks may forbid a recipe.
                with suppress(RecipeError):
                    entry = _entry(model, name, ranks)
                    if entry is not None:
                        yield entry


def _entry(model: str, name: str, ranks: int) -> Shipped | None:
    """Return the entry of a recipe; None if no lengths are alike, as with a window of 2047 tokens."""
    shape = shape_of(model)
    job_of = partial(_job, model, name, ranks)
    groups = [[*group] for which, group in classes(job_of, shape) if which.only is None]
    shortest = next(group[0] for group in groups if len(group) > 2) if model == "tiny" else groups[-1][0]
    if shortest * LENGTHS > MAX_TOKENS:
        return None
    return Shipped(tuple(job_of(shortest * n) for n in range(1, LENGTHS + 1)))


def _job(model: str, name: str, ranks: int, tokens: int) -> Job:
    return make_job(model, name, tokens=tokens, ranks=ranks, shape=shape_of(model))


def make_scalings(models: Sequence[str], say: Say) -> Iterator[Row]:
    """Make the entries of these presets that are missing, or that a plan does not agree with any more.

    As many processes as there are cores make them. If they are those of all presets, other files are removed,
    and the hash of the sources says that these made them; see ``lab.planning.answers.is_current``.

    Yields:
        A row for each entry.
    """
    SHIPPED.mkdir(exist_ok=True)
    shapes = {model: asdict(read_shape(model)) for model in models}
    known = json.loads((SHIPPED / SHAPES).read_text()) if (SHIPPED / SHAPES).exists() else {}
    (SHIPPED / SHAPES).write_text(json.dumps(known | shapes, indent=1, sort_keys=True) + "\n")
    entries = [*shipped(models)]
    with ProcessPoolExecutor(os.cpu_count(), get_context("forkserver")) as pool:
        for entry, was in zip(entries, pool.map(_keep_or_make, entries), strict=True):
            say(entry.title)
            lengths = ", ".join(format_tokens(job.tokens) for job in entry.jobs)
            yield {"entry": entry.title, "lengths": lengths, "bytes": entry.nbytes, "was": was}
    if {*models} == {*PRESETS}:
        for file in {*SHIPPED.glob("*.plan")} - {file for entry in entries for file in entry.files}:
            file.unlink()
        (SHIPPED / STAMP).write_text(sources_hash(*WALKED) + "\n")


def compare_lengths(model: str, recipe: str, ranks: int, times: int, say: Say) -> Iterator[Row]:
    """Compare what follows at random lengths from the plans that come with the lab with plans made now.

    Args:
        model: A preset.
        recipe: A named recipe.
        ranks: The number of ranks.
        times: How many lengths are drawn.
        say: Shows what is planned now.

    Yields:
        A row for each length, which ends with a whole tile: the peaks of both, and how many rows of the
        timeline, of how many, hold equal bytes on the device and on the host.

    Raises:
        LabError: The lab comes with no plans of this recipe.
    """
    entry = next((one for one in shipped([model]) if (one.recipe, one.ranks) == (recipe, ranks)), None)
    if entry is None or not is_current():
        raise LabError(f"no current plans of {model}, {recipe}, {ranks} ranks come with the lab: name others")
    shortest, grid = entry.jobs[0].tokens, length_class(entry.jobs[0], shape_of(model)).grid
    for tokens in sorted(random.Random(0).sample(range(shortest, 64 * shortest, grid), times)):
        say(format_tokens(tokens))
        job = replace(entry.jobs[0], tokens=tokens)
        follows, made = answer(job, workspace=True), walk(job, workspace=True)
        pairs = [(a.timeline, b.timeline) for a, b in zip(follows.steps, made.steps, strict=True)]
        yield {
            "tokens": tokens,
            "from": ", ".join(map(format_tokens, follows.lengths)),
            "device": max(a.device_peak for a, _ in pairs),
            "planned now": max(b.device_peak for _, b in pairs),
            "host": max(a.host_peak for a, _ in pairs),
            "host, planned now": max(b.host_peak for _, b in pairs),
            "equal rows": sum(int(((a.total == b.total) & (a.host == b.host)).sum()) for a, b in pairs),
            "rows": sum(len(b) for _, b in pairs),
        }


def _keep_or_make(entry: Shipped) -> str:
    if entry.holds():
        return "kept"
    entry.make()
    return "made"
