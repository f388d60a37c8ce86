"""Freeing: the cheapest changes of a job's recipe that make its device peak smaller by so many bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lab.errors import RecipeError
from lab.planning.plan import Plan
from lab.recipe.jobs import Job
from lab.recipe.ladder import TILE
from lab.shape import Shape
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import Ki, format_bytes, parse_bytes

Setting = dict[str, Any]
"""Fields of a recipe that change together, with their new values."""

CHEAPEST_FIRST = (
    "fsdp", "replicas", "loss_tile", "norm_tile", "head_chunk", "optimizer", "mlp_tile", "ulysses",
    "checkpoint", "offload", "stream",
)  # fmt: skip
"""The knobs that free device memory, in the order of the seconds that they cost: those of ``lab.plan`` for
Llama3-8B with 256K tokens on 8 ranks, from 0.05 s more than 16.6 s for a tile of the loss to 4.3 s for
checkpointing. ``offload`` needs checkpointing, and ``stream`` needs ``offload``. ``ulysses`` stands for both
degrees."""


@dataclass(frozen=True)
class Freed:
    """Changes of a recipe, and the bytes that they free on each rank.

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
        if self.enough:
            return f"set {self.summary}"
        most = f"the most is with {self.summary}" if self.device > 0 else "none makes the peak smaller"
        return f"no set of knobs frees {format_bytes(self.wanted)}; {most}"

    @property
    def summary(self) -> str:
        """The changes, and the bytes that are held less, and more."""
        knobs = ", ".join(f"{name}={_value_text(value)}" for name, value in self.changes.items())
        host = f", and {format_bytes(self.host)} more on the host" if self.host > 0 else ""
        return f"{knobs}: {format_bytes(self.device)} less at the peak{host}"


def cheapest_changes(
    job: Job,
    size: int | str,
    plan: Callable[[Job], Plan],
    watch: Callable[[Freed], object] | None = None,
) -> Freed:
    """Return the cheapest changes that make the device peak of a job smaller by at least ``size`` bytes.

    The knobs of ``CHEAPEST_FIRST`` are turned one after the other, each to its leanest value, until enough is
    free. One knob that frees enough alone comes before several. Of several, those that are not needed are
    turned back, the costliest first. Each takes the mildest value that still frees the bytes: the largest
    tile or head chunk.

    Args:
        job: The job.
        size: Bytes, or a text such as "4 GiB".
        plan: Plans a job; it is called once for each recipe.
        watch: Called with what each plan frees.

    Returns:
        The changes; if none free as much, those that free the most.

    Raises:
        LabError: ``size`` is not an amount of memory; a job that cannot be planned.
    """
    search = _Search(job, parse_bytes(size), plan, watch)
    chosen: dict[str, Setting] = {}
    for number, name in enumerate(CHEAPEST_FIRST):
        turned = chosen | search.leanest(name)
        if search.frees(turned) is None:
            # The smallest chunk of the heads is that of the degree before.
            turned.pop("head_chunk", None)
            if search.frees(turned) is None:
                continue
        chosen = turned
        if search.enough(chosen):
            # A cheaper knob does not free enough alone: it is among those that did not together.
            alone = (search.leanest(other) for other in CHEAPEST_FIRST[number:])
            chosen = next((one for one in alone if search.enough(one)), chosen)
            break
    chosen = search.needed(chosen)
    for name in reversed(tuple(chosen)):
        chosen = search.mildest(chosen, name)
    return search.frees(chosen) or search.frees({}) or search.nothing


