"""Planned bytes are measured bytes: every recipe, every rank, to the byte, with the operator at the peak."""

from dataclasses import replace
from functools import partial

import pytest
from transformers import (
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen2Config,
)

import lab
from lab.memory.timeline import Timeline
from lab.models import config_of
from lab.recipe.ladder import RECIPE_NAMES, resolve_recipe
from lab.recipe.recipe import Recipe
from lab_tests.proofs import cases
from lab_tests.support.models import small_config

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Digits: their bytes are tokens of the smallest vocabulary."""
    path = tmp_path_factory.mktemp("text") / "digits.txt"
    path.write_text("0123456789 " * 1000)
    return path


def answers(timeline: Timeline) -> dict[str, object]:
    """As in the table of cases, with the peaks of two phases."""
    phases = [timeline.phases[p] for p in timeline.phase]
    peaks = {
        name: timeline.rows([phase == name for phase in phases]).device_peak
        for name in ("forward", "backward")
    }
    return cases.answers(timeline) | peaks


def plan_and_measure(cluster, text, model, recipe, tokens, rows=1, steps=1, lora=None):
    """The plan's answers, and those of every rank and step."""
    plan = lab.plan(model, recipe, tokens=tokens, ranks=4, rows=rows, lora=lora, workspace=False)
    run = lab.run(model, recipe, tokens=tokens, rows=rows, lora=lora, steps=steps, text=text, cluster=cluster)
    measured = [
        [answers(timeline.rows(timeline.step == step)) for step in range(steps)] for timeline in run.timelines
    ]
    return answers(plan.timeline), measured


odd = partial(small_config, num_attention_heads=24, vocab_size=104)
"""All axes and quotients differ; four divides each, so that shards are equal.

There are two layers, a first and a last. The cases with more are those in which a layer between them is
treated in another way.
"""


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_named_recipe_of_two_layers_of_tiny(ranks4, text, name):
    model = config_of("tiny")
    model.num_hidden_layers = 2
    # Few tokens: these recipes compute in bf16, and a matmul in bf16 takes a CPU a hundred times as long.
    recipe = resolve_recipe(name, model, 4, 64)
    planned, measured = plan_and_measure(ranks4, text, model, recipe, 64, steps=2)
    assert measured == [[planned] * 2] * 4
    assert (planned["host"] > 0) == (name in ("offload", "tiling", "upipe", "streamed", "fast", "long"))


UPIPE = Recipe(
    fsdp=True, ulysses=2, head_chunk=8, checkpoint=True, offload="inputs",
    mlp_tile=96, norm_tile=112, loss_tile=104,
)  # fmt: skip
"""With 24 heads in groups of 4, a stage has the heads of one key/value head on each rank. A chunk of 4 has
half of them, and a chunk of 12 those of one and a half.
"""
STREAMED = replace(UPIPE, mlp_tile=None, stream=96)
mixtral = partial(odd, MixtralConfig, num_local_experts=8, num_experts_per_tok=3)
gpt_oss = partial(
    odd, GptOssConfig, head_dim=28, num_local_experts=8, num_experts_per_tok=3, sliding_window=30,
    intermediate_size=20,
)  # fmt: skip
OFFLOAD = Recipe(fsdp=True, ulysses=2, checkpoint=True, offload="inputs")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

CASES = {
    "tokens that do not divide, frequencies of their number": (
        odd(num_hidden_layers=3, rope_parameters=DYNAMIC, max_position_embeddings=256),
        replace(UPIPE, head_chunk=4), 499, 1,
    ),
    "optimizer on the host": (odd(num_hidden_layers=8), replace(OFFLOAD, optimizer="host"), 250, 1),
    "streamed, tokens that do not divide": (odd(num_hidden_layers=3), replace(STREAMED, stream=50), 499, 1),
    "streamed, overlap, kept attention": (
        odd(num_hidden_layers=8), replace(STREAMED, overlap=True, offload="attention"), 250, 1,
    ),
    "segments of three": (odd(num_hidden_layers=11), replace(STREAMED, segment=3), 500, 1),
    "kept attention": (odd(num_hidden_layers=8), replace(OFFLOAD, offload="attention"), 250, 1),
    "windows, no UPipe, eight layers, bf16": (
        odd(MistralConfig, sliding_window=33, num_hidden_layers=8),
        replace(OFFLOAD, compute_dtype="bfloat16"), 250, 3,
    ),
    "norms over all heads, streamed in many tiles": (
        odd(Olmo2Config, head_dim=28), replace(STREAMED, stream=40, compute_dtype="bfloat16"), 499, 1,
    ),
    "windows in every other layer, streamed": (
        odd(
            Qwen2Config, num_hidden_layers=9, use_sliding_window=True, sliding_window=17,
            layer_types=["full_attention", "sliding_attention"] * 4 + ["full_attention"],
        ),
        STREAMED, 250, 1,
    ),
    "experts, nine layers": (mixtral(num_hidden_layers=9), UPIPE, 499, 1),
    "sinks, clamped experts, nine layers": (
        gpt_oss(num_hidden_layers=9), replace(UPIPE, head_chunk=12), 499, 1,
    ),
    "sinks, clamped experts, rows that do not divide, one tile": (
        gpt_oss(), replace(OFFLOAD, mlp_tile=500, offload="attention"), 250, 3,
    ),
}  # fmt: skip
"""The model, the recipe, the tokens and the rows: what the table of cases in ``proofs/cases.py`` has not.

A plan of more than seven layers is extrapolated, and one of more than ten with segments of three.
"""


