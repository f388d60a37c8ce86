"""A step that is extrapolated from five and six layers is the step of all layers, in every row."""

import numpy as np
import pytest
from torch import nn
from transformers import LlamaForCausalLM, PretrainedConfig

import lab
from lab.planning import plan as planning
from lab.planning.extrapolation import extrapolate
from lab.planning.fake_step import fake_step
from lab.recipe.jobs import Job, Machine, make_job
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

    def walked(job, machine, layers, **of_ring):
        depths.append(layers)
        return fake_step(job, machine, layers, **of_ring)

    monkeypatch.setattr(planning, "fake_step", walked)
    return depths


WALKED = {"plain": True, "fsdp": False, "checkpoint": False, "offload": True, "upipe": True, "fast": False}
"""Recipes, and whether the workspace is planned too: the meter's own bytes are among what is extrapolated.

The two rungs that are left out add no rows of their own: "checkpoint" has the exchanges of "ulysses", and
"upipe" the tiles of "tiling".
"""


@pytest.mark.slow
@pytest.mark.parametrize("rung", WALKED)
def test_nine_layers_are_those_walked_in_full(walks, rung):
    workspace = WALKED[rung]
    job, machine = asked(rung, workspace)
    plan = lab.plan(config(), job.recipe, tokens=TOKENS, ranks=RANKS, workspace=workspace)
    assert walks == [5, 6]
    whole, costs = fake_step(job, machine, 9)
    for name, said in columns(plan.timeline).items():
        assert said == columns(whole)[name], name
    np.testing.assert_allclose(plan.timeline.seconds, whole.seconds, rtol=1e-9)
    for number in ("flops", "link_bytes", "host_bytes"):
        assert getattr(plan.costs, number) == getattr(costs, number)
    assert plan.costs.device_seconds == pytest.approx(costs.device_seconds, rel=1e-9)
    assert plan.costs.host_seconds == pytest.approx(costs.host_seconds, rel=1e-9)


def columns(timeline):
    return {
        "op": [timeline.ops[i].name for i in timeline.op],
        "module": [timeline.modules[i] for i in timeline.module],
        "phase": [timeline.phases[i] for i in timeline.phase],
        "device": timeline.device.tolist(),
        "host": timeline.host.tolist(),
        "step": timeline.step.tolist(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "walked"), [(1, [1]), (6, [6]), (7, [5, 6])])
def test_few_layers_are_walked(walks, layers, walked):
    plan = lab.plan(config(layers), "plain", tokens=TOKENS, ranks=RANKS)
    assert walks == walked
    held = {name for name in plan.timeline.modules if name.count(".") == 2 and "layers" in name}
    assert held == {f"model.layers.{i}" for i in range(layers)}


def one_wider(wide: int | None):
    def make():
        model = LlamaForCausalLM._from_config(config(7), attn_implementation="sdpa")
        if wide is not None:
            mlp = model.model.layers[wide].mlp
            mlp.gate_proj, mlp.up_proj = (nn.Linear(48, 96, bias=False) for _ in range(2))
            mlp.down_proj = nn.Linear(96, 48, bias=False)
        return model

    return make


@pytest.mark.slow
def test_layers_that_differ_are_walked_in_full(walks):
    alike = lab.plan(one_wider(None), "plain", tokens=TOKENS, ranks=RANKS, compute_dtype=None)
    assert walks == [5, 6]
    for wide in (0, 3, 6):  # the last is in neither of the two that are walked where layers are alike
        walks.clear()
        plan = lab.plan(one_wider(wide), "plain", tokens=TOKENS, ranks=RANKS, compute_dtype=None)
        assert walks == [7]
        assert plan.costs.flops - alike.costs.flops == 6 * TOKENS * 3 * 48 * 24


@pytest.mark.slow
def test_steps_that_do_not_correspond_are_not_extrapolated(walks, monkeypatch):
    (shallow, _), (deep, _) = fake_step(*asked("plain"), 5), fake_step(*asked("checkpoint"), 6)
    assert extrapolate(shallow, deep, 9) is None
    monkeypatch.setattr(planning, "extrapolate", lambda *_: None)
    plan = lab.plan(config(7), "plain", tokens=TOKENS, ranks=RANKS, rows=3)
    assert walks == [5, 6, 7]
    assert "model.layers.6.mlp" in plan.timeline.modules
