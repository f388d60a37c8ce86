"""The cheapest knobs that would free so many bytes: held against plans, and in words."""

from dataclasses import replace

import pytest

from lab.errors import LabError, RecipeError
from lab.planning.freeing import CHEAPEST_FIRST, Freed, cheapest_changes
from lab.planning.plan import plan_job
from lab.planning.whole_step import walk
from lab.recipe.jobs import Machine, make_job
from lab.recipe.recipe import BY_NAME
from lab.units import MiB
from lab_tests.support.models import quick_config

MODEL = quick_config()


@pytest.fixture(scope="module")
def planned():
    return {}


@pytest.fixture
def plan(planned):
    def plan(job):
        if job.recipe not in planned:
            planned[job.recipe] = plan_job(job, Machine(workspace=False))
        return planned[job.recipe]

    return plan


def job_of(rung, **knobs):
    return make_job(MODEL, rung, tokens=2048, ranks=2, **knobs)


def freed_by(plan, job, changes):
    return plan(job).device_peak - plan(replace(job, recipe=replace(job.recipe, **changes))).device_peak


def fresh_peak(job):
    """The device peak of a step whose code is run again."""
    found = walk(job, workspace=False)
    return max(found.facts.start.device, *(step.timeline.device_peak for step in found.steps))


def test_the_knobs_are_fields_of_a_recipe():
    assert set(CHEAPEST_FIRST) <= set(BY_NAME)


@pytest.mark.long
@pytest.mark.parametrize("rung", ["ulysses", "checkpoint"])
def test_what_is_proposed_frees_as_much_and_no_part_of_it_does(rung, plan):
    job = job_of(rung)
    most = cheapest_changes(job, "1TiB", plan)
    assert not most.enough
    assert most.device == freed_by(plan, job, most.changes) > 0
    freshly = fresh_peak(job) - fresh_peak(replace(job, recipe=replace(job.recipe, **most.changes)))
    assert freshly == most.device
    for wanted in (1, most.device // 2, most.device):
        seen = []
        found = cheapest_changes(job, wanted, plan, seen.append)
        assert found.enough
        assert found.device == freed_by(plan, job, found.changes) >= wanted
        assert len(seen) <= 24
        for name in found.changes:
            fewer = {other: value for other, value in found.changes.items() if other != name}
            try:
                assert freed_by(plan, job, fewer) < wanted
            except RecipeError:
                continue


@pytest.mark.long
def test_one_knob_comes_before_two_the_cheapest_first_with_its_mildest_value(plan):
    job = job_of("ulysses")
    tiles = {tile: freed_by(plan, job, {"loss_tile": tile}) for tile in (512, 256, 128, 64)}
    assert tiles[512] > 0
    assert cheapest_changes(job, 1, plan).changes == {"loss_tile": 512}
    if tiles[512] < tiles[64]:
        mildest = next(tile for tile, freed in tiles.items() if freed >= tiles[64])
        assert cheapest_changes(job, tiles[64], plan).changes == {"loss_tile": mildest}
    checkpointed = freed_by(plan, job, {"checkpoint": True})
    assert len(cheapest_changes(job, checkpointed, plan).changes) == 1


@pytest.mark.long
def test_a_knob_that_the_recipe_forbids_is_not_proposed(plan):
    job = job_of("upipe", compile="norms")
    changes = cheapest_changes(job, "1TiB", plan).changes
    assert changes
    assert "stream" not in changes


def test_the_answer_is_one_line():
    freed = Freed(MiB, {"loss_tile": 512, "checkpoint": True, "mlp_tile": None}, 2 * MiB, MiB)
    changes = "loss_tile=512, checkpoint=true, mlp_tile=none: 2.00 MiB less at the peak, and 1.00 MiB more on"
    assert freed.text == f"set {changes} the host"
    assert replace(freed, wanted=4 * MiB).text == (
        f"no set of knobs frees 4.00 MiB; the most is with {changes} the host"
    )
    assert Freed(MiB, {}, 0, 0).text == "no set of knobs frees 1.00 MiB; none makes the peak smaller"


@pytest.mark.parametrize("size", ["", "lots", "4 GB", "-1GiB", "0", 0])
def test_a_size_that_is_none_is_refused(size, plan):
    with pytest.raises(LabError, match="is not an amount of memory: write 80GiB"):
        cheapest_changes(job_of("fsdp"), size, plan)


@pytest.mark.long
def test_a_larger_degree_is_tried_with_another_chunk_than_that_of_the_degree_before(plan):
    """The smallest chunk at ulysses=1 has one head, which no degree of two divides."""
    most = cheapest_changes(job_of("fsdp"), "1TiB", plan)
    assert most.changes["ulysses"] == 2
