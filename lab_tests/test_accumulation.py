"""A step of several micro-batches is the step of one batch with all their rows: loss, gradients, bytes."""

from dataclasses import replace
from functools import cache
from itertools import count

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lab
from lab import models
from lab.errors import LabError
from lab.memory import stopwatch
from lab.memory.timeline import Timeline
from lab.planning import whole_step
from lab.planning.allocator import simulate
from lab.planning.hardware import hardware
from lab.planning.micro_batches import WALKED, with_micro_batches
from lab.planning.plan import plan_job
from lab.recipe.jobs import Machine, make_job
from lab.recipe.ladder import resolve_recipe
from lab.recipe.recipe import Recipe
from lab.step.training_step import NoMeter, make_optimizer
from lab_tests.proofs import cases
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config
from lab_tests.support.reference import error, exact_rotary

ROWS, TOKENS, LENGTHS = 4, 40, (40, 23, 31, 17)
"""The tokens of each row; what follows them is padding, so that the mean of the rows' means is another."""

RECIPES = {
    "plain": resolve_recipe("plain", small_config(), 4, TOKENS, compute_dtype=None),
    "replicas of shards": Recipe(compute_dtype="float64"),
    "upipe": resolve_recipe("upipe", small_config(), 4, TOKENS, compute_dtype=None),
    "long": resolve_recipe("long", small_config(), 4, TOKENS, compute_dtype=None),
    "streamed, a ring": Recipe(fsdp=True, ring=2, ulysses=2, checkpoint=True, offload="inputs", stream=7),
}
"""In segments with the optimizer on the host, gradients are summed there; without FSDP, by hooks."""


def model() -> torch.nn.Module:
    return models.build(small_config(num_hidden_layers=3)).double().train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 101, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    return ids, (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]).long()


@cache
def of_one_batch() -> tuple[float, dict[str, torch.Tensor]]:
    """Plain transformers, plain torch, one process: the mean over the labels of all rows."""
    plain, (ids, mask) = exact_rotary(model()), batch()
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        plain(input_ids=ids).logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100
    )
    loss.backward()
    return loss.item(), {name: p.grad for name, p in plain.named_parameters()}


def step_on_rank(recipe: Recipe, rows: tuple[tuple[int, ...], ...]):
    """Runs on every rank: one step of micro-batches of these rows; its loss and its gradients."""
    mesh, decoder, (ids, mask) = init_device_mesh("cpu", (dist.get_world_size(),)), model(), batch()
    lab.apply_recipe(decoder, recipe, mesh)
    optimizer, gradients = make_optimizer(decoder, learning_rate=1e-3), {}

    def keep(*_):
        for name, p in decoder.named_parameters():
            gradients[name] = getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()

    optimizer.register_step_pre_hook(keep)
    batches = [lab.shard_batch(ids[list(of)], recipe, mesh, attention_mask=mask[list(of)]) for of in rows]
    loss = lab.train_step(decoder, optimizer, *batches, meter=NoMeter(), clip_norm=torch.inf)
    return loss.item(), gradients


@pytest.mark.parametrize("name", mostly_long(RECIPES, 2))
def test_micro_batches_have_the_loss_and_the_gradients_of_one_batch(ranks4, name):
    loss, expected = of_one_batch()
    for found, gradients in ranks4.apply(step_on_rank, RECIPES[name], ((2, 1), (0,), (3,))):
        assert found == pytest.approx(loss, rel=1e-13)
        assert error(gradients, expected) < 1e-12


@pytest.mark.long
def test_the_tokens_are_those_of_one_batch(ranks4, digits):
    """``rows=1, accumulate=3`` sees the data of ``rows=3``, in each of the steps."""
    size = {"tokens": TOKENS, "text": digits, "cluster": ranks4, "steps": 3}
    one = lab.run(small_config(), Recipe(fsdp=True, ulysses=2), rows=3, **size)
    several = lab.run(small_config(), Recipe(fsdp=True, ulysses=2), rows=1, accumulate=3, **size)
    assert several.losses == pytest.approx(one.losses, rel=1e-6)
    assert len({f"{loss:.4f}" for loss in one.losses}) == 3


UPIPE = Recipe(
    fsdp=True, ulysses=2, head_chunk=8, checkpoint=True, offload="inputs",
    mlp_tile=96, norm_tile=112, loss_tile=104,
)  # fmt: skip
PLANNED = {
    "replicas": (Recipe(), 1, 3, 3, 2),
    "fsdp": (Recipe(fsdp=True), 2, 1, 2, 2),
    "upipe, extrapolated": (replace(UPIPE, head_chunk=12), 8, 1, 2, 1),
    "segments, optimizer on the host": (
        replace(UPIPE, head_chunk=None, mlp_tile=None, stream=96, segment=2, optimizer="host"), 3, 1, 2, 1,
    ),
}  # fmt: skip
"""The recipe, the layers, the rows of a micro-batch, the micro-batches, and the steps."""


