"""The ladder's Ulysses and ring degrees: a rule in integers, and where another pair needs less memory."""

import pytest
from transformers import LlamaConfig

from lab.models import config_of, shape_of
from lab.planning.max_context import max_context
from lab.planning.plan import plan
from lab.recipe.ladder import ladder, sequence_degrees
from lab.units import Mi
from lab_tests.proofs.degrees import compare_pairs


def llama(heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=heads * 10, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=10
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "pair"),
    [(24, 6, 4, (2, 2)), (28, 4, 8, (4, 2)), (6, 2, 4, (2, 2)), (5, 5, 4, (1, 4)), (32, 8, 32, (8, 4)),
     (24, 24, 9, (3, 3)), (8, 8, 7, (1, 7)), (24, 1, 6, (1, 6))],
)  # fmt: skip
def test_ulysses_is_the_largest_degree_that_divides_ranks_and_kv_heads_and_ring_takes_the_rest(
    heads, kv_heads, ranks, pair
):
    recipe = ladder(llama(heads, kv_heads), ranks, 512)["upipe"]
    assert (recipe.ulysses, recipe.ring) == pair
    assert recipe.head_chunk == pair[0]


@pytest.mark.parametrize(
    ("by_hand", "pair"),
    [({"ulysses": 2}, (2, 8)), ({"ulysses": 16}, (16, 1)), ({"ring": 1}, (8, 1)), ({"ring": 4}, (4, 4)),
     ({"ulysses": 2, "ring": 2}, (2, 2)), ({"ulysses": 3}, (3, 1)), ({"ring": 3}, (1, 3)),
     ({"ulysses_backend": "deepspeed"}, (16, 1))],
)  # fmt: skip
def test_a_degree_by_hand_holds_and_the_other_follows(by_hand, pair):
    assert sequence_degrees(shape_of("llama3-8b"), 16, by_hand) == pair


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ranks", "pair", "leanest"),
    [("llama3.2-3b", 8, "8 x 1", "2 x 4"), ("tiny", 8, "8 x 1", "8 x 1")],
)
def test_a_smaller_ulysses_needs_less_where_the_head_chunk_that_follows_it_is_most_of_the_peak(
    model, ranks, pair, leanest
):
    """Two layers with UPipe; `python -m lab_tests.proofs degrees` plans all presets."""
    row = compare_pairs(model, ranks, "upipe", 3 * Mi, lambda _: None)
    assert (row["ladder"], row["leanest"]) == (pair, leanest)
    assert (row["bytes, ladder / leanest"] > 1) == (pair != leanest)


@pytest.mark.long
def test_a_pair_with_copies_of_keys_and_values_does_not_need_less():
    row = compare_pairs("qwen3-32b", 16, "upipe", 3 * Mi, lambda _: None, at_least=8)
    assert (row["ladder"], row["leanest"]) == ("8 x 2", "8 x 2")


SMALL = config_of("tiny")
SMALL.num_hidden_layers, SMALL.num_attention_heads, SMALL.num_key_value_heads = 1, 12, 4
SMALL.hidden_size, SMALL.head_dim, SMALL.intermediate_size, SMALL.vocab_size = 48, 64, 16, 64
"""Attention holds the most, so that a smaller head chunk needs less."""


@pytest.mark.long
def test_the_longest_context_is_searched_with_the_pair_that_holds_most():
    asked = {"ranks": 4, "device_memory": "48MiB", "host_memory": "21GiB", "workspace": False}
    found = max_context(SMALL, "upipe", **asked)
    recipe = found.plan.recipe
    assert recipe.ulysses < 4
    assert recipe.ulysses * recipe.ring == 4
    beyond = plan(SMALL, "upipe", tokens=found.tokens, ulysses=4, **asked)
    assert beyond.limit == "device"


@pytest.mark.long
def test_a_pair_whose_longest_context_is_shorter_is_not_taken(monkeypatch):
    """What the allocator reserves need not grow with the length, so that a pair may fit one length alone."""
    asked = {"ranks": 4, "device_memory": "48MiB", "host_memory": "21GiB", "workspace": False}
    own = max_context(SMALL, "upipe", ulysses=4, **asked)

    def shorter(job_of, machine, planned):
        if job_of(1024).recipe.ulysses == 4:
            return own.plan, own.next_plan
        return planned(job_of(own.tokens - 4)), own.plan

    monkeypatch.setattr("lab.planning.max_context.longest_context", shorter)
    assert max_context(SMALL, "upipe", **asked).plan == own.plan
