"""A step that is extrapolated from a few layers is the step of all layers, in every row and storage."""

import gc
from collections import defaultdict
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
from torch import nn
from transformers import LlamaForCausalLM, PretrainedConfig

import lab
from lab import models
from lab.decoder import kinds_of
from lab.errors import LabError
from lab.memory.timeline import Timeline
from lab.planning import plan as planning
from lab.planning import whole_step
from lab.planning.costs import Costs
from lab.planning.extrapolation import depths_to_walk, extrapolate
from lab.planning.fake_step import fake_step
from lab.recipe.jobs import Job, Machine, make_job
from lab_tests.support import reference
from lab_tests.support.costs import walked
from lab_tests.support.models import small_config

TOKENS, RANKS = 120, 2


def config(layers: int = 9) -> PretrainedConfig:
    return small_config(num_hidden_layers=layers, vocab_size=104)


def asked(rung: str, workspace: bool = False) -> tuple[Job, Machine]:
    # s = 60: two tiles of 45, a second of 15 tokens.
    knobs = {"mlp_tile": 45, "norm_tile": 45, "loss_tile": 45} if rung in ("upipe", "fast") else {}
    if knobs:
        knobs["head_chunk"] = 6
    return make_job(config(), rung, tokens=TOKENS, ranks=RANKS, **knobs), Machine(workspace=workspace)


@pytest.fixture
def walks(monkeypatch) -> list[int]:
    """How many layers each walk had."""
    depths = []

    def recorded(job, layers, **settings):
        depths.append(layers)
        return fake_step(job, layers, **settings)

    monkeypatch.setattr(whole_step, "fake_step", recorded)
    return depths


WALKED = {
    "plain": (16, True),
    "fsdp": (9, False),
    "checkpoint": (9, False),
    "offload": (9, True),
    "upipe": (9, True),
    "fast": (9, False),
}
"""Recipes, their layers, and whether the workspace is planned too: the meter's own bytes are among the rest.

With 16 layers the norms of all gradients take two blocks of the allocator; those of few layers take one.
The two rungs that are left out add no rows of their own: "checkpoint" has the exchanges of "ulysses", and
"upipe" the tiles of "tiling".
"""


@pytest.mark.long
@pytest.mark.parametrize("rung", WALKED)
def test_layers_are_those_walked_in_full(walks, rung):
    layers, workspace = WALKED[rung]
    job, machine = asked(rung, workspace)
    plan = lab.plan(config(layers), job.recipe, tokens=TOKENS, ranks=RANKS, workspace=workspace)
    assert walks == [2, 5]
    check(plan, *walked(plan.job, machine, layers))


SEGMENTS = {
    "long, kept attention, one layer at the end": (11, "long", {"segment": 2, "offload": "attention"}),
    "streamed, a segment runs again in the first layers": (12, "streamed", {"segment": 3}),
    "fp32 without FSDP, one layer at the end": (
        13, "streamed", {"segment": 4, "offload": "attention", "fsdp": False, "compute_dtype": None},
    ),
}  # fmt: skip
"""The layers, the recipe and its knobs."""


@pytest.mark.long
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_are_those_walked_in_full(walks, name):
    layers, rung, knobs = SEGMENTS[name]
    # s = 60: two tiles, the second of them shorter; one stage of all heads.
    knobs = {"head_chunk": 12, "stream": 45, "loss_tile": 60, "attention_tile": None, **knobs}
    recipe = make_job(config(layers), rung, tokens=TOKENS, ranks=RANKS, **knobs).recipe
    plan = lab.plan(config(layers), recipe, tokens=TOKENS, ranks=RANKS)
    k = recipe.segment
    assert len(walks) == walks[0] == 2
    assert k + 4 <= walks[1] < 2 * k + 4
    assert (layers - walks[1]) % k == 0
    whole, costs = walked(plan.job, plan.machine, layers)
    check(plan, whole, costs)
    on_disk, whole_on_disk = plan.timeline.with_tiles_on_disk(), whole.with_tiles_on_disk()
    assert on_disk.disk.tolist() == whole_on_disk.disk.tolist()
    assert on_disk.host.tolist() == whole_on_disk.host.tolist()


MIXED = {
    "plain": (16, {}, [3, 10]),
    "upipe": (14, {"head_chunk": 12, "mlp_tile": 45, "norm_tile": 45, "loss_tile": 45}, [3, 8]),
    "streamed": (23, {"head_chunk": 24, "stream": 60, "loss_tile": 60, "segment": 2}, [6, 11]),
}
"""A recipe, its knobs, the layers of the model, and those of the two walks."""


@pytest.mark.long
@pytest.mark.parametrize("rung", MIXED)
def test_layers_of_several_kinds_repeat_after_their_period(walks, rung):
    layers, knobs, depths = MIXED[rung]
    pattern = ["sliding_attention", "sliding_attention", "full_attention"] * layers
    mixed = reference.config("gemma3_text", 24, 6, layers, layer_types=pattern[:layers], sliding_window=13)
    recipe = make_job(mixed, rung, tokens=TOKENS, ranks=RANKS, **knobs).recipe
    plan = lab.plan(mixed, recipe, tokens=TOKENS, ranks=RANKS)
    assert walks == depths
    check(plan, *walked(plan.job, plan.machine, layers))
    # A model of one kind more at the end has no period, and is walked whole.
    pattern[layers - 1] = "full_attention" if pattern[layers - 1] != "full_attention" else "sliding_attention"
    odd = reference.config("gemma3_text", 24, 6, layers, layer_types=pattern[:layers], sliding_window=13)
    assert depths_to_walk(kinds_of(models.build(odd)), 1).deep > layers