class _Search:
    """What combinations of settings free, each planned once."""

    def __init__(
        self, job: Job, wanted: int, plan: Callable[[Job], Plan], watch: Callable[[Freed], object] | None
    ) -> None:
        self._job, self._plan, self._watch = job, plan, watch
        self._now = plan(job)
        self.nothing = Freed(wanted, {}, 0, 0)
        self._known = {job.recipe: self.nothing}
        self._values = {name: _settings(name, self._now.shape, job) for name in CHEAPEST_FIRST}

    def leanest(self, name: str) -> dict[str, Setting]:
        """Return the setting of a knob that frees the most; nothing if it has no other value."""
        return {name: values[-1]} if (values := self._values[name]) else {}

    def frees(self, chosen: dict[str, Setting]) -> Freed | None:
        """Return what settings free; None if they are no recipe."""
        fields = {field: value for setting in chosen.values() for field, value in setting.items()}
        try:
            recipe = replace(self._job.recipe, **fields)
            recipe.check(self._now.shape, self._job.ranks)
        except RecipeError:
            return None
        if recipe not in self._known:
            planned = self._plan(replace(self._job, recipe=recipe, recipe_name=None))
            self._known[recipe] = replace(
                self.nothing,
                changes={f: v for f, v in fields.items() if v != getattr(self._job.recipe, f)},
                device=self._now.device_peak - planned.device_peak,
                host=planned.host_peak - self._now.host_peak,
            )
            if self._watch is not None:
                self._watch(self._known[recipe])
        return self._known[recipe]

    def enough(self, chosen: dict[str, Setting]) -> bool:
        """Return whether settings are a recipe that frees what was asked for."""
        freed = self.frees(chosen)
        return freed is not None and freed.enough

    def needed(self, chosen: dict[str, Setting]) -> dict[str, Setting]:
        """Return the settings without those that are not needed to free as much, the costliest first."""
        most = self.frees(chosen)
        assert most is not None
        for name in reversed(tuple(chosen)):
            fewer = {other: setting for other, setting in chosen.items() if other != name}
            freed = self.frees(fewer)
            if freed is not None and freed.device >= min(most.wanted, most.device):
                chosen = fewer
        return chosen

    def mildest(self, chosen: dict[str, Setting], name: str) -> dict[str, Setting]:
        """Return the settings with the mildest value of a knob that still frees what was asked for."""
        values = self._values[name] if self.enough(chosen) else [chosen[name]]
        last = len(values) - 1
        number = bisect_left(values, True, hi=last, key=lambda value: self.enough(chosen | {name: value}))
        return chosen | {name: values[number]}


def smallest_tile(tokens: int) -> int:
    """Return the smallest tile that is proposed for so many tokens of a rank: 1K, if there are 16 of them."""
    return max(1, min(Ki, tokens // 16))


def _settings(name: str, shape: Shape, job: Job) -> list[Setting]:
    """Return the other values of a knob, the mildest first."""
    recipe, (_, tokens) = job.recipe, job.local_sizes
    values: list[Any]
    if name == "ulysses":
        pairs = degree_pairs(shape, job.ranks) if recipe.ulysses * recipe.ring < job.ranks else []
        alone = {"ring_exchange": "send"}
        return [{"ulysses": c, "ring": r} | (alone if r == 1 else {}) for c, r in pairs[:1]]
    if name in ("fsdp", "checkpoint"):
        values = [True] if not getattr(recipe, name) and (name == "checkpoint" or job.ranks > 1) else []
    elif name == "replicas":
        groups = job.ranks // (recipe.ulysses * recipe.ring)
        values = [y for y in range(recipe.replicas - 1, 0, -1) if groups % y == 0]
    elif name == "offload":
        values = ["attention", "inputs"] if recipe.offload == "none" else []
    elif name == "optimizer":
        values = ["host"] if recipe.optimizer == "device" else []
    elif name == "head_chunk":
        chunks = range(shape.H, 0, -1)
        most = recipe.head_chunk or shape.H + 1
        values = [u for u in chunks if u < most and shape.H % u == 0 and u % recipe.ulysses == 0]
    else:
        most = getattr(recipe, name) or tokens
        values = [2**power for power in range(TILE.bit_length() - 1, -1, -1)]
        values = [tile for tile in values if smallest_tile(tokens) <= tile < most]
    with_it = {"mlp_tile": None} if name == "stream" else {}
    return [{name: value} | with_it for value in values]


def _value_text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
