"""Planned bytes are measured bytes: every recipe, every rank, to the byte, with the operator at the peak."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

import lab
from lab.memory.timeline import Timeline
from lab.models import config_of
from lab.recipe.ladder import RECIPE_NAMES, resolve_recipe
from lab.recipe.recipe import Recipe
from lab_tests.support.models import small_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Digits: their bytes are tokens of the smallest vocabulary."""
    path = tmp_path_factory.mktemp("text") / "digits.txt"
    path.write_text("0123456789 " * 1000)
    return path


def answers(timeline: Timeline) -> dict[str, object]:
    def of_phase(name: str) -> int:
        return timeline.rows([timeline.phases[p] == name for p in timeline.phase]).device_peak

    return {
        "device": timeline.device_peak,
        "host": timeline.host_peak,
        "op": timeline.peak.op,
        "module": timeline.peak.module,
        "forward": of_phase("forward"),
        "backward": of_phase("backward"),
        "categories": timeline.peak.by_category,
        # All of a holder but its step and its times; tensors of one size are in no order.
        "holders": sorted(
            (h.bytes, h.category, h.shape, h.dtype, h.name, h.op, h.module, h.phase)
            for memory in ("device", "host")
            for h in timeline.holders(memory=memory)
        ),
    }


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
qwen3_moe = partial(
    odd, Qwen3MoeConfig, head_dim=28, num_hidden_layers=4, num_experts=12, num_experts_per_tok=5,
    moe_intermediate_size=20, mlp_only_layers=[2],
)  # fmt: skip
cohere2 = partial(
    odd, Cohere2Config, head_dim=28, sliding_window=30, bos_token_id=1, eos_token_id=2,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
olmo = partial(odd, OlmoConfig, head_dim=28, clip_qkv=0.1, attention_bias=True)
capped = partial(
    odd, Gemma3TextConfig, head_dim=28, sliding_window=30, final_logit_softcapping=3.0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
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
    "rows over data parallel ranks": (odd(), replace(UPIPE, head_chunk=12), 500, 2),
    "tile of 5": (odd(), Recipe(ulysses=2, mlp_tile=5, norm_tile=8, loss_tile=5), 40, 1),
    "tile of 8": (odd(), Recipe(fsdp=True, ulysses=2, mlp_tile=8, norm_tile=5, loss_tile=8), 40, 3),
    "bf16": (odd(), Recipe(fsdp=True, ulysses=2, checkpoint=True, compute_dtype="bfloat16"), 500, 1),
    "optimizer on the host": (odd(num_hidden_layers=8), replace(OFFLOAD, optimizer="host"), 250, 1),
    "optimizer on the host, bf16, tied heads": (
        odd(Qwen2Config, tie_word_embeddings=True),
        replace(UPIPE, optimizer="host", compute_dtype="bfloat16"), 100, 3,
    ),
    "bf16 on replicas": (odd(), Recipe(compute_dtype="bfloat16"), 250, 1),
    "biases, tied heads": (odd(Qwen2Config, tie_word_embeddings=True), UPIPE, 500, 1),
    "norms of heads, rows that do not divide": (odd(Qwen3Config, head_dim=28), UPIPE, 500, 3),
    "tied heads on replicas": (odd(tie_word_embeddings=True), Recipe(), 250, 1),
    "ten layers": (odd(num_hidden_layers=10), OFFLOAD, 250, 1),
    "overlap": (odd(), replace(UPIPE, head_chunk=4, overlap=True), 500, 1),
    "overlap, norms of heads": (
        odd(Qwen3Config, head_dim=28), replace(UPIPE, head_chunk=12, overlap=True), 500, 3,
    ),
    "overlap, kept attention": (
        odd(num_hidden_layers=3), replace(UPIPE, overlap=True, offload="attention"), 500, 1,
    ),
    "streamed, tokens that do not divide": (odd(num_hidden_layers=3), replace(STREAMED, stream=50), 499, 1),
    "streamed, rows over data parallel ranks": (odd(), replace(STREAMED, head_chunk=12), 250, 2),
    "streamed, one stage, norms of heads": (
        odd(Qwen3Config, head_dim=28), replace(STREAMED, head_chunk=None), 500, 3,
    ),
    "streamed, tied heads, biases": (odd(Qwen2Config, tie_word_embeddings=True), STREAMED, 250, 1),
    "streamed, overlap, kept attention": (
        odd(num_hidden_layers=8), replace(STREAMED, overlap=True, offload="attention"), 250, 1,
    ),
    "streamed, bf16 on replicas": (
        odd(), replace(STREAMED, fsdp=False, ulysses=1, compute_dtype="bfloat16"), 100, 3,
    ),
    "segments of three": (odd(num_hidden_layers=11), replace(STREAMED, segment=3), 500, 1),
    "segments, kept attention, no FSDP": (
        odd(num_hidden_layers=3), replace(STREAMED, fsdp=False, segment=2, offload="attention"), 500, 3,
    ),
    "attention tiles": (odd(), replace(UPIPE, head_chunk=4, attention_tile=104), 500, 1),
    "attention tiles, no UPipe": (
        odd(), replace(OFFLOAD, attention_tile=60, compute_dtype="bfloat16"), 250, 3,
    ),
    "kept attention": (odd(num_hidden_layers=8), replace(OFFLOAD, offload="attention"), 250, 1),
    "windows": (odd(MistralConfig, sliding_window=30), replace(UPIPE, head_chunk=4), 250, 1),
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
    "experts, rows that do not divide, one tile": (mixtral(), replace(OFFLOAD, mlp_tile=500), 250, 3),
    "experts without tiles, in bf16 on replicas": (mixtral(), Recipe(compute_dtype="bfloat16"), 60, 1),
    "experts and dense layers, in tiles of 5": (
        qwen3_moe(), Recipe(ulysses=2, mlp_tile=5, norm_tile=8, loss_tile=5), 40, 3,
    ),
    "experts and dense layers, streamed": (
        qwen3_moe(), replace(STREAMED, segment=2, compute_dtype="bfloat16"), 100, 1,
    ),
    "parallel blocks": (cohere2(), UPIPE, 499, 1),
    "parallel blocks, wide rotation, in bf16, rows that do not divide": (
        cohere2(), replace(OFFLOAD, mlp_tile=50, offload="attention", compute_dtype="bfloat16"), 100, 3,
    ),
    "parallel blocks without tiles, on replicas": (odd(CohereConfig), Recipe(), 60, 1),
    "norms of heads with scales of their own": (
        odd(CohereConfig, use_qk_norm=True, head_dim=28, num_key_value_heads=8),
        replace(UPIPE, compute_dtype="bfloat16"), 100, 3,
    ),
    "norms of heads with scales of their own, no UPipe": (
        odd(CohereConfig, use_qk_norm=True, head_dim=28, num_key_value_heads=8), OFFLOAD, 100, 1,
    ),
    "parallel blocks, streamed": (
        cohere2(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
        replace(STREAMED, segment=2), 250, 1,
    ),
    "clips": (olmo(), replace(UPIPE, head_chunk=4), 250, 1),
    "clips, no UPipe, in bf16, rows that do not divide": (
        olmo(), replace(OFFLOAD, norm_tile=50, compute_dtype="bfloat16"), 100, 3,
    ),
    "clips, streamed": (olmo(), replace(STREAMED, compute_dtype="bfloat16"), 100, 3),
    "clips on replicas": (olmo(), Recipe(), 60, 1),
    "capped logits": (capped(), UPIPE, 250, 1),
    "capped logits, whole, in bf16 on replicas": (capped(), Recipe(compute_dtype="bfloat16"), 60, 1),
    "sinks, clamped experts, nine layers": (
        gpt_oss(num_hidden_layers=9), replace(UPIPE, head_chunk=12), 499, 1,
    ),
    "sinks, clamped experts, rows that do not divide, one tile": (
        gpt_oss(), replace(OFFLOAD, mlp_tile=500, offload="attention"), 250, 3,
    ),
    "sinks, clamped experts, in bf16 on replicas": (gpt_oss(), Recipe(compute_dtype="bfloat16"), 60, 1),
    "sinks, clamped experts, streamed": (
        gpt_oss(num_hidden_layers=4), replace(STREAMED, segment=2, compute_dtype="bfloat16"), 100, 1,
    ),
}  # fmt: skip
"""The model, the recipe, the tokens and the rows.

A plan of more than seven layers is extrapolated, here by three layers and by five; one of more than ten with
segments of three, by three.
"""


@pytest.mark.parametrize("name", CASES)
def test_where_nothing_coincides(ranks4, text, name):
    planned, measured = plan_and_measure(ranks4, text, *CASES[name])
    assert measured == [[planned]] * 4


ADAPTERS = {
    name: (odd(Qwen3Config, num_key_value_heads=8, head_dim=28), name, 60, 1, "r=4,alpha=12")
    for name in RECIPE_NAMES
} | {
    "q and v, tokens that do not divide": (
        odd(), replace(UPIPE, head_chunk=4, overlap=True), 99, 1, "r=4,targets=q_proj+v_proj",
    ),
    "parallel blocks, streamed": (cohere2(), STREAMED, 100, 1, "r=4"),
    "parallel blocks": (cohere2(), replace(UPIPE, compute_dtype="bfloat16"), 60, 3, "r=4"),
    "one matrix of the MLP, eight layers": (
        odd(num_hidden_layers=8), OFFLOAD, 100, 1, "r=8,targets=down_proj",
    ),
    "biases, tied heads, bf16": (
        odd(Qwen2Config, tie_word_embeddings=True), replace(UPIPE, compute_dtype="bfloat16"), 60, 3, "r=4",
    ),
    "an MLP that is not gated, on replicas": (
        odd(Starcoder2Config, sliding_window=None, bos_token_id=1, eos_token_id=2),
        replace(STREAMED, fsdp=False), 100, 1, "r=4",
    ),
}  # fmt: skip
"""The model, the recipe, the tokens, the rows and the adapters. Four divides r, so that shards are equal."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_with_adapters(ranks4, text, name):
    model, recipe, tokens, rows, lora = ADAPTERS[name]
    if isinstance(recipe, str):
        # Computing in bf16 takes a CPU a hundred times as long.
        recipe = resolve_recipe(recipe, model, 4, tokens, compute_dtype=None)
    planned, measured = plan_and_measure(ranks4, text, model, recipe, tokens, rows, lora=lora)
    assert measured == [[planned]] * 4


@pytest.mark.parametrize("head_chunk", [None, 8])
def test_sinks_round_a_ring(ranks4, text, head_chunk):
    model, recipe = gpt_oss(layer_types=["full_attention"] * 2), replace(UPIPE, ring=2, head_chunk=head_chunk)
    planned, measured = plan_and_measure(ranks4, text, model, recipe, 248)
    assert max(measured, key=lambda steps: steps[0]["device"]) == [planned]


def test_with_adapters_round_a_ring(ranks4, text):
    recipe = replace(UPIPE, ring=2, head_chunk=4)
    planned, measured = plan_and_measure(ranks4, text, odd(), recipe, 96, lora="r=4")
    assert measured[2:] == [[planned]] * 2
    assert measured[0][0]["device"] <= planned["device"]


def test_every_chunk_of_the_heads(ranks4, text):
    peaks = []
    model = odd(hidden_size=64, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1)
    for chunk in (8, 16, 32):
        recipe = Recipe(fsdp=True, ulysses=4, head_chunk=chunk, checkpoint=True)
        planned, measured = plan_and_measure(ranks4, text, model, recipe, 500)
        assert measured == [[planned]] * 4
        assert "self_attn" in planned["module"]
        peaks.append(planned["device"])
    assert peaks == sorted(set(peaks))


RINGS = {
    "ring of two": (Recipe(ring=2), (0, 1, 1)),
    "in bf16": (Recipe(fsdp=True, ring=2, compute_dtype="bfloat16"), (0, 1, 1)),
    "kept attention": (
        Recipe(fsdp=True, ring=2, ulysses=2, checkpoint=True, offload="attention"),
        (0, 1, 1),
    ),
    "UPipe, one head a rank": (
        Recipe(fsdp=True, ring=2, ulysses=2, head_chunk=2, checkpoint=True),
        (0, 0, 0),
    ),
    "UPipe, overlap, kept attention": (
        Recipe(
            fsdp=True, ring=2, ulysses=2, head_chunk=4, overlap=True, checkpoint=True, offload="attention"
        ),
        (0, 1, 1),
    ),
    "streamed": (replace(STREAMED, ring=2, head_chunk=2, stream=8), (0, 0, 0)),
    "UPipe, attention tiles": (
        Recipe(fsdp=True, ring=2, ulysses=2, head_chunk=4, checkpoint=True, attention_tile=50),
        (0, 1, 1),
    ),
    "ring of four": (Recipe(fsdp=True, ring=4, checkpoint=True), (1, 1, 1)),
    "ring of four, UPipe": (Recipe(fsdp=True, ring=4, head_chunk=2), (1, 1, 1)),
}
"""The recipe, and the ring rank that is planned for 1, 2 and 4 query heads to a key/value head."""

RING_CASES = [
    *product(("ring of two", "UPipe, overlap, kept attention"), (1, 2, 4)),
    *product(("in bf16", "kept attention", "UPipe, one head a rank"), (1, 4)),
    ("streamed", 4),
    ("UPipe, attention tiles", 4),
    ("ring of four", 2),
    *product(("ring of four, UPipe",), (1, 4)),
]
"""The simplest recipe and the one with the most knobs have every number of query heads to a key/value head.

Each other recipe in a ring of two has 1, where rank 0 holds the most, and 4.
"""


def ring_model(group: int) -> PretrainedConfig:
    """A model so small beside its heads that its peak is in attention's backward."""
    return odd(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8 // group, vocab_size=60,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "group"), RING_CASES)
def test_round_a_ring_the_plan_is_that_of_the_rank_that_holds_most(ranks4, text, name, group):
    """In a ring of two, rank 0 holds more where a call of the kernel has one query head to a key/value head.

    At the last step it makes gradients of all keys and of half its queries, rank 1 of half the keys and of
    all queries: as many bytes with two query heads, and more with four.
    """
    recipe, ring_ranks = RINGS[name]
    recipe = replace(recipe, loss_tile=62)
    planned, measured = plan_and_measure(ranks4, text, ring_model(group), recipe, 496)
    ring_rank = ring_ranks[(1, 2, 4).index(group)]
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
    assert answers(rehearsal.timeline.rows(rehearsal.timeline.step == 0)) == answers(rehearsal.plan.timeline)
    again = lab.plan(model, recipe, tokens=496, ranks=4, workspace=False)
    assert (again.ring_rank, again.device_peak) == (0, rehearsal.device_peak)


def test_of_shards_that_are_not_equal_rank_0_holds_the_most(ranks4, text):
    """A vocabulary of 101 is sharded 26, 26, 26, 23: the last rank holds 3 rows less of both moments."""
    planned, measured = plan_and_measure(ranks4, text, odd(vocab_size=101), UPIPE, 500)
    assert measured[:3] == [[planned]] * 3
    rows = 3 * 48 * 4 * 2  # of the embedding and of the head
    assert planned["device"] - measured[3][0]["device"] == 2 * rows
