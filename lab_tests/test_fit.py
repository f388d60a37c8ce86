"""The recipes that fit a model on given ranks, fastest first."""

import pytest

from lab.errors import LabError
from lab.models import config_of
from lab.planning.fit import candidates, fit, pareto_front
from lab.planning.plan import plan
from lab.units import MiB

pytestmark = pytest.mark.slow

MODEL = config_of("tiny")
MODEL.num_hidden_layers, MODEL.num_attention_heads, MODEL.num_key_value_heads = 1, 4, 4
MODEL.head_dim = 64
SMALL = {"tokens": 2048, "ranks": 4, "host_memory": "1GiB", "workspace": False}


@pytest.fixture(scope="module")
def seen():
    return []


@pytest.fixture(scope="module")
def plans(seen):
    return fit(MODEL, device_memory="64MiB", watch=lambda *it: seen.append(it), **SMALL)


def test_all_returned_recipes_fit_and_the_fastest_is_first(plans):
    assert len(plans) > 1
    assert all(p.fits and p.device_peak <= 64 * MiB for p in plans)
    seconds = [p.step_seconds for p in plans]
    assert seconds == sorted(seconds)


def test_nothing_that_fits_is_left_out(plans):
    base = plan(MODEL, "tiling", tokens=2048, ranks=4, workspace=False).recipe
    fitting = {
        recipe
        for recipe in candidates(base, heads=4)
        if recipe.head_chunk in (None, 4) and plan(MODEL, recipe, device_memory="64MiB", **SMALL).fits
    }
    assert fitting == {p.recipe for p in plans if p.recipe.head_chunk in (None, 4)}


def test_progress_is_told(plans, seen):
    assert [number for number, _, _ in seen] == list(range(1, len(seen) + 1))
    assert {of for _, of, _ in seen} == {len(seen)}
    assert set(plans) <= {made for _, _, made in seen}


def test_each_step_down_needs_less_than_every_faster_one(plans):
    down = pareto_front(plans)
    peaks = [p.device_peak for p in down]
    assert down[0] is plans[0]
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] == min(p.device_peak for p in plans)


def test_where_nothing_fits_the_leanest_is_named():
    with pytest.raises(
        LabError, match=r"^no recipe fits 2K tokens on 4 ranks: the leanest needs .* of 8\.00 MiB"
    ):
        fit(MODEL, device_memory="8MiB", **SMALL)