@pytest.mark.parametrize("name", CASES)
def test_where_nothing_coincides(ranks4, text, name):
    planned, measured = plan_and_measure(ranks4, text, *CASES[name])
    assert measured == [[planned]] * 4


ADAPTERS = {
    "q and v, tokens that do not divide": (
        odd(), replace(UPIPE, head_chunk=4, overlap=True), 99, 1, "r=4,targets=q_proj+v_proj",
    ),
    "one matrix of the MLP, eight layers": (
        odd(num_hidden_layers=8), OFFLOAD, 100, 1, "r=8,targets=down_proj",
    ),
}  # fmt: skip
"""The model, the recipe, the tokens, the rows and the adapters. Four divides r, so that shards are equal."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_with_adapters(ranks4, text, name):
    *asked, lora = ADAPTERS[name]
    planned, measured = plan_and_measure(ranks4, text, *asked, lora=lora)
    assert measured == [[planned]] * 4


@pytest.mark.parametrize("head_chunk", [None, 8])
def test_sinks_round_a_ring(ranks4, text, head_chunk):
    model, recipe = gpt_oss(layer_types=["full_attention"] * 2), replace(UPIPE, ring=2, head_chunk=head_chunk)
    planned, measured = plan_and_measure(ranks4, text, model, recipe, 248)
    assert max(measured, key=lambda steps: steps[0]["device"]) == [planned]


OVERLAP = Recipe(
    fsdp=True, ring=2, ulysses=2, head_chunk=4, overlap=True, checkpoint=True, offload="attention"
)
RINGS = [
    (Recipe(ring=2), 1, 0), (OVERLAP, 1, 0), (OVERLAP, 2, 1), (OVERLAP, 4, 1),
    (Recipe(fsdp=True, ring=4, checkpoint=True), 2, 1),
]  # fmt: skip
"""The recipe, the query heads to a key/value head, and the ring rank that is planned."""


def ring_model(group: int) -> PretrainedConfig:
    """A model so small beside its heads that its peak is in attention's backward."""
    return odd(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8 // group, vocab_size=60,
    )  # fmt: skip


@pytest.mark.parametrize(("recipe", "group", "ring_rank"), RINGS)
def test_round_a_ring_the_plan_is_that_of_the_rank_that_holds_most(ranks4, text, recipe, group, ring_rank):
    """In a ring of two, rank 0 holds more where a call of the kernel has one query head to a key/value head.

    At the last step it makes gradients of all keys and of half its queries, rank 1 of half the keys and of
    all queries: as many bytes with two query heads, and more with four.
    """
    recipe = replace(recipe, loss_tile=62)
    planned, measured = plan_and_measure(ranks4, text, ring_model(group), recipe, 496)
    of_ring_rank = [m for rank, m in enumerate(measured) if rank // recipe.ulysses % recipe.ring == ring_rank]
    assert of_ring_rank == [[planned]] * (4 // recipe.ring)
    for memory in ("device", "host"):
        assert max(rank[0][memory] for rank in measured) == planned[memory]
    assert "flash" in planned["op"]
    assert (planned["host"] > 0) == (recipe.offload != "none")


def test_a_rehearsal_is_of_the_rank_that_is_planned():
    model, recipe = odd(num_key_value_heads=24, vocab_size=260), Recipe(ring=2, loss_tile=62)
    rehearsal = lab.rehearse(model, recipe, tokens=496, ranks=4, machine="cpu")
    assert rehearsal.plan.ring_rank == 0
    measured, planned = (
        answers(timeline)
        for timeline in (rehearsal.timeline.rows(rehearsal.timeline.step == 0), rehearsal.plan.timeline)
    )
    # One rank answers for its peers: it calls no collective.
    assert measured.pop("collectives") != planned.pop("collectives")
    assert measured == planned
    again = lab.plan(model, recipe, tokens=496, ranks=4, workspace=False)
    assert (again.ring_rank, again.device_peak) == (0, rehearsal.device_peak)


def test_of_shards_that_are_not_equal_rank_0_holds_the_most(ranks4, text):
    """A vocabulary of 101 is sharded 26, 26, 26, 23: the last rank holds 3 rows less of both moments."""
    planned, measured = plan_and_measure(ranks4, text, odd(vocab_size=101), UPIPE, 500)
    assert measured[:3] == [[planned]] * 3
    rows = 3 * 48 * 4 * 2  # of the embedding and of the head
    assert planned["device"] - measured[3][0]["device"] == 2 * rows
