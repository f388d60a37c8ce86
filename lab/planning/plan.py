"""Plan: the training step on fake tensors, as one rank of N; bytes, operations, seconds, what stops it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lab import models
from lab.decoder import shape_of
from lab.memory.timeline import Moment, Timeline
from lab.planning.costs import Costs
from lab.planning.extrapolation import DEEP, SHALLOW, extended
from lab.planning.fake_step import Question, fake_step
from lab.planning.hardware import hardware
from lab.planning.plan_cache import Step, remembered
from lab.planning.start import start_of
from lab.recipe.knobs import BY_NAME
from lab.recipe.ladder import ladder, recipe_for, title_of
from lab.recipe.recipe import Recipe
from lab.step.kernel_limits import attention_dtype, runs_flash, torch_refusal
from lab.step.one_rank import ring_ranks
from lab.torch_private import FakeTensorMode
from lab.units import check_counts, parse_bytes, parse_tokens


@dataclass(frozen=True, eq=False)
class Plan:
    """One training step, planned: the bytes of a rank that holds the most.

    It is the first rank of ``ring_rank``. ``device_memory`` is bytes a device, ``host_memory`` bytes a node
    of ``ranks_per_node`` ranks; None where no limit was given. ``start`` is the highest moment before the
    first step. ``notes`` are sentences on what the plan does not count, or what a GPU would refuse.
    ``planning_seconds`` is what the plan took to make.
    """

    title: str
    recipe: Recipe
    tokens: int
    ranks: int
    rows: int
    ranks_per_node: int
    ring_rank: int
    device: str
    timeline: Timeline
    start: Moment
    costs: Costs
    device_memory: int | None
    host_memory: int | None
    notes: tuple[str, ...]
    planning_seconds: float

    @property
    def device_peak(self) -> int:
        """The most device bytes the rank holds at once, in the step or at the start."""
        return max(self.timeline.device_peak, self.start.device)

    @property
    def host_peak(self) -> int:
        """The most host bytes the rank holds at once."""
        return self.timeline.host_peak

    @property
    def host_peak_per_node(self) -> int:
        """The same of all ranks of a node."""
        return self.host_peak * min(self.ranks, self.ranks_per_node)

    @property
    def peak(self) -> Moment:
        """The instant of the device peak: its op names what to do next; of phase "start" if it is there."""
        return self.start if self.start.device > self.timeline.device_peak else self.timeline.peak

    @property
    def limit(self) -> Literal["device", "host"] | None:
        """Which memory refuses it; None where it fits what was given."""
        if self.device_memory is not None and self.device_peak > self.device_memory:
            return "device"
        if self.host_memory is not None and self.host_peak_per_node > self.host_memory:
            return "host"
        return None

    @property
    def fits(self) -> bool | None:
        """Whether it fits the memory that was given; None where none was."""
        if self.device_memory is None and self.host_memory is None:
            return None
        return self.limit is None

    @property
    def step_seconds(self) -> float:
        """The estimate of a step's time; see ``lab/planning/costs.py`` for what it leaves out."""
        return self.costs.seconds

    @property
    def longest_layer(self) -> float:
        """Seconds of the layer that takes the longest, in forward or backward; 0.0 where no layer is seen.

        In backward it is with the forward that is computed again. Where copies between device and host take
        longer than computation, a layer takes longer as the step does.
        """
        timeline = self.timeline
        layer = np.array([_layer(name) for name in timeline.modules])[timeline.module]
        edges = np.flatnonzero((np.diff(layer) != 0) | (np.diff(timeline.phase) != 0)) + 1
        starts, ends = np.append(0, edges), np.append(edges, len(timeline) - 1)
        inside = layer[starts] >= 0
        spans = timeline.seconds[ends[inside]] - timeline.seconds[starts[inside]]
        return float(spans.max(initial=0.0)) * self.costs.seconds / self.costs.device_seconds

    def to_json(self) -> dict[str, Any]:
        """The plan's answers as plain values, without the timeline."""
        peak = self.peak
        return {
            "recipe": self.recipe.to_json(),
            "tokens": self.tokens,
            "ranks": self.ranks,
            "device_peak": self.device_peak,
            "start_peak": self.start.device,
            "host_peak": self.host_peak,
            "host_peak_per_node": self.host_peak_per_node,
            "fits": self.fits,
            "limit": self.limit,
            "peak": {"op": peak.op, "shapes": peak.shapes, "module": peak.module, "phase": peak.phase},
            "by_category": peak.by_category,
            "flops": self.costs.flops,
            "link_bytes": self.costs.link_bytes,
            "link_seconds": self.costs.link_seconds,
            "host_bytes": self.costs.host_bytes,
            "step_seconds": self.step_seconds,
            "notes": list(self.notes),
            "planning_seconds": self.planning_seconds,
        }


