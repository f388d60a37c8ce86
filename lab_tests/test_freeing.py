"""The cheapest knobs that would free so many bytes: against every combination, and in words."""

from dataclasses import replace
from itertools import product

import pytest

from lab import models
from lab.errors import LabError, RecipeError
from lab.planning.closed_form import estimate_job
from lab.planning.freeing import CHEAPEST_FIRST, cheapest_changes
from lab.recipe.jobs import make_job
from lab.units import GiB, MiB

TOKENS, RANKS = 1536, 4


def job_of(rung, model="tiny", tokens=TOKENS, ranks=RANKS, **knobs):
    shape = models.shape_of(model)
    return shape, make_job(model, rung, tokens=tokens, ranks=ranks, shape=shape, **knobs)


def freed_by(shape, job, changes):
    recipe = replace(job.recipe, **changes)
    recipe.check(shape, job.ranks)
    after = estimate_job(shape, replace(job, recipe=recipe))
    return estimate_job(shape, job).device_peak - after.device_peak


def all_changes(job):
    """Every combination of some values of each knob, as changes."""
    recipe = job.recipe
    values = {
        "fsdp": {True, recipe.fsdp},
        "checkpoint": {True, recipe.checkpoint},
        "offload": ["none", "inputs"],
        "degrees": [(recipe.ulysses, recipe.ring), (4, 1), (2, 2)],
        "head_chunk": [recipe.head_chunk, 16, 4],
        "loss_tile": [recipe.loss_tile, 256, 32],
        "norm_tile": [recipe.norm_tile, 256, 32],
        "mlp_tile": [recipe.mlp_tile, 256, 32],
    }
    for chosen in product(*values.values()):
        fields = dict(zip(values, chosen, strict=True))
        fields["ulysses"], fields["ring"] = fields.pop("degrees")
        yield {name: value for name, value in fields.items() if value != getattr(recipe, name)}


def knobs_of(changes):
    """The degrees are one knob."""
    return set(changes) - ({"ring"} if "ulysses" in changes else set())


@pytest.mark.parametrize("rung", ["fsdp", "ulysses", "checkpoint"])
def test_no_smaller_set_frees_as_much(rung):
    shape, job = job_of(rung)
    every = []
    for changes in all_changes(job):
        try:
            every.append((freed_by(shape, job, changes), changes))
        except RecipeError:
            continue
    most = max(freed for freed, _ in every)
    assert most > MiB
    for wanted in (1, most // 3, most // 2, most * 9 // 10, most):
        found = cheapest_changes(shape, job, wanted)
        assert found.enough
        assert found.device == freed_by(shape, job, found.changes) >= wanted
        assert len(knobs_of(found.changes)) <= min(
            len(knobs_of(changes)) for freed, changes in every if freed >= wanted
        )


def test_of_sets_of_one_size_the_cheapest_comes_first_with_its_mildest_value():
    shape, job = job_of("ulysses", "llama3-8b", "256K", 8)
    assert cheapest_changes(shape, job, "4 GiB").changes == {"loss_tile": 16384}
    assert freed_by(shape, job, {"loss_tile": 16384}) < 40 * GiB <= freed_by(shape, job, {"loss_tile": 8192})
    assert cheapest_changes(shape, job, 40 * GiB).changes == {"loss_tile": 8192}
    assert freed_by(shape, job, {"norm_tile": 512, "loss_tile": 512}) < 100 * GiB
    assert cheapest_changes(shape, job, "100GiB").changes == {"mlp_tile": 16384}
    assert CHEAPEST_FIRST.index("mlp_tile") < CHEAPEST_FIRST.index("checkpoint")


def test_the_answer_is_one_line():
    shape, job = job_of("ulysses", "llama3-8b", "256K", 8)
    freed = cheapest_changes(shape, job, "4 GiB")
    assert freed.text == "set loss_tile=16384: 39.7 GiB less at the peak, by the closed form"
    offloaded = cheapest_changes(shape, job, "240GiB").text
    assert "checkpoint=true: " in offloaded
    assert "stream=8192, " in offloaded
    assert ", and 8.50 GiB more on the host, by the closed form" in offloaded


def test_where_nothing_frees_as_much_the_most_is_said():
    shape, job = job_of("ulysses", "llama3-8b", "256K", 8)
    found = cheapest_changes(shape, job, "1TiB")
    assert not found.enough
    assert found.device == freed_by(shape, job, found.changes)
    assert found.text.startswith("no set of knobs frees 1.00 TiB; the most is 243.8 GiB with ")
    # Each change of it frees something beside the others.
    for name in found.changes:
        fewer = {other: value for other, value in found.changes.items() if other != name}
        if name != "checkpoint":  # which the offload needs
            assert freed_by(shape, job, fewer) < found.device
    shape, job = job_of("streamed", "llama3-8b", "5M", 8, ulysses=2, ring=4)
    none = cheapest_changes(shape, job, "1GiB")
    assert none.changes == {}
    assert none.text == "no set of knobs frees 1.00 GiB; none makes the peak smaller, by the closed form"


def test_offloaded_layers_can_be_streamed_and_take_the_tile_of_the_mlps_place():
    shape, job = job_of("upipe", "llama3-8b", "5M", 8)
    found = cheapest_changes(shape, job, "8GiB")
    assert found.changes == {"stream": 16384, "mlp_tile": None}
    assert found.text.startswith("set stream=16384, mlp_tile=none: 23.2 GiB less at the peak, and 15.1 GiB")


def test_a_knob_that_the_recipe_forbids_is_not_proposed():
    shape, job = job_of("ulysses", "llama3-8b", "256K", 8, loss_kernel="liger", ulysses_backend="deepspeed")
    for size in ("4GiB", "40GiB", "1TiB"):
        changes = cheapest_changes(shape, job, size).changes
        assert changes
        assert not {"loss_tile", "head_chunk", "ring"} & set(changes)
        freed_by(shape, job, changes)


@pytest.mark.parametrize("size", ["", "lots", "4 GB", "-1GiB", "0", 0])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(LabError, match="is not an amount of memory: write 80GiB"):
        cheapest_changes(*job_of("fsdp"), size)
