"""Who holds the bytes: the storages of every rung add up to the timeline, walked or extrapolated."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import lab
from lab.commands.cli import main
from lab.errors import ResultError
from lab.memory.categories import CATEGORIES
from lab.memory.holders import Holder
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.models import config_of
from lab.planning import fake_step, plan
from lab.planning.cuda_workspace import cuda_workspace
from lab.planning.shrinking import knob_for
from lab.recipe.jobs import Job
from lab.recipe.ladder import RECIPE_NAMES, resolve_recipe
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config

FP32 = 4


def job_of(recipe: str, layers: int) -> Job:
    """Four ranks; every axis and every quotient differs."""
    model = small_config(num_hidden_layers=layers, num_attention_heads=24, vocab_size=104)
    return Job(model, resolve_recipe(recipe, model, 4, 64), 64, 4)


def step_of(recipe: str, layers: int, *, workspace: bool = False) -> tuple[Timeline, np.ndarray]:
    """A planned step with all its layers walked, and the bytes that the meter counted row by row."""
    meters: list[Meter] = []

    class Recorded(Meter):
        def __init__(self, **settings: object) -> None:
            super().__init__(**settings)  # type: ignore[arg-type]
            meters.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_step, "Meter", Recorded)
        timeline = fake_step.fake_step(job_of(recipe, layers), layers, workspace=workspace).timeline
    counted = meters[0].rows.since()
    return timeline, np.column_stack((counted.device.sum(axis=1), counted.host))


@pytest.mark.parametrize("recipe", mostly_long(RECIPE_NAMES, RECIPE_NAMES.index("upipe")))
def test_the_holders_add_up_to_the_bytes_at_every_row(recipe: str) -> None:
    timeline, counted = step_of(recipe, 2)
    assert np.array_equal(np.column_stack((timeline.total, timeline.host)), counted)
    for at in ("peak", "forward", *timeline.seconds[:: len(timeline) // 7].tolist()):
        for memory in ("device", "host"):
            holders = timeline.holders(at, memory=memory)
            total = holders.moment.device if memory == "device" else holders.moment.host
            assert sum(h.bytes for h in holders) == holders.total == total
            assert holders.unheld == 0


def test_what_no_tensor_holds_is_the_workspace() -> None:
    with_workspace, _ = step_of("upipe", 2, workspace=True)
    holders = with_workspace.holders("forward")
    assert holders.unheld == holders.moment.by_category["other"] == cuda_workspace(4).fixed > 0


# ---- categories ------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """x [11, 5] -> silu(x W1^T) W2^T; a temporary buffer in forward, and one in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(self.first(x))
        h.detach().exp().sum()
        return self.second(h)


def test_each_tensor_has_the_category_of_what_becomes_of_it() -> None:
    model, meter = Layers(), Meter()
    x = torch.randn(11, 5)
    with meter.measure(model):
        with meter.phase("forward"):
            loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()
        with meter.phase("backward"):
            loss.backward()
    timeline = meter.timeline()
    storages = timeline.storages
    made = {
        (timeline.phases[phase], storages.kinds[kind].op.removeprefix("aten."), CATEGORIES[category])
        for phase, kind, category in zip(storages.phase, storages.kind, storages.category, strict=True)
    }
    assert ("forward", "exp", "temporary buffers") in made
    assert ("forward", "mm", "activations") in made
    assert ("backward", "exp", "temporary buffers") in made
    assert ("backward", "mm", "recomputed activations") in made
    assert ("backward", "silu", "recomputed activations") in made
    assert ("backward", "mm", "gradients of activations") in made
    assert ("backward", "mm", "gradients") in made
    assert ("backward", "silu_backward", "gradients of activations") in made
    gradients = [h for h in timeline.holders("backward") if h.category == "gradients"]
    assert [(h.name, h.shape, h.bytes) for h in gradients] == [
        ("first.weight", (7, 5), 35 * FP32),
        ("second.weight", (3, 7), 21 * FP32),
    ]


# ---- questions with a name, and refusals -----------------------------------------------------------------


@pytest.fixture(scope="module")
def planned() -> plan.Plan:
    return lab.plan("tiny", "checkpoint", tokens=640, ranks=2, workspace=False)


def test_named_questions(planned: plan.Plan) -> None:
    timeline = planned.timeline
    forward = timeline.rows([timeline.phases[p] == "forward" for p in timeline.phase])
    assert timeline.end_of("forward") == forward.moment(-1)
    assert timeline.highest(phase="forward").device == forward.device_peak
    in_mlp = [timeline.modules[m].startswith("model.layers.1.mlp") for m in timeline.module]
    assert timeline.highest(module="model.layers.1.mlp").device == timeline.rows(in_mlp).device_peak
    # A checkpointed layer keeps its output, the input of the next: 320 tokens per rank.
    kept = timeline.holders("forward").made_by(module="model.layers.1", phase="forward")
    assert [(h.shape, h.bytes) for h in kept if h.category == "activations"] == [
        ((1, 320, config_of("tiny").hidden_size), 320 * config_of("tiny").hidden_size * FP32)
    ]
    # A first step leaves what the second starts with: its gradients are set to none, the states were there.
    grown = timeline.holders("optimizer").made_by(step=0)
    assert {h.step for h in grown} == {0}
    assert grown.total == sum(h.bytes for h in grown) <= timeline.moment(-1).device


