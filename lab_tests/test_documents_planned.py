"""Plans of rows of several documents: measured bytes, and the operations of their pairs of tokens alone.

Seen red: documents that a plan forgets, that its cache forgets, and lengths that are off by one.
"""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh
from transformers import MistralConfig, Qwen2Config, Qwen3Config

import lab
from lab.commands.cli import main
from lab.commands.report import plan_text
from lab.errors import LabError, RecipeError
from lab.memory.meter import Meter
from lab.recipe.ladder import resolve_recipe
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab.step.compose import start
from lab.step.training_step import train_step
from lab_tests.proofs.cases import answers
from lab_tests.support.models import small_config

TOKENS, DOCUMENTS = 250, (61, 1, 130, 58)


def odd(family=None, **fields):
    sizes = {"num_attention_heads": 24, "vocab_size": 104, **fields}
    return small_config(**sizes) if family is None else small_config(family, **sizes)


def trained(model, recipe, documents, rows):
    """Return what a rank holds in a step of rows of these documents; runs on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    applied = start(model, recipe, mesh)
    optimizer = applied.make_optimizer(learning_rate=1e-3)
    ids = torch.randint(0, 100, (rows, sum(documents)), generator=torch.Generator().manual_seed(1))
    batch = shard_batch(ids, recipe, mesh, documents=[documents] * rows)
    meter = Meter()
    train_step(applied.model, optimizer, batch, meter=meter)
    return answers(meter.timeline())


def assert_planned(ranks4, model, recipe, documents=DOCUMENTS, rows=1):
    tokens = sum(documents)
    plan = lab.plan(model, recipe, tokens=tokens, documents=documents, ranks=4, rows=rows, workspace=False)
    for measured in ranks4.apply(trained, model, recipe, documents, rows):
        assert measured == answers(plan.timeline)
    return plan


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "upipe", "long"])
def test_named_recipes(ranks4, name):
    model = odd(Qwen3Config, num_key_value_heads=8, head_dim=28)
    assert_planned(ranks4, model, resolve_recipe(name, model, 4, TOKENS, compute_dtype=None))


UPIPE = Recipe(
    fsdp=True, ulysses=2, head_chunk=8, checkpoint=True, offload="inputs",
    mlp_tile=96, norm_tile=112, loss_tile=104,
)  # fmt: skip
STREAMED = replace(UPIPE, mlp_tile=None, stream=96)
KEPT = Recipe(fsdp=True, ulysses=2, checkpoint=True, offload="attention")
CASES = {
    "windows, no UPipe, eight layers, bf16": (
        odd(MistralConfig, sliding_window=33, num_hidden_layers=8),
        replace(KEPT, compute_dtype="bfloat16"), DOCUMENTS, 3,
    ),
    "windows in every other layer, streamed": (
        odd(
            Qwen2Config, num_hidden_layers=9, use_sliding_window=True, sliding_window=17,
            layer_types=["full_attention", "sliding_attention"] * 4 + ["full_attention"],
        ),
        STREAMED, DOCUMENTS, 1,
    ),
    "attention tiles, tokens that do not divide": (
        odd(), replace(UPIPE, head_chunk=4, attention_tile=24), (*DOCUMENTS, 73), 1,
    ),
}  # fmt: skip
"""The model, the recipe, the documents and the rows: what the table of cases has not."""


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_where_nothing_coincides(ranks4, name):
    assert_planned(ranks4, *CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("tile", [None, 64])
def test_operations_are_those_of_the_pairs_within_documents(tile):
    """A layer's attention runs forward twice and backward once, of 2.5 times the operations."""
    model = odd(num_hidden_layers=9)
    recipe = Recipe(fsdp=True, ulysses=2, checkpoint=True, attention_tile=tile)
    documents = (256, 128, 128)
    whole, several = (
        lab.plan(model, recipe, tokens=512, ranks=4, documents=of_row).costs for of_row in (None, documents)
    )
    fewer = 512**2 - sum(n**2 for n in documents)
    forward = 9 * (24 // 2) * 10 * 2 * fewer
    assert whole.flops - several.flops == forward * (2 + 2.5)
    assert several.link_bytes == whole.link_bytes


@pytest.mark.long
def test_documents_take_less_time():
    seconds = [
        lab.plan("tiny", "upipe", tokens="1M", ranks=2, documents=documents).step_seconds
        for documents in (None, "512K,512K", "256K,256K,256K,256K")
    ]
    assert seconds[2] < 0.7 * seconds[1] < 0.5 * seconds[0]


def test_a_saved_plan_is_of_its_own_documents():
    recipe = Recipe(fsdp=True, ulysses=2)
    plans = [
        lab.plan(odd(), recipe, tokens=250, ranks=4, documents=documents)
        for documents in (None, DOCUMENTS, (100, 150), [250], DOCUMENTS)
    ]
    flops = [plan.costs.flops for plan in plans]
    assert flops[0] == flops[3] > flops[2] > flops[1] == flops[4]
    assert [plan.job.documents for plan in plans] == [None, DOCUMENTS, (100, 150), None, DOCUMENTS]
    assert plans[1].title.endswith("4 ranks · 250 tokens in 4 documents")
    assert plans[0].title.endswith("4 ranks · 250 tokens")


def test_a_text_names_documents_as_it_does_tokens():
    recipe = Recipe(ulysses=2)
    plan = lab.plan("tiny", recipe, tokens="2K", ranks=2, documents="1K,512, 512")
    assert plan.job.documents == (1024, 512, 512)
    assert plan.to_json()["documents"] == (1024, 512, 512)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("1K,512", "have 1536 tokens together, and the row has 2048: give lengths that add up"),
        ("1K,,1K", "'' is not a number of tokens: write 8192, 128K or 5M"),
        ("2K,0", "'0' is not a number of tokens"),
        ("1K,-1K,2K", "'-1K' is not a number of tokens"),
        ([1024, 1025], "have 2049 tokens together, and the row has 2048"),
        ((), "have 0 tokens together"),
    ],
)
def test_documents_that_are_none_are_refused_in_one_line(documents, message):
    with pytest.raises(LabError, match=message) as caught:
        lab.plan("tiny", "upipe", tokens="2K", ranks=2, documents=documents)
    assert "\n" not in str(caught.value)


def test_a_ring_is_refused():
    with pytest.raises(
        RecipeError, match=r"several documents in a row with ring=2, .*set ring_exchange='gather', or ring=1"
    ):
        lab.plan("tiny", "upipe", tokens="2K", ranks=2, documents="1K,1K", ring=2, ulysses=1)
    assert lab.plan("tiny", "fsdp", tokens="2K", ranks=2, documents="2K", ring=2).ring_rank < 2


def test_ranks_without_rows_are_not_told_of_a_ring():
    plan = lab.plan("tiny", "fsdp", tokens=1024, ranks=4, documents=[1000, 24], ulysses=2)
    assert "some repeat the work of others; more rows would use them" in plan_text(plan)


@pytest.mark.long
def test_the_command():
    sizes = ["plan", "tiny", "--tokens", "2K", "--ranks", "2", "--documents"]
    said = CliRunner().invoke(main, [*sizes, "1K,512,512", "--json"])
    assert json.loads(said.output)["documents"] == [1024, 512, 512]
    said = CliRunner().invoke(main, [*sizes, "1K,512,512"])
    assert "2 ranks · 2K tokens in 3 documents" in said.output
    said = CliRunner().invoke(main, [*sizes, "1K,512"])
    assert (said.exit_code, said.output.count("\n")) == (2, 1)
    assert "add up to the row's tokens" in said.output
