"""Random models, recipes and lengths on 1, 2 and 4 ranks: right, or refused with what works."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from cluster.ranks import Cluster
from lab.bench import draws as module
from lab.bench.draws import (
    RANKS,
    Draw,
    draws,
    examine,
    examine_closed_form,
    follow_suggestions,
    suggestion,
)
from lab.planning.closed_form import Estimate
from lab.recipe.recipe import Recipe


@pytest.fixture(scope="module")
def clusters(ranks4):
    with ExitStack() as stack:
        yield {4: ranks4} | {n: stack.enter_context(Cluster(ranks=n)) for n in RANKS if n != 4}


@pytest.mark.slow
@seed(3866)
@settings(
    max_examples=6,
    phases=[Phase.generate],
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(draw=draws())
def test_every_draw_is_right_or_refused(clusters, draw):
    """The same six in each run; ``lab bench inputs --draws 1000`` examines as many as it is asked for."""
    assert examine(draw, clusters[draw.ranks]) in ("right", "refused")


def make_draw(**changed):
    shape = {
        "family": "llama", "heads": 24, "kv_heads": 6, "head_dim": 10, "hidden": 48, "inner": 72, "layers": 2,
        "vocabulary": 101, "tied": False, "tokens": 40, "rows": 1, "ranks": 2, "knobs": {},
    }  # fmt: skip
    return Draw(**{**shape, **changed})


@pytest.mark.slow
def test_a_wrong_plan_or_a_wrong_gradient_is_found(ranks4, monkeypatch):
    draw = make_draw(ranks=4, knobs={"fsdp": True, "ulysses": 2, "checkpoint": True, "offload": "inputs"})
    assert examine(draw, ranks4) == "right"
    planned = partial(module.plan, draw.model, Recipe(**draw.knobs))
    monkeypatch.setattr(module, "plan", lambda *_, **told: planned(**{**told, "tokens": 44}))
    assert examine(draw, ranks4).startswith("WRONG: device peak planned ")
    monkeypatch.undo()
    monkeypatch.setitem(module.TOLERANCES, None, 1e-30)
    assert examine(draw, ranks4).startswith("WRONG: a gradient or the loss is off by ")


@pytest.mark.slow
@seed(24)
@settings(max_examples=16, phases=[Phase.generate], deadline=None, database=None)
@given(draw=draws())
def test_the_closed_form_is_near_the_plan_of_every_draw(draw):
    """The same sixteen in each run, of every family; of two layers at most, to save time."""
    recipe, _ = follow_suggestions(draw)
    assert examine_closed_form(replace(draw, layers=min(draw.layers, 2)), recipe) is None


def planned_step(**peaks):
    return SimpleNamespace(timeline=SimpleNamespace(**peaks))


@pytest.mark.parametrize(
    ("peaks", "wrong"),
    [
        ((100_000, 50_000), None),
        ((104_900, 52_400), None),
        ((105_100, 50_000), "WRONG: closed form, device peak estimated 105100, planned 100000"),
        ((94_900, 50_000), "WRONG: closed form, device peak estimated 94900, planned 100000"),
        ((100_000, 47_400), "WRONG: closed form, host peak estimated 47400, planned 50000"),
    ],
)
def test_an_estimate_that_is_not_near_the_plan_is_found(monkeypatch, peaks, wrong):
    monkeypatch.setattr(module, "plan", lambda *_, **__: planned_step(device_peak=100_000, host_peak=50_000))
    monkeypatch.setattr(
        module, "estimate", lambda *_, **__: Estimate({"all": {"all": {"other": peaks[0]}}}, peaks[1])
    )
    assert examine_closed_form(make_draw(), Recipe()) == wrong


def test_of_a_tiny_step_the_estimate_may_be_off_by_a_kibibyte(monkeypatch):
    monkeypatch.setattr(module, "plan", lambda *_, **__: planned_step(device_peak=2000, host_peak=0))
    for estimated, wrong in ((2000 - 1024, False), (2000 + 1025, True)):
        made = Estimate({"all": {"all": {"other": estimated}}}, 0)
        monkeypatch.setattr(module, "estimate", lambda *_, made=made, **__: made)
        assert (examine_closed_form(make_draw(), Recipe()) is not None) == wrong


@pytest.mark.parametrize(
    "knobs",
    [
        {"ulysses": 5},
        {"ulysses": 2, "ring": 2},
        {"ulysses": 2, "head_chunk": 3},
        {"offload": "inputs"},
        {"overlap": True},
        {"compile": "tiles"},
        {"stream": 5, "checkpoint": True, "offload": "inputs", "mlp_tile": 3},
        {"segment": 2},
        {"ulysses": 2, "ulysses_backend": "deepspeed", "head_chunk": 4},
    ],
)
def test_following_a_refusal_leads_to_a_recipe_that_is_not_refused(knobs):
    draw = make_draw(knobs=knobs)
    recipe, refused = follow_suggestions(draw)
    assert refused
    recipe.check(draw.config(), draw.ranks)


def test_a_legal_draw_is_its_recipe_and_a_refusal_without_a_suggestion_is_found():
    assert follow_suggestions(make_draw(knobs={"ulysses": 2})) == (Recipe(ulysses=2), False)
    assert suggestion("ulysses=5: it is odd", {"ulysses": 5}) == {}
