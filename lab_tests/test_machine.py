"""The machine is the one that was named: its memory, what a host keeps of it, and pageable copies."""

from dataclasses import replace

import pytest

import lab
from lab.models import config_of
from lab.planning.costs import Costs
from lab.planning.hardware import HARDWARE, hardware, make_machine
from lab.recipe.jobs import Machine
from lab.techniques.host_memory import PINNABLE_SHARE, RANK_RESERVE, SYSTEM_RESERVE, reserve
from lab.units import GiB, MiB, TiB

MODEL = config_of("tiny")
MODEL.num_hidden_layers = 2
ASKED = {"tokens": 256, "ranks": 4}


@pytest.mark.parametrize("device", HARDWARE)
def test_a_device_gives_its_memory_and_a_number_by_hand_is_taken_whole(device):
    assert make_machine(device=device).device_memory == int(HARDWARE[device].memory.value)
    assert make_machine(device=device, device_memory="80GiB").available("device", 8) == 80 * GiB


@pytest.mark.long
def test_every_verb_has_the_memory_of_the_device():
    of_h100, of_4090 = 81089 * MiB, int(HARDWARE["rtx4090"].memory.value)
    assert lab.plan(MODEL, "upipe", **ASKED).machine.device_memory == of_h100
    assert lab.plan(MODEL, "upipe", device="rtx4090", **ASKED).machine.device_memory == of_4090
    assert lab.show.tuner("tiny", tokens=1024, ranks=4).state.device_memory == of_h100


@pytest.mark.long
def test_fit_and_max_context_fill_the_device_that_was_named():
    found = lab.max_context(MODEL, "plain", ranks=1, device="rtx4090")
    memory = HARDWARE["rtx4090"].memory.value
    assert 0.98 * memory < found.plan.device_need <= memory < found.next_plan.device_need
    assert found.plan.machine.device_memory == int(HARDWARE["rtx4090"].memory.value)


def test_a_host_keeps_one_reserve_and_the_verdict_says_both_numbers():
    assert reserve(8) == SYSTEM_RESERVE + 8 * RANK_RESERVE == 36 * GiB
    plan = lab.plan(MODEL, "offload", host_memory="64GiB", **ASKED)
    assert plan.machine.host_memory == 64 * GiB
    assert plan.available("host") == 44 * GiB
    assert plan.verdict == (
        "fits (64.0 GiB of host memory, of which the system and the processes leave 44.0 GiB)"
    )
    needs = plan.host_peak_per_node
    for left, limit in ((needs, None), (needs - 1, "host")):
        machine = replace(plan.machine, host_memory=reserve(4) + left)
        assert replace(plan, machine=machine).limit == limit
    # A node of more ranks than there are keeps less; a host that is smaller than its reserve has nothing.
    assert Machine(host_memory=TiB, ranks_per_node=2).available("host", 4) == TiB - reserve(2)
    assert Machine(host_memory=GiB).available("host", 4) == 0
    assert Machine().available("host", 4) is None
    assert lab.plan(MODEL, "fsdp", host_memory="64GiB", **ASKED).verdict == "fits"


def test_bytes_beyond_what_may_be_pinned_are_copied_at_the_rate_of_pageable_memory():
    h100 = hardware("h100")
    pinned_rate = h100.host_link.value * h100.host_link_share.value
    free = lab.plan(MODEL, "offload", **ASKED)
    assert free.costs.host_seconds == pytest.approx(free.costs.host_bytes / pinned_rate, rel=1e-9)
    # A host of which the ranks may pin a quarter of what they copy.
    host = int(free.host_peak * 4 / 4 / PINNABLE_SHARE)
    plan = lab.plan(MODEL, "offload", host_memory=host, **ASKED)
    pageable = plan.costs.host_bytes * (1 - plan.machine.pinnable(4) / plan.host_peak)
    assert pageable == pytest.approx(0.75 * plan.costs.host_bytes, rel=1e-3)
    assert plan.costs.host_seconds == pytest.approx(
        (plan.costs.host_bytes - pageable) / pinned_rate + pageable / h100.pageable_rate.value, rel=1e-9
    )
    assert plan.step_seconds >= plan.costs.host_seconds
    assert lab.plan(MODEL, "offload", host_memory="1TiB", **ASKED).costs == free.costs


def test_adams_state_on_the_host_is_not_pinned():
    """It is half of the state of training there, and no copy reads it."""
    free = lab.plan(MODEL, "fsdp", optimizer="host", **ASKED)
    enough = int(free.host_peak * 4 / PINNABLE_SHARE * 0.6)
    assert lab.plan(MODEL, "fsdp", optimizer="host", host_memory=enough, **ASKED).costs == free.costs


def test_tiles_on_a_disk_are_copied_as_pageable_memory():
    h100 = hardware("h100")
    rate = h100.pageable_rate.value
    assert rate == 6.79e9
    assert hardware("a100").pageable_rate.value == 2.8e9
    costs = Costs(host_bytes=100, host_seconds=1.0, tile_writes=30, tile_reads=10, disk_seconds=2.0)
    assert costs.with_pageable(h100, 0.0).host_seconds == pytest.approx(0.6 + 40 / rate)
    assert costs.with_pageable(h100, 0.5).host_seconds == pytest.approx(0.3 + 70 / rate)
    assert replace(costs, disk_seconds=0.0).with_pageable(h100, 0.0).host_seconds == 1.0
    assert Costs().with_pageable(h100, 1.0) == Costs()
