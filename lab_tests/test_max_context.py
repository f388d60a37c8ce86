"""The longest context that fits, and the plans of its search."""

import pytest

from lab.errors import LabError
from lab.models import config_of
from lab.planning.fit import fit
from lab.planning.max_context import RESOLUTION, max_context
from lab.planning.plan import plan
from lab.recipe.ladder import TILE
from lab.techniques.host_memory import reserve
from lab.units import Ki, MiB

pytestmark = pytest.mark.slow

MODEL = config_of("tiny")
MODEL.num_hidden_layers = 2
SMALL = {"ranks": 4, "workspace": False, "host_memory": "21GiB"}


@pytest.fixture(scope="module")
def search():
    tried = []
    return max_context(MODEL, "checkpoint", device_memory="96MiB", watch=tried.append, **SMALL), tried


def test_the_longest_context_fits_and_the_next_one_does_not(search):
    found, _ = search
    step = max(Ki, found.tokens // RESOLUTION)
    longest = plan(MODEL, "checkpoint", tokens=found.tokens, device_memory="96MiB", **SMALL)
    beyond = plan(MODEL, "checkpoint", tokens=found.tokens + step, device_memory="96MiB", **SMALL)
    assert (longest.fits, beyond.fits) == (True, False)
    assert found.limit == beyond.limit == "device"
    assert found.plan.device_peak == longest.device_peak <= 96 * MiB


def test_every_plan_of_the_search_is_seen_and_there_are_few(search):
    found, tried = search
    assert found.plan in tried
    assert found.next_plan in tried
    assert len(tried) <= 10
    assert found.to_json()["tokens"] == found.tokens
    assert found.to_json()["host_peak"] == found.plan.host_peak


def test_the_host_can_be_what_binds():
    found = max_context(
        MODEL, "offload", device_memory="1GiB", **{**SMALL, "host_memory": reserve(4) + 8 * MiB}
    )
    assert found.limit == "host"
    assert found.plan.host_peak_per_node <= 8 * MiB < found.next_plan.host_peak_per_node


def test_a_ladders_name_gives_each_length_its_own_tiles():
    tried = []
    max_context(MODEL, "tiling", device_memory="64MiB", watch=tried.append, **SMALL)
    assert {p.recipe.loss_tile for p in tried} == {min(TILE, p.tokens // 4 // 4) for p in tried}


def test_no_host_memory_is_refused():
    for verb in (max_context, fit):
        with pytest.raises(LabError, match=r"^host_memory=None: give the memory of a node, such as 2TiB$"):
            verb(MODEL, ranks=4, host_memory=None, **{"tokens": 64} if verb is fit else {})


def test_what_never_fits_and_what_always_does():
    with pytest.raises(
        LabError,
        match=r"^not even 1K tokens fit: .* of device memory needed, 8\.00 MiB given; \w+ .* MiB; more ranks "
        r"or the recipe 'long' need less$",
    ):
        max_context(MODEL, "plain", device_memory="8MiB", **SMALL)
    with pytest.raises(LabError, match=r"tokens still fit: give less memory, or another recipe$"):
        max_context(MODEL, "checkpoint", device_memory="1000TiB", **SMALL)
