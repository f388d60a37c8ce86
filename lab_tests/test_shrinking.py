"""The knob that is named for each tensor at the peak makes it smaller, or removes it."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lab.memory.categories import CATEGORIES
from lab.planning.plan import plan_job
from lab.recipe.jobs import Machine, make_job
from lab.recipe.ladder import RECIPE_NAMES
from lab_tests.support.models import quick_config

pytestmark = pytest.mark.long

MODEL = quick_config(3)
MACHINE = Machine(workspace=False)


def changed(job, knob):
    """The job with a setting such as "a smaller mlp_tile"."""
    if knob in ("more ranks", "a larger ulysses or ring"):
        named = job.recipe_name if knob == "more ranks" else "ulysses"
        return make_job(MODEL, named, tokens=job.tokens, ranks=job.ranks * (1 + (knob == "more ranks")))
    recipe = job.recipe
    if knob == "a larger segment":
        return replace(job, recipe=replace(recipe, segment=3))
    name = re.sub("^(set|a smaller) ", "", knob).split("=")[0]
    value = {"fsdp": True, "checkpoint": True, "offload": "inputs", "head_chunk": recipe.ulysses}.get(
        name, 32
    )
    needed = {"checkpoint": True} if name == "offload" else {}
    return replace(job, recipe=replace(recipe, **{name: value}, **needed))


def most_held(plan):
    """The most bytes at once of the tensors of an operator, in the modules of one place in all layers."""
    timeline, held = plan.timeline, {}
    storages = timeline.storages
    for n, first in enumerate(storages.first):
        if storages.category[n] >= len(CATEGORIES):
            continue
        kind = storages.kinds[storages.kind[n]]
        key = place_of(kind.op, timeline.modules[storages.module[n]], kind.name)
        bytes_of = held.setdefault(key, np.zeros(len(timeline) + 1, dtype=np.int64))
        bytes_of[first] += storages.size[n]
        bytes_of[storages.end[n]] -= storages.size[n]
    return {key: int(np.cumsum(bytes_of).max()) for key, bytes_of in held.items()}


def place_of(op, module, name):
    return op, re.sub(r"layers\.\d+", "layers", module), re.sub(r"layers\.\d+", "layers", name)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_the_named_knob_makes_the_tensor_smaller_or_removes_it(name):
    job = make_job(MODEL, name, tokens=1024, ranks=2)
    plan = plan_job(job, MACHINE)
    before, after = most_held(plan), {}
    holders = [one for one in plan.holders() if one.knob and one.bytes > plan.device_peak // 100]
    assert holders
    for holder in holders:
        if holder.knob not in after:
            after[holder.knob] = most_held(plan_job(changed(job, holder.knob), MACHINE))
        key = place_of(holder.op, holder.module, holder.name)
        assert after[holder.knob].get(key, 0) < before[key], (holder.knob, holder)
