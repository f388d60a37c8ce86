"""The ladder's Ulysses and ring degrees: a rule in integers, and where another pair needs less memory."""

from dataclasses import replace
from functools import partial

import pytest
from transformers import LlamaConfig

from lab.bench.degrees import RANKS, compare_pairs
from lab.models import ModelLike, config_of, shape_of
from lab.models.presets import PRESETS
from lab.planning.closed_form import estimate, estimate_job
from lab.planning.fit import MARGIN, _promising, candidates
from lab.planning.hardware import make_machine
from lab.planning.max_context import best_degrees, max_context
from lab.recipe.jobs import Job, make_job
from lab.recipe.ladder import ladder, sequence_degrees
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import GiB, Mi, MiB


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


LEANER = {
    ("llama3-8b", 16): (4, 4),
    ("llama3.2-1b", 16): (4, 4),
    ("llama3.2-3b", 8): (2, 4),
    ("llama3.2-3b", 16): (4, 4),
    ("llama3.2-3b", 32): (4, 8),
    ("qwen3-8b", 8): (4, 2),
    ("qwen3-8b", 16): (4, 4),
    ("mistral-7b", 16): (4, 4),
    ("olmo2-7b", 16): (4, 4),
    ("olmo2-7b", 32): (4, 8),
}
"""Where a step of 3M tokens with UPipe needs less device memory, by more than 1%, with other degrees: the
largest Ulysses degree of those within 1% of the least. It is always a smaller one, because the head chunk
follows it. The price is more stages, and more steps round the ring.
"""


def peaks(model: str, ranks: int) -> dict[tuple[int, int], int]:
    shape: Shape = shape_of(model)
    return {
        (c, r): estimate(model, "upipe", tokens=3 * Mi, ranks=ranks, ulysses=c, ring=r).device_peak
        for c, r in degree_pairs(shape, ranks)
    }


def test_the_presets_for_which_other_degrees_need_less_are_those_named_here():
    leaner = {}
    for model in PRESETS:
        for ranks in RANKS:
            by_pair = peaks(model, ranks)
            enough = 1.01 * min(by_pair.values())
            if by_pair[sequence_degrees(shape_of(model), ranks, {})] > enough:
                leaner[model, ranks] = next(pair for pair, peak in by_pair.items() if peak <= enough)
    assert leaner == LEANER


def test_no_pair_with_copies_of_keys_and_values_needs_less():
    for model in PRESETS:
        for ranks in RANKS:
            by_pair, chosen = peaks(model, ranks), sequence_degrees(shape_of(model), ranks, {})
            assert all(peak >= by_pair[chosen] for (c, _), peak in by_pair.items() if c > chosen[0])


@pytest.mark.slow
def test_plans_say_the_same_of_qwen3_32b_on_16_ranks():
    """A sample; `lab bench degrees` plans all pairs of all presets."""
    row = compare_pairs("qwen3-32b", 16, "upipe", 3 * Mi, lambda _: None, at_least=8)
    assert (row["ladder"], row["leanest"]) == ("8 x 2", "8 x 2")


def test_of_pairs_that_are_nearly_as_long_the_ladders_is_taken_or_else_the_first():
    def longest(tokens):
        return lambda degrees: tokens[degrees["ulysses"]]

    pairs, usual = [(8, 2), (4, 4), (2, 8)], Recipe(ulysses=4, ring=4)
    best = partial(best_degrees, usual, pairs)
    assert best(longest({8: 1000, 4: 995, 2: 1000})) == {"ulysses": 4, "ring": 4}
    assert best(longest({8: 1000, 4: 980, 2: 1000})) == {"ulysses": 8, "ring": 2}
    assert best(longest({8: 900, 4: 980, 2: 1000})) == {"ulysses": 2, "ring": 8}


SMALL = config_of("tiny")
SMALL.num_hidden_layers, SMALL.num_attention_heads, SMALL.num_key_value_heads = 1, 12, 4
SMALL.hidden_size, SMALL.head_dim, SMALL.intermediate_size, SMALL.vocab_size = 48, 64, 16, 64
"""Attention holds the most, so that a smaller head chunk needs less."""


@pytest.mark.slow
def test_the_longest_context_is_searched_with_the_pair_that_holds_most():
    found = max_context(SMALL, "upipe", ranks=4, device_memory="48MiB", host_memory="21GiB", workspace=False)
    recipe = found.plan.recipe
    assert recipe.ulysses < 4
    assert recipe.ulysses * recipe.ring == 4
    assert estimate(SMALL, "upipe", tokens=found.tokens, ranks=4, ulysses=4).device_peak > 48 * MiB


def promising(model: ModelLike, tokens: int, ranks: int, memory: int) -> list[Job]:
    """The jobs that fit plans where a rank has so much memory."""
    base, shape = make_job(model, "tiling", tokens=tokens, ranks=ranks), shape_of(model)
    jobs = [replace(base, recipe=recipe) for recipe in candidates(base.recipe, shape, ranks, base.tokens)]
    machine = make_machine(device_memory=memory, host_memory="100TiB")
    return _promising(shape, base.recipe, jobs, machine)


def peak(job: Job) -> int:
    return estimate_job(shape_of(job.model), job).device_peak


def test_fit_plans_the_ladders_degrees_and_leaner_ones():
    alike: dict[Recipe, list[Job]] = {}
    for job in promising("llama3-8b", 3 * Mi, 16, 80 * GiB):
        assert job.recipe.ulysses * job.recipe.ring == 16
        alike.setdefault(replace(job.recipe, ulysses=1, ring=1, attention_tile=None), []).append(job)
    assert {len(jobs) for jobs in alike.values()} == {1, 2}
    assert any(job.recipe.ulysses == 16 for jobs in alike.values() for job in jobs)
    for usual, *leaner in alike.values():
        assert usual.recipe.ulysses == 8
        assert all(1.05 * peak(job) < peak(usual) for job in leaner)


def test_fit_plans_smaller_head_chunks_only_if_no_larger_one_may_fit():
    plenty = promising(SMALL, 4096, 4, GiB)
    chunks = [job.recipe.head_chunk for job in plenty if job.recipe.head_chunk]
    assert min(chunks) == 4
    base = plenty[0]
    tiling = make_job(SMALL, "tiling", tokens=4096, ranks=4).recipe
    every = [replace(base, recipe=recipe) for recipe in candidates(tiling, shape_of(SMALL), 4, 4096)]
    large = min(peak(job) for job in every if (job.recipe.head_chunk or 4) >= 4)
    tight = promising(SMALL, 4096, 4, int(large / MARGIN) - 1)
    assert tight
    assert all(job.recipe.head_chunk < 4 for job in tight)
    (leanest,) = promising(SMALL, 4096, 4, 1024)
    assert peak(leanest) == min(map(peak, every))
    # On the host, the optimizer's state leaves the device, and is planned where nothing else may fit.
    assert {job.recipe.optimizer for job in plenty} == {"device"}
    assert leanest.recipe.optimizer == "host"
