"""The steps of jobs: from memory, from the user's cache, from what comes with the lab, or planned now.

An entry has the steps of a job at up to three lengths of a class (``scaling.py``). This module imports
neither torch nor transformers, unless a step has to be planned.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.memory.moment import Moment
from lab.planning import plan_cache
from lab.planning.scaling import LengthClass, Scaling, Step, length_class
from lab.planning.scaling_file import decode, encode
from lab.recipe.jobs import Job
from lab.shape import Shape

if TYPE_CHECKING:
    from lab.models import ModelLike

SHIPPED = Path(__file__).parent / "scalings"
"""The entries that come with the lab."""

SHAPES, STAMP = "shapes.json", "sources.txt"
"""The files, among them, that have the shapes of their models and the hash of the sources that made them."""

WALKED = (
    "decoder", "memory", "models", "planning/cuda_workspace.py", "planning/extrapolated_storages.py",
    "planning/extrapolation.py", "planning/fake_step.py", "planning/scaling.py", "planning/start.py",
    "planning/whole_step.py", "planning/work_counter.py", "recipe", "shape.py", "step", "techniques",
    "torch_private.py",
)  # fmt: skip
"""The sources that steps depend on."""

ROWS = 400_000
"""The rows of timelines that stay in memory."""


@dataclass(frozen=True)
class Facts:
    """What a plan says of a job at every length.

    Attributes:
        shape: The sizes of the job's model.
        state: See ``Plan.state``.
        start: See ``Plan.start``.
        adam: The bytes of Adam's two moments on a rank.
        attention_dtype: The dtype in which attention runs.
        ring_ranks: The ring ranks of which one holds the most.
    """

    shape: Shape
    state: str
    start: Moment
    adam: int
    attention_dtype: str
    ring_ranks: tuple[int, ...]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Facts:
        """Return the facts of what ``dataclasses.asdict`` returned, with lists in the place of tuples."""
        shape, start = shape_from_json(document["shape"]), Moment(**document["start"])
        ring_ranks = tuple(document["ring_ranks"])
        return cls(**document | {"shape": shape, "start": start, "ring_ranks": ring_ranks})


@dataclass(frozen=True)
class Answer:
    """The steps of a job.

    Attributes:
        facts: What holds at every length.
        steps: The step at each of ``facts.ring_ranks``.
        lengths: The lengths whose steps give these; empty where these were planned.
    """

    facts: Facts
    steps: tuple[Step, ...]
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """The steps of a job at some lengths of a class: a scaling for each of ``facts.ring_ranks``."""

    facts: Facts
    scalings: tuple[Scaling, ...]

    def at(self, tokens: int) -> Answer | None:
        """Return the answer at a length; None if it is not known."""
        if not all(scaling.covers(tokens) for scaling in self.scalings):
            return None
        lengths = self.scalings[0].tokens
        steps = tuple(scaling.at(tokens) for scaling in self.scalings)
        return Answer(self.facts, steps, () if tokens in lengths else lengths)

    @classmethod
    def of(cls, answers: Mapping[int, Answer]) -> Entry:
        """Return the entry with these answers, by length; see ``with_answer``."""
        facts = next(iter(answers.values())).facts
        entry = cls(facts, (Scaling((), ()),) * len(facts.ring_ranks))
        for tokens, found in answers.items():
            entry = entry.with_answer(tokens, found)
        return entry

    def with_answer(self, tokens: int, found: Answer) -> Entry:
        """Return the entry with one more length.

        Raises:
            LookupError: Its steps are not what the others say; see ``Scaling.with_step``.
        """
        pairs = zip(self.scalings, found.steps, strict=True)
        return Entry(self.facts, tuple(scaling.with_step(tokens, step) for scaling, step in pairs))

    def closed(self) -> Entry:
        """Return the entry of the same lengths, from which no other one follows."""
        return Entry(self.facts, tuple(replace(scaling, closed=True) for scaling in self.scalings))


def answer(job: Job, *, workspace: bool) -> Answer:
    """Return the steps of a job. What is not known is planned, and kept.

    Raises:
        LabError: See ``lab.planning.plan.plan_job``.
    """
    found = known_answer(job, workspace=workspace)
    return found or _planned(job, workspace=workspace)


def known_answer(job: Job, *, workspace: bool) -> Answer | None:
    """Return the steps of a job if they are known, from its own length or from others; else None."""
    for which in _classes(job):
        entry = _read(job, which, workspace=workspace)
        # LookupError: the bytes at this length are no integers.
        with suppress(LookupError):
            found = None if entry is None else entry.at(job.tokens)
            if found is not None:
                return found
    return None


def _classes(job: Job) -> tuple[LengthClass, ...]:
    """Return the class of a job's length, and that of this length alone; none of a callable.

    The code of a callable has no key under which its steps could be kept.
    """
    if callable(job.model) and not hasattr(job.model, "to_dict"):
        return ()
    which = length_class(job, shape_of(job.model, job.dtype))
    alone = replace(which, only=job.tokens)
    return (which,) if which == alone else (which, alone)


def _planned(job: Job, *, workspace: bool) -> Answer:
    from lab.planning.whole_step import walk

    found = walk(job, workspace=workspace)
    for which in _classes(job):
        entry = _read(job, which, workspace=workspace)
        try:
            entry = entry.with_answer(job.tokens, found) if entry else Entry.of({job.tokens: found})
        except LookupError:
            # Lengths that were taken to be alike are not. This one is kept alone.
            assert entry is not None
            _write(job, which, entry.closed(), workspace=workspace)
            continue
        _write(job, which, entry, workspace=workspace)
        break
    return found


def _write(job: Job, which: LengthClass, entry: Entry, *, workspace: bool) -> None:
    for file, scaling in zip(_files(job, which, workspace=workspace), entry.scalings, strict=False):
        plan_cache.write(file, encode(scaling, asdict(entry.facts), small=False))


# ---- in memory and on disk ---------------------------------------------------------------------------------

_memory: OrderedDict[tuple[Path, int, int], Entry] = OrderedDict()


def is_current() -> bool:
    """Return whether what comes with the lab was made by these sources. What others made is not used."""
    stamp = SHIPPED / STAMP
    return stamp.is_file() and stamp.read_text().strip() == plan_cache.sources_hash(*WALKED)


def _read(job: Job, which: LengthClass, *, workspace: bool) -> Entry | None:
    for shipped in (False, True) if is_current() else (False,):
        with suppress(OSError, ValueError, KeyError, TypeError, EOFError, LookupError):
            return _entry_of(_files(job, which, workspace=workspace, shipped=shipped))
    return None


def entry_files(job: Job, *, workspace: bool, shipped: bool) -> list[Path]:
    """Return the files of the entry of a job's class: one for each ring rank that is planned."""
    return _files(job, _classes(job)[0], workspace=workspace, shipped=shipped)


