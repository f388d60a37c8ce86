"""Freeing: the cheapest changes of a job's recipe that make its device peak smaller by so many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from lab.errors import RecipeError
from lab.planning.closed_form import Estimate, estimate_job
from lab.planning.closed_form_terms import local_sizes
from lab.recipe.jobs import Job
from lab.recipe.ladder import TILE
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import format_bytes, parse_bytes

Setting = dict[str, Any]
"""Fields of a recipe that change together, with their new values."""

CHEAPEST_FIRST = (
    "fsdp", "loss_tile", "norm_tile", "offload", "ulysses", "head_chunk", "stream", "mlp_tile", "checkpoint",
)  # fmt: skip
"""What may change, in the order of the seconds that it costs: those of ``lab.plan`` for Llama3-8B with 256K
tokens on 8 ranks, from 0.2 s more than 16.6 s for a tile of the loss to 4.4 s for checkpointing. ``ulysses``
stands for both degrees, whose product becomes the number of ranks. ``stream`` costs 0.5 s where layers are
offloaded, which it needs."""

DEPENDENT = ("offload", "ulysses", "head_chunk", "stream")
"""Of these the value that frees the most depends on the others, and may be the present one."""

MOST_TILES = 64
"""The most tiles of a rank's tokens: each is a pass through the modules, which has a fixed cost."""


@dataclass(frozen=True)
class Freed:
    """Changes of a recipe, and the bytes that they free on each rank by the closed form.

    Attributes:
        wanted: The bytes that were asked for.
        changes: The new values of fields of the recipe, by name.
        device: The bytes by which the device peak is smaller; below ``wanted`` where nothing frees as much.
        host: The bytes by which the host peak is larger.
    """

    wanted: int
    changes: Setting
    device: int
    host: int

    @property
    def enough(self) -> bool:
        """Whether the changes free what was asked for."""
        return self.device >= self.wanted

    @property
    def text(self) -> str:
        """One line: what to set, and how much less is held then."""
        knobs = ", ".join(f"{name}={_value_text(value)}" for name, value in self.changes.items())
        host = f", and {format_bytes(self.host)} more on the host" if self.host > 0 else ""
        less = format_bytes(self.device)
        if self.enough:
            return f"set {knobs}: {less} less at the peak{host}, by the closed form"
        most = f"the most is {less} with {knobs}{host}" if self.changes else "none makes the peak smaller"
        return f"no set of knobs frees {format_bytes(self.wanted)}; {most}, by the closed form"


def cheapest_changes(shape: Shape, job: Job, size: int | str) -> Freed:
    """Return the cheapest changes that make the device peak of a job smaller by at least ``size`` bytes.

    One change comes before two, and two before three. Two sets of as many changes are compared by the change
    of each that costs the most seconds, see ``CHEAPEST_FIRST``. Each knob takes the mildest value that still
    frees the bytes: the largest tile or head chunk.

    Args:
        shape: The shape of the job's model.
        job: The job.
        size: Bytes, or a text such as "4 GiB".

    Returns:
        The changes; if none free as much, those that free the most.

    Raises:
        LabError: ``size`` is not an amount of memory.
    """
    search = _Search(shape, job, parse_bytes(size))
    most = search.leanest(tuple(search.settings), or_unchanged=DEPENDENT)
    if search.freed(most) >= search.wanted:
        for names in _sets_in_order(tuple(search.settings)):
            chosen = search.leanest(names)
            if search.freed(chosen) >= search.wanted:
                return search.result(_mildest(search, names, chosen))
    return search.result(_without_idle(search, most))


