"""Steps on real ranks follow the dense model. Their gradients are in the table of cases."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lab
from lab import models
from lab.recipe.ladder import resolve_recipe
from lab.step.training_step import NoMeter, make_optimizer
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config

ROWS, TOKENS = 3, 40
LEARNING_RATE = 1e-3


def small():
    return small_config(num_hidden_layers=3)


def rung(name: str):
    return resolve_recipe(name, small(), 4, TOKENS, compute_dtype=None)


def ids(step: int = 0) -> torch.Tensor:
    return torch.randint(0, 101, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))


def sharded_model(recipe, ranks):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert dist.get_world_size() == ranks
    model = models.build(small()).train()
    lab.apply_recipe(model, recipe, mesh)
    return model, mesh


def losses_on_rank(recipe, steps):
    model, mesh = sharded_model(recipe, 4)
    optimizer = make_optimizer(model, learning_rate=LEARNING_RATE)
    batches = (lab.shard_batch(ids(step), recipe, mesh) for step in range(steps))
    return [lab.train_step(model, optimizer, b, meter=NoMeter(), clip_norm=0.1).item() for b in batches]


def dense_losses(steps: int):
    """Plain transformers, plain torch, one process: the reference."""
    model = models.build(small()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=ids(step)).logits[:, :-1].flatten(0, 1), ids(step)[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", mostly_long(["plain", "streamed"], 1))
def test_four_clipped_steps_follow_the_dense_model(ranks4, name):
    expected = dense_losses(4)
    for losses in ranks4.apply(losses_on_rank, rung(name), 4):
        assert losses == pytest.approx(expected, rel=1e-5)


def two_losses(recipe, evaluated):
    model, mesh = sharded_model(recipe, 4)
    batch = lab.shard_batch(ids(), recipe, mesh)
    if evaluated:
        with torch.no_grad():
            lab.loss(model, batch)
    optimizer = make_optimizer(model, learning_rate=LEARNING_RATE)
    return [lab.train_step(model, optimizer, batch, meter=NoMeter(), clip_norm=0.1).item() for _ in range(2)]


def test_an_evaluation_before_the_optimizer_is_made_changes_nothing(ranks4):
    recipe = rung("fsdp")
    assert ranks4.apply(two_losses, recipe, True) == ranks4.apply(two_losses, recipe, False)


def test_the_first_step_weighs_as_much_as_every_other():
    model = models.build(small())
    optimizer = make_optimizer(model, learning_rate=LEARNING_RATE)
    held = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())
    parameters = sum(p.numel() for p in model.parameters())
    assert held == 8 * parameters + 4 * len(list(model.parameters()))
    before = {p: p.detach().clone() for p in model.parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(not torch.equal(p, before[p]) for p in model.parameters())