def answers(timeline: Timeline) -> list[object]:
    """The peaks of each phase of each micro-batch, and of the step."""
    edges = np.flatnonzero(np.diff(timeline.phase)) + 1
    parts = [timeline.take(rows) for rows in np.split(np.arange(len(timeline)), edges)]
    phases = [(part.phases[part.phase[0]], part.device_peak, part.host_peak) for part in parts]
    return [phases, timeline.device_peak, timeline.host_peak, str(timeline.peak), timeline.peak.by_category]


@pytest.mark.long
@pytest.mark.parametrize("name", PLANNED)
def test_planned_bytes_are_measured_bytes(ranks4, digits, name):
    recipe, layers, rows, accumulate, steps = PLANNED[name]
    config = small_config(num_attention_heads=24, vocab_size=104, num_hidden_layers=layers)
    size = {"tokens": 250, "rows": rows}
    run = lab.run(config, recipe, text=digits, cluster=ranks4, steps=steps, accumulate=accumulate, **size)
    job = make_job(config, recipe, ranks=4, accumulate=accumulate, **size)
    planned = answers(plan_job(job, Machine(workspace=False)).timeline)
    for timeline in run.timelines:
        assert [answers(timeline.rows(timeline.step == step)) for step in range(steps)] == [planned] * steps
    assert [phase for phase, *_ in planned[0]] == ["forward", "backward"] * accumulate + ["optimizer"]
    # The first micro-batch begins without gradients.
    assert planned[0][2][1] > planned[0][0][1]


MANY = {
    "shards": {"recipe": "fsdp", "rows": 4},
    "upipe, overlap": {"recipe": "upipe", "overlap": True},
    "documents": {"recipe": "streamed", "documents": "1K,3K"},
    "rows, adapters, optimizer on the host": {
        "recipe": "offload", "rows": 4, "lora": "r=4", "optimizer": "host"
    },
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_long(MANY, 0))
def test_the_plan_of_many_micro_batches_is_that_of_all(monkeypatch, name):
    """The code of four runs, and the third stands for three. Seen red: work or tokens of one less."""
    job, machine = make_job("tiny", tokens=4096, ranks=4, accumulate=6, **MANY[name]), Machine()
    plans = []
    for walked in (99, WALKED):
        monkeypatch.setattr(whole_step, "WALKED", walked)
        step = whole_step.walk(job, workspace=True).steps[0]
        timeline, costs = step.priced(hardware("h100"), machine, job.ranks)
        plans.append((timeline, costs, simulate(timeline)))
    (every, costs, allocator), (few, of_few, of_few_allocator) = plans
    assert len(few) < len(every) * 5 / 6
    told, of_few_told = (cases.answers(timeline) for timeline in (every, few))
    assert of_few_told | {"collectives": None} == told | {"collectives": None}
    assert (of_few_allocator.reserved, of_few_allocator.allocated_peak) == (
        allocator.reserved, allocator.allocated_peak
    )  # fmt: skip
    assert (costs.flops, costs.link_bytes, costs.host_bytes) == (
        of_few.flops, of_few.link_bytes, of_few.host_bytes
    )  # fmt: skip
    assert of_few.seconds == pytest.approx(costs.seconds, rel=1e-3)


def test_a_model_whose_micro_batches_differ_is_planned_in_whole():
    step = whole_step.walk(make_job("tiny", "fsdp", tokens=1024, ranks=2, accumulate=4), workspace=True)
    few = step.steps[0]
    last = np.flatnonzero(np.diff(few.timeline.phase))[-2] + 1
    module = few.timeline.module.copy()
    module[last] += 1
    assert with_micro_batches(few, 7) is not None
    assert with_micro_batches(few._replace(timeline=replace(few.timeline, module=module)), 7) is None


@pytest.mark.parametrize("accumulate", [0, True, 2.5])
def test_a_number_of_micro_batches_that_is_none_is_refused(accumulate):
    with pytest.raises(LabError, match=r"accumulate=.*whole number"):
        lab.plan("tiny", "fsdp", tokens=1024, ranks=2, accumulate=accumulate)


@pytest.mark.long
def test_a_rehearsal_takes_the_time_of_all_micro_batches(monkeypatch):
    """By a clock that ticks when it is read: each phase of each micro-batch takes a second."""
    monkeypatch.setattr(stopwatch, "_now", count().__next__)
    one, three = (
        lab.rehearse("tiny", "fsdp", tokens=256, ranks=2, accumulate=number, steps=0, machine="cpu")
        for number in (1, 3)
    )
    assert three.plan_over_measured == 1
    assert one.seconds == {"forward": 1, "backward": 1, "optimizer": 1}
    assert three.seconds == {"forward": 3, "backward": 3, "optimizer": 1}
    assert three.job.step_rows == 3