class _Search:
    """The values that each knob may take, the mildest first, and the closed form's answer to combinations."""

    def __init__(self, shape: Shape, job: Job, wanted: int) -> None:
        self.shape, self.job, self.wanted = shape, job, wanted
        self._now = estimate_job(shape, job)
        self._known: dict[Recipe, Estimate] = {}
        # Offload needs checkpointing, and streamed layers need both. Some values are legal with no other: a
        # tile of the loss with Liger.
        tried = {name: _settings(name, shape, job) for name in CHEAPEST_FIRST}
        needed: Setting = {"checkpoint": True}
        offload: Setting = {} if job.recipe.offload != "none" else {"offload": "inputs"}
        legal = {
            name: [
                one
                for one in values
                if self._estimate({"needed": needed | (offload if name == "stream" else {}), name: one})
            ]
            for name, values in tried.items()
        }
        self.settings = {name: values for name, values in legal.items() if values}

    def freed(self, chosen: dict[str, Setting]) -> int:
        """Return the bytes by which the device peak is smaller; of an illegal combination less than none."""
        found = self._estimate(chosen)
        return -1 if found is None else self._now.device_peak - found.device_peak

    def leanest(self, names: tuple[str, ...], or_unchanged: tuple[str, ...] = ()) -> dict[str, Setting]:
        """Return the values of these knobs that free the most; some may keep their value."""
        unchanged: list[Setting] = [{}]
        values = [
            # Of tiles, the smallest holds the least, whatever the others are.
            (unchanged if name in or_unchanged else [])
            + (self.settings[name] if name in DEPENDENT and name != "stream" else self.settings[name][-1:])
            for name in names
        ]
        every = (dict(zip(names, chosen, strict=True)) for chosen in product(*values))
        return max(every, key=self.freed)

    def result(self, chosen: dict[str, Setting]) -> Freed:
        """Return the answer for these values."""
        found = self._estimate(chosen) or self._now
        recipe = self.job.recipe
        return Freed(
            wanted=self.wanted,
            changes={
                field: value
                for setting in chosen.values()
                for field, value in setting.items()
                if value != getattr(recipe, field)
            },
            device=self._now.device_peak - found.device_peak,
            host=found.host_peak - self._now.host_peak,
        )

    def _estimate(self, chosen: dict[str, Setting]) -> Estimate | None:
        fields = {field: value for setting in chosen.values() for field, value in setting.items()}
        try:
            recipe = replace(self.job.recipe, **fields)
            recipe.check(self.shape, self.job.ranks)
        except RecipeError:
            return None
        if recipe not in self._known:
            self._known[recipe] = estimate_job(self.shape, replace(self.job, recipe=recipe))
        return self._known[recipe]


def _settings(name: str, shape: Shape, job: Job) -> list[Setting]:
    """Return the other values of a knob, the mildest first."""
    recipe, (_, tokens) = job.recipe, local_sizes(job)
    values: list[Any]
    if name in ("fsdp", "checkpoint"):
        values = [True] if not getattr(recipe, name) and (name == "checkpoint" or job.ranks > 1) else []
    elif name == "ulysses":
        pairs = degree_pairs(shape, job.ranks)
        return [{"ulysses": c, "ring": r} for c, r in pairs if (c, r) != (recipe.ulysses, recipe.ring)]
    elif name == "offload":
        values = ["inputs", "attention"] if recipe.offload == "none" else []
    elif name == "head_chunk":
        values = [chunk for chunk in range(shape.H, 0, -1) if shape.H % chunk == 0]
        values = [chunk for chunk in values if chunk < (recipe.head_chunk or shape.H + 1)]
    elif name == "stream" and recipe.stream is None:
        return [{"stream": max(1, min(TILE, tokens // 4)), "mlp_tile": None}]
    else:
        most = getattr(recipe, name) or tokens
        values = [2**power for power in range(TILE.bit_length() - 1, -1, -1)]
        values = [tile for tile in values if tile < most and tile * MOST_TILES >= tokens]
    return [{name: value} for value in values]


def _sets_in_order(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield every set of knobs, the small sets first; those of one size by the knob that costs the most."""
    for count in range(1, len(names) + 1):
        numbered = combinations(range(len(names)), count)
        for chosen in sorted(numbered, key=lambda numbers: numbers[::-1]):
            yield tuple(names[number] for number in chosen)


def _mildest(search: _Search, names: tuple[str, ...], chosen: dict[str, Setting]) -> dict[str, Setting]:
    """Return the mildest values of these knobs that free the bytes, the costliest knob first."""
    for name in reversed(names):
        milder = (chosen | {name: setting} for setting in search.settings[name])
        chosen = next((one for one in milder if search.freed(one) >= search.wanted), chosen)
    return chosen


def _without_idle(search: _Search, chosen: dict[str, Setting]) -> dict[str, Setting]:
    """Return the values without those that free nothing more than the others do, the costliest first."""
    if search.freed(chosen) <= 0:
        return {}
    for name in reversed(tuple(chosen)):
        others = {other: setting for other, setting in chosen.items() if other != name}
        if search.freed(others) >= search.freed(chosen):
            chosen = others
    return chosen


def _value_text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