def _files(job: Job, which: LengthClass, *, workspace: bool, shipped: bool = False) -> list[Path]:
    folder = SHIPPED if shipped else plan_cache.folder("plans")
    name_of = plan_cache.digest if shipped else plan_cache.key_of
    # Without documents, at most two ring ranks are planned.
    most = max(2, job.recipe.ring if job.documents else 0)
    return [folder / f"{name_of(_facts(job, which, workspace, n))}.plan" for n in range(most)]


def _entry_of(paths: list[Path]) -> Entry:
    """Return the entry in these files; of several, one for each of its ring ranks."""
    if (key := _state_of(paths[0])) in _memory:
        _memory.move_to_end(key)
        return _memory[key]
    scaling, facts = decode(paths[0].read_bytes())
    of_job = Facts.from_json(facts)
    others = (decode(path.read_bytes())[0] for path in paths[1 : len(of_job.ring_ranks)])
    entry = Entry(of_job, (scaling, *others))
    with suppress(OSError):
        for path in paths[: len(of_job.ring_ranks)]:
            path.touch() if path.parent != SHIPPED else None
    _memory[_state_of(paths[0])] = entry
    while sum(map(_rows, _memory.values())) > ROWS and len(_memory) > 1:
        _memory.popitem(last=False)
    return entry


def _state_of(path: Path) -> tuple[Path, int, int]:
    stat = path.stat()
    return path, stat.st_mtime_ns, stat.st_size


def _rows(entry: Entry) -> int:
    return sum(len(step.timeline) for scaling in entry.scalings for step in scaling.steps)


def _facts(job: Job, which: LengthClass, workspace: bool, number: int) -> dict[str, Any]:
    """Return everything that the steps at all lengths of a class depend on, but for sources and versions."""
    model: Any = job.model
    return {
        "model": model.to_dict() if hasattr(model, "to_dict") else plan_cache.model_identity(model),
        "dtype": job.dtype,
        "lora": None if job.lora is None else job.lora.to_json(),
        "class": vars(which),
        "sizes": [job.documents, job.ranks, job.rows, job.accumulate],
        "workspace": workspace,
        "ring rank": number,
    }


# ---- shapes ------------------------------------------------------------------------------------------------


def shape_of(model: ModelLike, dtype: str | None = None) -> Shape:
    """The model's shape; of a callable, that of a model that it makes without a byte of its parameters.

    That of a name or a directory is kept, so that the next time nothing is imported.

    Raises:
        LabError: See ``lab.models.shape_of``.
    """
    if not isinstance(model, str | Path):
        from lab.planning.whole_step import shape_of_model

        return shape_of_model(model, dtype)
    if dtype is None and model in _shipped_shapes():
        return _shipped_shapes()[str(model)]
    facts = {"model": plan_cache.model_identity(model), "dtype": dtype}

    def make() -> Shape:
        from lab.models import shape_of

        return shape_of(model, dtype)

    return plan_cache.cached("shapes", facts, make, encode=asdict, decode=shape_from_json)


@cache
def _shipped_shapes() -> dict[str, Shape]:
    document = json.loads((SHIPPED / SHAPES).read_text()) if is_current() else {}
    return {model: shape_from_json(shape) for model, shape in document.items()}


def shape_from_json(document: dict[str, Any]) -> Shape:
    """Return a shape from JSON, which has lists in the place of tuples."""
    sizes: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in document.items()}
    return Shape(**sizes)