def plan(
    model: models.ModelLike,
    recipe: str | Recipe = "upipe",
    *,
    tokens: int | str,
    ranks: int,
    rows: int = 1,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ranks_per_node: int = 8,
    device: str = "h100",
    workspace: bool = True,
    **knobs: Any,
) -> Plan:
    """Plan one training step of ``rows`` rows of ``tokens`` tokens on ``ranks`` ranks; nothing is allocated.

    ``workspace`` adds what CUDA takes outside torch's view (``lab/planning/hardware.py``); off, the bytes are
    those that CPU ranks measure. ``device`` names the hardware of the time estimate. ``host_memory`` is per
    node. ``knobs`` are set on a ladder's recipe by hand.

    Raises:
        LabError: a model, recipe, size or device that cannot work.
    """
    start = time.perf_counter()
    length = parse_tokens(tokens)
    check_counts({"ranks": ranks, "rows": rows, "ranks_per_node": ranks_per_node})
    memory = [None if given is None else parse_bytes(given) for given in (device_memory, host_memory)]
    skeleton = fake_model(model)
    chosen = recipe_for(recipe, model, ranks, length, config=skeleton.config, **knobs)
    question = Question(
        model=model,
        recipe=chosen,
        tokens=length,
        ranks=ranks,
        rows=rows,
        ranks_per_node=ranks_per_node,
        device=device,
        workspace=workspace,
    )
    ring_rank, (timeline, costs) = _fullest(question, skeleton)
    return Plan(
        title=title_of(model, recipe, ranks, length),
        recipe=chosen,
        tokens=length,
        ranks=ranks,
        rows=rows,
        ranks_per_node=ranks_per_node,
        ring_rank=ring_rank,
        device=hardware(device).name,
        timeline=timeline,
        start=start_of(question, skeleton),
        costs=costs,
        device_memory=memory[0],
        host_memory=memory[1],
        notes=tuple(_notes(chosen, skeleton, length)) if workspace else (),
        planning_seconds=time.perf_counter() - start,
    )


def plan_ladder(
    model: models.ModelLike,
    *,
    tokens: int | str,
    ranks: int,
    watch: Callable[[str, Plan], None] | None = None,
    **settings: Any,
) -> dict[str, Plan]:
    """Plan every rung of the ladder, by name; ``settings`` are those of ``plan``, knobs as in ``ladder``.

    Raises:
        LabError: as ``plan``, and as ``lab.ladder``.
    """
    length = parse_tokens(tokens)
    knobs = {name: settings.pop(name) for name in BY_NAME if name in settings}
    rungs = ladder(model, ranks, length, config=fake_model(model).config, **knobs)
    plans = {}
    for rung, recipe in rungs.items():
        made = plan(model, recipe, tokens=length, ranks=ranks, **settings)
        plans[rung] = replace(made, title=title_of(model, rung, ranks, length))
        if watch is not None:
            watch(rung, plans[rung])
    return plans


def fake_model(model: models.ModelLike) -> PreTrainedModel:
    """The model without a byte of its parameters."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return models.build(model, weights=False)


def _notes(recipe: Recipe, model: PreTrainedModel, tokens: int) -> Iterator[str]:
    """What is to be known before this recipe runs on a GPU."""
    shape = shape_of(model.config)
    dtype = attention_dtype(recipe, model.dtype)
    if not runs_flash(dtype, shape.D):
        name = str(dtype).removeprefix("torch.")
        flash = runs_flash(torch.bfloat16, shape.D)
        yield (
            f"in {name} with head_dim={shape.D} attention runs as matrix products on CUDA, whose blocks of "
            "scores are not counted; "
            + ("compute_dtype='bfloat16' runs a flash kernel" if flash else "flash kernels take at most 256")
        )
        return
    yield f"the workspace of attention is that of torch's kernel; kernel={recipe.kernel!r} may take another"
    if recipe.kernel in ("auto", "torch"):
        refusal = torch_refusal(recipe, shape, tokens)
        if refusal is not None:
            yield refusal


def _fullest(question: Question, skeleton: PreTrainedModel) -> tuple[int, Step]:
    """The ring rank that holds the most device bytes, and its step; of equal ones, the first planned."""
    lengths = (len(parameter) for parameter in skeleton.parameters())
    steps = {
        ring_rank: whole_step(replace(question, ring_rank=ring_rank), skeleton)
        for ring_rank in ring_ranks(question.recipe, lengths)
    }
    return max(steps.items(), key=lambda planned: planned[1][0].device_peak)


def whole_step(question: Question, skeleton: PreTrainedModel) -> Step:
    """The step of the whole model, from disk if it was planned before; ``skeleton`` is the model, fake."""
    layers: nn.ModuleList = skeleton.model.layers
    alike = len({tuple(_shapes(layer)) for layer in layers}) == 1

    def make() -> Step:
        return _extended(question, len(layers)) if alike else fake_step(question, len(layers))

    if callable(question.model):
        # Its code is part of what the plan depends on, and nothing that could be looked up.
        return make()
    # What is no plain value (a recipe, a dtype) enters by its text.
    facts = {**vars(question), "model": [skeleton.config.to_dict(), [*_shapes(skeleton)]]}
    return remembered(facts, make)


def _extended(question: Question, layers: int) -> Step:
    if layers > DEEP:
        (shallow, less), (deep, more) = (fake_step(question, depth) for depth in (SHALLOW, DEEP))
        timeline = extended(shallow, deep, layers)
        if timeline is not None:
            return timeline, more + (more + less * -1) * (layers - DEEP)
    return fake_step(question, layers)


def _layer(path: str) -> int:
    """The number of the layer that a module is or lies in; -1 outside of all."""
    found = re.match(r"model\.layers\.(\d+)", path)
    return int(found[1]) if found else -1


def _shapes(module: nn.Module) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    return ((name, p.shape, p.dtype) for name, p in module.named_parameters())