@pytest.mark.long
@pytest.mark.parametrize("rung", ["plain", "checkpoint"])
def test_micro_batches_are_those_walked_in_full(walks, rung):
    job, machine = make_job(config(), rung, tokens=TOKENS, ranks=RANKS, accumulate=2), Machine()
    plan = planning.plan_job(job, machine)
    assert walks == [2, 5]
    check(plan, *walked(job, machine, 9))


def check(plan: planning.Plan, whole: Timeline, costs: Costs) -> None:
    """Compare a plan with the walk of all layers."""
    for name, said in columns(plan.timeline).items():
        assert said == columns(whole)[name], name
    assert storages(plan.timeline) == storages(whole)
    np.testing.assert_allclose(plan.timeline.seconds, whole.seconds, rtol=1e-9)
    for number, of_all in asdict(costs).items():
        assert getattr(plan.costs, number) == pytest.approx(of_all, rel=1e-9), number
        assert not isinstance(of_all, int) or getattr(plan.costs, number) == of_all, number


def columns(timeline):
    return {
        "op": [timeline.ops[i].name for i in timeline.op],
        "module": [timeline.modules[i] for i in timeline.module],
        "phase": [timeline.phases[i] for i in timeline.phase],
        "device": timeline.device.tolist(),
        "host": timeline.host.tolist(),
        "step": timeline.step.tolist(),
    }


def storages(timeline):
    """All that is known of each storage but the time, which the rows have."""
    held, moves = timeline.storages, defaultdict(list)
    for entry, row, written in held.moves.tolist():
        moves[entry].append((row, written))
    columns = (held.first, held.end, held.size, held.category, held.step)
    return sorted(
        (*numbers, held.kinds[kind], timeline.modules[module], timeline.phases[phase], moves[i])
        for i, (*numbers, kind, module, phase) in enumerate(
            np.stack((*columns, held.kind, held.module, held.phase), axis=1).tolist()
        )
    )


@pytest.mark.long
@pytest.mark.parametrize(("layers", "walked"), [(1, [1]), (7, [7]), (8, [2, 5])])
def test_few_layers_are_walked(walks, layers, walked):
    plan = lab.plan(config(layers), "plain", tokens=TOKENS, ranks=RANKS)
    assert walks == walked
    held = {name for name in plan.timeline.modules if name.count(".") == 2 and "layers" in name}
    assert held == {f"model.layers.{i}" for i in range(layers)}


def one_wider(wide: int | None):
    def make():
        model = LlamaForCausalLM._from_config(config(8), attn_implementation="sdpa")
        if wide is not None:
            mlp = model.model.layers[wide].mlp
            mlp.gate_proj, mlp.up_proj = (nn.Linear(48, 96, bias=False) for _ in range(2))
            mlp.down_proj = nn.Linear(96, 48, bias=False)
        return model

    return make


@pytest.mark.long
def test_layers_that_differ_are_walked_in_full(walks):
    alike = lab.plan(one_wider(None), "plain", tokens=TOKENS, ranks=RANKS, compute_dtype=None)
    assert walks == [2, 5]
    for wide in (0, 3, 7):  # the last is in neither of the two that are walked where layers are alike
        walks.clear()
        plan = lab.plan(one_wider(wide), "plain", tokens=TOKENS, ranks=RANKS, compute_dtype=None)
        assert walks == [8]
        assert plan.costs.flops - alike.costs.flops == 6 * TOKENS * 3 * 48 * 24


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_rests_during_a_plan_and_is_as_before_after_one_that_fails(monkeypatch, was_on):
    seen = []

    def fails(*_, **__):
        seen.append(gc.isenabled())
        raise LabError("no step")

    monkeypatch.setattr(whole_step, "fake_step", fails)
    try:
        if not was_on:
            gc.disable()
        with pytest.raises(LabError, match="no step"):
            planning.plan_job(*asked("plain"))
        assert (seen, gc.isenabled()) == ([False], was_on)
    finally:
        gc.enable()


@pytest.mark.long
def test_steps_that_do_not_correspond_are_not_extrapolated(walks, monkeypatch):
    (job, machine), other = asked("plain"), asked("checkpoint")
    extrapolated = partial(extrapolate, depths=depths_to_walk([None] * 9, 1))
    shallow, deep = (fake_step(job, layers, workspace=machine.workspace) for layers in (2, 5))
    assert extrapolated(shallow, deep) is not None
    assert extrapolated(shallow, fake_step(other[0], 5, workspace=False)) is None
    # One storage is larger: in a repeated layer, in a layer that is not repeated, and outside the layers.
    for walk, module in ((deep, "model.layers.2.mlp.up_proj"), (deep, "model.layers.4"), (shallow, "")):
        held, modules = walk.timeline.storages, walk.timeline.modules
        larger = held.size.copy()
        larger[np.flatnonzero(held.module == modules.index(module))[0]] += 8
        changed = walk._replace(timeline=replace(walk.timeline, storages=replace(held, size=larger)))
        assert extrapolated(*(changed if one is walk else one for one in (shallow, deep))) is None, module
    monkeypatch.setattr(whole_step, "extrapolate", lambda *_: None)
    plan = lab.plan(config(8), "plain", tokens=TOKENS, ranks=RANKS, rows=3)
    assert walks == [2, 5, 8]
    assert "model.layers.7.mlp" in plan.timeline.modules
