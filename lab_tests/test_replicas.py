"""Hybrid sharding: what a rank holds, its streams, and checkpoints of other replicas.

The gradients, a step and the planned bytes are in the table of cases.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

import lab
from lab import models
from lab.models.first_values import shard_of
from lab.planning.allocator import ALL_REDUCE, streams_of
from lab.planning.start import start_of
from lab.planning.whole_step import fake_model
from lab.recipe.jobs import Job
from lab.recipe.recipe import Recipe
from lab.step.compose import start
from lab.step.one_rank import one_rank
from lab.training.checkpoints import export
from lab_tests.support.models import small_config
from lab_tests.support.training import ROWS, TOKENS

HYBRID = Recipe(fsdp=True, replicas=2)


@pytest.mark.parametrize("optimizer", ["device", "host"])
def test_a_start_holds_the_shard_of_a_replica(optimizer):
    """Of 6 ranks in two replicas, a third of the parameters in fp32 and two moments."""
    job = Job("tiny", Recipe(fsdp=True, replicas=2, optimizer=optimizer), 64, 6)
    model = fake_model(job)
    shards = sum(-(-len(p) // 3) * p[0].numel() * 4 for p in model.parameters())
    planned = start_of(job, model, workspace=False)
    held = planned.device - sum(b.nbytes for b in model.buffers()) if optimizer == "device" else planned.host
    assert held == 3 * shards + 4 * len([*model.parameters()])


def test_the_second_replica_has_the_values_of_the_first():
    config = small_config(vocab_size=101)
    whole = dict(models.build(config, seed=3).named_parameters())
    shards = []
    for rank in (1, 4):
        # The first rank of ring rank 1 is rank 1 of 3, and a mesh that begins elsewhere is that of rank 4.
        with one_rank(Recipe(ulysses=rank, ring=2), 6 if rank == 1 else 8, "loopback") as mesh:
            model = start(config, HYBRID, mesh, seed=3).model
            shards.append({name: shard_of(p) for name, p in model.named_parameters()})
    for name, (local, first) in shards[0].items():
        rows = -(-len(whole[name]) // 3)
        assert first == min(rows, len(whole[name])), name
        assert torch.equal(local, whole[name][first : first + len(local)])
    for name, (local, first) in shards[1].items():
        assert first == 0, name
        assert torch.equal(local, whole[name][: -(-len(whole[name]) // 4)])


def test_sums_over_replicas_have_a_stream_of_their_own():
    plan = lab.plan("tiny", HYBRID, tokens=64, ranks=8, dtype="bfloat16")
    storages, streams = plan.timeline.storages, streams_of(plan.timeline)

    def kinds(stream):
        held = [storages.kinds[storages.kind[entry]] for entry, name in streams.items() if name == stream]
        return [(kind.shape, kind.dtype) for kind in held]

    reduced = kinds("reduce")
    assert len(reduced) == 5  # four layers and the rest
    assert {dtype for _, dtype in reduced} == {"float32"}
    assert kinds(ALL_REDUCE) == [(shape, "bfloat16") for shape, _ in reduced]


@pytest.mark.long
def test_a_run_goes_on_with_other_replicas(ranks4, digits, tmp_path):
    """The sums have other orders, so the losses are equal but for rounding."""
    settings = {"tokens": TOKENS, "rows": ROWS, "text": digits, "cluster": ranks4, "compute_dtype": None}
    knobs = {"ulysses": 2, "ring": 1}
    unbroken = lab.train(small_config(), "upipe", steps=4, checkpoint=tmp_path, every=2, **knobs, **settings)
    for first, second in ((2, 1), (1, 2)):
        folder = tmp_path / f"{first}-{second}"
        losses = []
        for steps, replicas in ((2, first), (4, second)):
            run = lab.train(
                small_config(), "upipe", steps=steps, checkpoint=folder, every=2, resume=steps == 4,
                replicas=replicas, **knobs, **settings,
            )  # fmt: skip
            losses += run.losses
        assert losses == pytest.approx(unbroken.losses, rel=1e-5)
        assert len(set(losses)) == 4
        export(folder, folder / "out")
        export(tmp_path, folder / "right")
        of_both = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("out", "right"))
        right, exported = (dict(model.state_dict()) for model in of_both)
        torch.testing.assert_close(exported, right, rtol=1e-3, atol=1e-3)
