"""The longest context of a recipe, found from few plans: against plans of every length near it."""

import random
from math import inf
from types import SimpleNamespace

import pytest
from transformers import MistralConfig

from lab.planning import longest
from lab.planning.longest import NothingFits
from lab.planning.max_context import max_context
from lab.planning.plan import plan
from lab.techniques.host_memory import reserve
from lab.units import MiB
from lab_tests.support.models import quick_config, small_config

pytestmark = pytest.mark.long

MODEL = quick_config()

CASES = {
    "a class of short lengths": ("tiling", {"ranks": 2, "device_memory": "60MiB"}),
    "no tiles": ("checkpoint", {"ranks": 2, "device_memory": "64MiB"}),
    "a ring": ("upipe", {"ranks": 4, "device_memory": "30MiB"}),
    "ranks that divide no power of two": ("offload", {"ranks": 3, "device_memory": "60MiB"}),
    "a tile by hand": ("tiling", {"ranks": 2, "device_memory": "60MiB", "mlp_tile": 1000, "loss_tile": 300}),
    # Seen red: 2^30 tokens, a class of their own, are more than are planned of a whole row.
    "whole rows": ("tiling", {"ranks": 1, "device_memory": "90MiB", "mlp_tile": 1000, "loss_tile": 300}),
    "many rows": ("tiling", {"ranks": 1, "rows": 2048, "device_memory": "24GiB"}),
    "streamed": ("streamed", {"ranks": 2, "device_memory": "40MiB"}),
    "rows": ("upipe", {"ranks": 2, "rows": 2, "device_memory": "50MiB"}),
    "adapters": ("upipe", {"ranks": 2, "lora": "r=4", "device_memory": "24MiB"}),
    "the host": ("fast", {"ranks": 2, "host_memory": reserve(2) + 4 * MiB, "device_memory": "1GiB"}),
    "the disk": ("long", {"ranks": 2, "disk": "8MiB", "device_memory": "1GiB", "offload": "inputs"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_longest_context_fits_and_no_other_near_it_does(case):
    recipe, asked = CASES[case]
    tried, ranks = [], asked["ranks"]
    found = max_context(MODEL, recipe, workspace=False, watch=tried.append, **asked)
    assert found.tokens % ranks == 0
    assert found.next_plan.tokens == found.tokens + ranks
    assert {found.plan, found.next_plan} <= {*tried}
    answer = found.to_json()
    assert (answer["tokens"], answer["host_peak"]) == (found.tokens, found.plan.host_peak)
    # Powers of two with other remainders are classes of their own, each with a plan.
    assert len(tried) <= 27
    memory = {"host_memory": "2TiB"} | asked
    fresh = {
        tokens: plan(MODEL, recipe, tokens=tokens, workspace=False, **memory)
        for tokens in range(found.tokens - 2 * ranks, found.tokens + 3 * ranks, ranks)
    }
    assert {tokens for tokens, one in fresh.items() if one.fits} == {
        tokens for tokens in fresh if tokens <= found.tokens
    }
    assert fresh[found.tokens].device_peak == found.plan.device_peak
    assert fresh[found.next_plan.tokens].limit == found.limit


def test_more_ranks_than_the_shortest_context_has_tokens():
    """Seen red: 0 tokens were planned."""
    asked = {"ranks": 2048, "device_memory": "300MiB", "workspace": False}
    found = max_context(MODEL, "fsdp", **asked)
    assert (found.tokens % 2048, found.next_plan.tokens) == (0, found.tokens + 2048)
    short = plan(MODEL, "fsdp", tokens=1024, host_memory="2TiB", **asked)
    asked["device_memory"] = short.device_peak
    with pytest.raises(NothingFits, match=r"^not even 2K tokens fit: "):
        max_context(MODEL, "fsdp", **asked)


@pytest.mark.parametrize("resolution", [inf, 40])
@pytest.mark.parametrize("unit", [1, 6, 7, 1000])
def test_the_search_ends_beside_a_length_that_does_not_fit(unit, resolution, monkeypatch):
    """Any lengths may fit, with any guess, and the first may be no multiple of the ranks."""
    chosen, found = random.Random(unit), 0
    for _ in range(500):
        most = chosen.randint(unit, 10_000)
        fitting = [tokens <= most // 2 or chosen.random() < 0.3 for tokens in range(most + 1)]
        if chosen.random() < 0.5:
            fitting.sort(reverse=True)
        shortest = chosen.choice([tokens for tokens, fits in enumerate(fitting) if fits])
        beyond = chosen.randint(shortest + 1, most + 1)
        guess, tried = chosen.randint(shortest, beyond), []

        def planned(job, fitting=fitting, tried=tried):
            tried.append(job.tokens)
            limit = None if fitting[job.tokens] else "device"
            return SimpleNamespace(job=job, tokens=job.tokens, ranks=unit, limit=limit)

        def job_of(tokens):
            return SimpleNamespace(tokens=tokens)

        answers = planned(job_of(shortest)), beyond
        monkeypatch.setattr(longest, "most_tokens", lambda job, most=most: most)
        monkeypatch.setattr(longest, "_whole_tiles", lambda *_, answers=answers: answers)
        monkeypatch.setattr(longest, "_longest_by", lambda *_, guess=guess, **__: guess // unit * unit)
        monkeypatch.setattr(longest, "NothingFits", LookupError)
        try:
            fits, next_plan = longest.longest_context(job_of, None, planned, resolution=resolution)
        except LookupError:
            assert not fitting[unit]
            continue
        if next_plan is None:
            assert (fits.limit, fits.tokens) == (None, most // unit * unit)
        else:
            found += 1
            # Doubled steps to it, and halved ones back.
            assert len(tried) <= 30
            assert (fits.limit, next_plan.limit) == (None, "device")
            assert fits.tokens % unit == next_plan.tokens % unit == 0
            apart = next_plan.tokens - fits.tokens
            assert apart == unit or unit < apart <= fits.tokens / resolution
    assert found > 300


@pytest.mark.parametrize("tiles", [{}, {"mlp_tile": 64, "norm_tile": 64, "loss_tile": 64}])
def test_the_longest_context_holds_what_the_allocator_reserves(tiles):
    """Seen red: by its tensors alone, which leave room for a longer one; and to a whole tile, of many."""
    asked = {"ranks": 2, "device_memory": "2900MiB", **tiles}
    found = max_context(MODEL, "tiling", **asked)
    assert (found.plan.fits, found.next_plan.tokens) == (True, found.tokens + 2)
    assert found.next_plan.verdict.startswith("does not fit: device memory, though its tensors alone would")
    fresh = plan(MODEL, "tiling", tokens=found.tokens, host_memory="2TiB", **asked)
    assert (fresh.fit, fresh.device_need) == (found.plan.fit, found.plan.device_need)


def test_the_shortest_length_of_a_class_may_be_the_only_one_that_fits():
    """The next one is longer than the window, and of another class."""
    config = small_config(MistralConfig, sliding_window=1024)
    one, two = (
        plan(config, "plain", tokens=tokens, ranks=1, workspace=False).device_peak for tokens in ("1K", "2K")
    )
    found = max_context(config, "plain", ranks=1, workspace=False, device_memory=(one + two) // 2)
    assert 1024 <= found.tokens < 2048
    assert found.next_plan.limit == "device"