def test_holders_of_a_job_are_in_units_of_a_hidden_state_and_name_a_knob(planned: plan.Plan) -> None:
    hidden = 320 * config_of("tiny").hidden_size * FP32
    holders = planned.holders("forward")
    assert all(h.units == h.bytes / hidden for h in holders)
    inputs = [h for h in holders if h.category == "activations" and h.units == 1]
    inputs = [h for h in inputs if h.module.startswith("model.layers")]
    assert {h.knob for h in inputs} == {"offload='inputs'"}
    whole = replace(planned.job, recipe=replace(planned.recipe, fsdp=False))
    weight = next(h for h in holders if h.category == "parameters" and h.phase == "start")
    assert knob_for(weight, planned.job) == "more ranks"
    assert knob_for(weight, whole) == "fsdp=true"
    assert knob_for(weight, replace(whole, ranks=1)) == "fsdp=true on more ranks"
    grouped = holders.grouped()
    assert sum(h.bytes for h in grouped) == sum(h.bytes for h in holders)
    assert sum(h.count for h in grouped) == len(holders) > len(grouped)
    line = next(line for line in holders.table(99).splitlines() if "offload" in line)
    assert f"{len(inputs)} x  activations" in line


@pytest.mark.long
def test_a_tied_head_has_the_name_of_the_embedding() -> None:
    config = small_config(tie_word_embeddings=True)
    for recipe in ("plain", "fsdp"):
        holders = lab.plan(config, recipe, tokens=64, ranks=2, workspace=False).holders("forward")
        tables = [h for h in holders if h.category == "parameters" and h.shape[-1:] == (config.hidden_size,)]
        assert {h.name for h in tables if h.shape[0] > config.hidden_size} >= {"model.embed_tokens.weight"}
        assert not [h for h in holders if h.name == "*"]


def test_a_timeline_with_its_storages_is_the_same_after_json(planned: plan.Plan) -> None:
    again = Timeline.from_json(json.dumps(planned.timeline.to_json()))
    assert again.to_json() == planned.timeline.to_json()
    assert (again.peak, again.holders().items) == (planned.timeline.peak, planned.timeline.holders().items)
    old = {name: value for name, value in again.to_json().items() if name != "storages"}
    with pytest.raises(ResultError, match=r"^this timeline is of an earlier version of the lab"):
        Timeline.from_json(old)


@pytest.mark.parametrize(
    ("rows", "tile", "shape", "knob"),
    [
        (3, 16, (3, 16, 48), "a smaller mlp_tile"), (3, 16, (48, 72), "a smaller mlp_tile"),
        # All the rank's tokens, with the rows apart and as one axis; and a gradient of a weight.
        (3, 16, (3, 64, 48), "more ranks"), (3, 16, (192, 72), "more ranks"), (3, 16, (72, 48), ""),
        (3, 64, (3, 64, 48), "a smaller mlp_tile"), (3, None, (3, 64, 48), "set mlp_tile"),
        # The rank has as many tokens of a row as a hidden state has features.
        (1, 16, (1, 16, 64), "a smaller mlp_tile"),
    ],
)  # fmt: skip
def test_a_smaller_tile_is_for_what_has_the_tokens_of_a_tile(
    rows: int, tile: int | None, shape: tuple[int, ...], knob: str
) -> None:
    model = small_config(hidden_size=64, num_attention_heads=16, num_key_value_heads=8)
    recipe = replace(resolve_recipe("tiling", model, 2, 128, ulysses=2), mlp_tile=tile)
    module = "model.layers.1.mlp.up_proj"
    held = Holder(
        1, 1, "temporary buffers", shape, "float32", "", "aten.mm", module, "backward", 0, 0.0, None
    )
    assert knob_for(held, Job(model, recipe, 128, 2, rows=rows)) == knob


def test_the_command_lists_what_the_plan_holds(planned: plan.Plan) -> None:
    command = "plan tiny --recipe checkpoint --tokens 640 --ranks 2 --no-workspace --holders 3"
    held = json.loads(CliRunner().invoke(main, [*command.split(), "--json"]).output)["held"]
    whole = planned.holders().grouped()
    assert (held["total"], held["unheld"], held["memory"]) == (whole.total, 0, "device")
    assert [h["bytes"] for h in held["holders"]] == [h.bytes for h in whole.items[:3]]
    text = CliRunner().invoke(main, command.split()).output
    assert planned.holders().table(3) in text


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda t: t.holders(1e9), r"^at=1000000000.0 is outside this timeline, which goes from"),
        (lambda t: t.holders(float("nan")), r"^at=nan is outside this timeline"),
        (lambda t: t.holders(-1e-9), r"^at=-1e-09 is outside this timeline"),
        (lambda t: t.holders("sideways"), r"^no row is of phase 'sideways'; there are the phases forward, "),
        (
            lambda t: t.highest(module="model.layers.77", phase="forward"),
            r"^no row is of module 'model.layers.77' and phase 'forward'",
        ),
        (lambda t: t.end_of("forward", 5), r"^no row is of phase 'forward' and step 5; .* and the steps 0$"),
        (lambda t: t.holders(memory="Host"), r"^memory='Host': use 'device', 'host' or 'disk'$"),
        (lambda t: t.take(np.arange(0)).holders(), r"^this timeline has no rows: nothing was measured$"),
        (lambda t: t.take(np.arange(0)).holders(0.0), r"^this timeline has no rows"),
        (
            lambda t: t.take(np.arange(3)).holders(),
            r"^this timeline has no storages: those of a run that was st",
        ),
    ],
)
def test_questions_without_an_answer_are_refused(planned: plan.Plan, ask, says) -> None:
    with pytest.raises(ResultError, match=says):
        ask(planned.timeline)
