"""The allocator model, by cases that were computed by hand, and by what an H100 measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

import lab
from lab.memory.categories import OTHER
from lab.models.small_copies import first_layers
from lab.planning.allocator import Allocator, count_retries, simulate, streams_of
from lab.planning.cuda_workspace import outside_workspace
from lab.units import MiB


def take(allocator, *sizes):
    """Allocate, in order."""
    return [allocator.allocate(size) for size in sizes]


def free(allocator, *held):
    for pool, block in held:
        allocator.free(pool, block)


def test_sizes_are_rounded_up_to_512_bytes():
    allocator = Allocator(expandable=True)
    take(allocator, 0, 1, 512, 513)
    assert allocator.allocated == 512 * (1 + 1 + 1 + 2)


@pytest.mark.parametrize(
    ("size", "fixed", "expandable"),
    [
        (1, 2, 2),  # a small segment
        (MiB, 2, 2),
        (MiB + 1, 20, 20),  # a large segment
        (10 * MiB - 512, 20, 20),
        (10 * MiB, 10, 20),  # its own size, rounded up to 2 MiB; or pages of 20 MiB
        (21 * MiB, 22, 40),
    ],
)
def test_a_segment_is_as_large_as_its_pool_says(size, fixed, expandable):
    for expands, reserved in ((False, fixed), (True, expandable)):
        allocator = Allocator(expands)
        take(allocator, size)
        assert allocator.reserved == reserved * MiB


def test_the_smallest_free_block_that_fits_is_taken():
    allocator = Allocator(expandable=False)
    a, _, b, _ = take(allocator, 40 * MiB, 11 * MiB, 30 * MiB, 11 * MiB)
    free(allocator, a, b)
    [(_, block)] = take(allocator, 30 * MiB)
    assert block.address == b[1].address
    assert allocator.reserved == (40 + 12 + 30 + 12) * MiB


def test_a_block_that_can_grow_is_taken_last():
    allocator = Allocator(expandable=True)
    # The segment has 10 of 100 MiB free at its end. 20 MiB in the middle fit as well as the end.
    _, middle, _ = take(allocator, 20 * MiB, 20 * MiB, 50 * MiB)
    free(allocator, middle)
    [(_, block)] = take(allocator, 5 * MiB)
    assert block.address == middle[1].address


def test_a_remainder_is_split_off_if_it_is_large_enough():
    fixed = Allocator(expandable=False)
    [held] = take(fixed, 40 * MiB)
    free(fixed, held)
    [held] = take(fixed, 39 * MiB)
    assert fixed.allocated == 40 * MiB  # 1 MiB is not split off a large block
    free(fixed, held)
    take(fixed, 39 * MiB - 512, MiB + 512)
    assert (fixed.allocated, fixed.reserved) == (40 * MiB, 40 * MiB)
    expandable = Allocator(expandable=True)
    take(expandable, 39 * MiB, MiB)
    assert expandable.allocated == 40 * MiB  # the small one is in a pool of its own
    assert expandable.reserved == 42 * MiB
    take(expandable, MiB - 512)
    assert (expandable.allocated, expandable.reserved) == (41 * MiB - 512, 42 * MiB)  # both are in 2 MiB


def test_free_neighbours_are_merged_within_a_segment_alone():
    allocator = Allocator(expandable=False)
    [whole] = take(allocator, 60 * MiB)
    free(allocator, whole)
    first, middle, last = take(allocator, 20 * MiB, 20 * MiB, 20 * MiB)
    free(allocator, first, last)
    take(allocator, 30 * MiB)
    assert allocator.reserved == (60 + 30) * MiB  # two pieces of 20 MiB
    free(allocator, middle)
    take(allocator, 60 * MiB)
    assert allocator.reserved == (60 + 30) * MiB
    # Segments that follow each other are never one.
    other = Allocator(expandable=False)
    free(other, *take(other, 20 * MiB, 20 * MiB))
    take(other, 40 * MiB)
    assert other.reserved == 80 * MiB


def test_an_expandable_segment_grows_by_what_its_free_end_lacks():
    allocator = Allocator(expandable=True)
    _, end = take(allocator, 20 * MiB, 40 * MiB)
    free(allocator, end)
    take(allocator, 70 * MiB)
    assert allocator.reserved == (60 + 40) * MiB  # 30 MiB more, in pages of 20 MiB


def test_each_stream_has_pools_of_its_own():
    allocator = Allocator(expandable=True)
    held = allocator.allocate(40 * MiB, "compute")
    free(allocator, held)
    allocator.allocate(40 * MiB, "reduce")
    assert allocator.reserved == 80 * MiB


def test_near_the_limit_whole_segments_that_are_cached_are_given_back():
    allocator = Allocator(expandable=False, limit=100 * MiB)
    whole, split = take(allocator, 40 * MiB, 40 * MiB)
    free(allocator, whole, split)
    take(allocator, 10 * MiB)  # of one of the two
    take(allocator, 60 * MiB)
    assert (allocator.retries, allocator.reserved) == (1, 100 * MiB)
    with pytest.raises(MemoryError, match="32505856 bytes more than 104857600 of 104857600"):
        take(allocator, 31 * MiB)


def test_near_the_limit_whole_pages_are_given_back_and_mapped_elsewhere():
    allocator = Allocator(expandable=True, limit=140 * MiB)
    _, hole, _ = take(allocator, 10 * MiB, 60 * MiB, 30 * MiB)
    free(allocator, hole)
    # The hole has the pages 20 to 60, and 10 MiB on either side that are not whole pages.
    [(_, block)] = take(allocator, 80 * MiB)
    assert (allocator.retries, allocator.reserved) == (1, 140 * MiB)
    assert block.address == 100 * MiB
    # What is left of the hole, and its pages, are one block again once the pages are mapped.
    allocator.limit = 180 * MiB
    [(_, block)] = take(allocator, 55 * MiB)
    assert (block.address, allocator.reserved) == (10 * MiB, 180 * MiB)


def test_the_pages_that_a_free_end_lacks_are_all_that_the_limit_holds():
    """Seen red: a limit that is compared with the whole tensor."""
    allocator = Allocator(expandable=True, limit=100 * MiB)
    _, end = take(allocator, 20 * MiB, 60 * MiB)
    free(allocator, end)
    take(allocator, 80 * MiB)
    assert (allocator.retries, allocator.reserved) == (0, 100 * MiB)


@pytest.fixture(scope="module")
def plans():
    """The plans of the first two layers of llama3-8b that an H100 has measured."""
    two_layers = first_layers("llama3-8b", 2, config=lab.models.config_of("llama3-8b"))
    return {
        (recipe, tokens): lab.plan(two_layers, recipe, tokens=tokens, ranks=8)
        for recipe, tokens in (("plain", "16K"), ("fsdp", "16K"), ("tiling", "128K"), ("upipe", "128K"))
    }


@pytest.mark.parametrize(
    ("recipe", "tokens", "allocated", "reserved"),
    [
        ("plain", "16K", 52320736256, 67446505472),
        ("fsdp", "16K", 37144497152, 45279608832),
        ("tiling", "128K", 9713466368, 17156800512),
        ("upipe", "128K", 9617016832, 16886267904),
    ],
)
def test_the_bytes_are_those_that_an_h100_measured(plans, recipe, tokens, allocated, reserved):
    allocator = simulate(plans[recipe, tokens].timeline)
    # The step allocates 512 bytes that no tensor of the plan has.
    assert (allocator.allocated_peak, allocator.reserved) == (allocated - 512, reserved)


def test_what_a_kernel_takes_inside_is_allocated_while_it_runs(plans):
    timeline = plans["fsdp", "16K"].timeline
    device = timeline.device.copy()
    device[timeline.total.argmax(), OTHER] += 20 * 1024 * MiB
    plain, more = simulate(timeline), simulate(replace(timeline, device=device))
    assert more.allocated_peak == plain.allocated_peak + 20 * 1024 * MiB


def test_a_limit_between_the_allocated_and_the_reserved_bytes_costs_retries(plans):
    timeline, outside = plans["fsdp", "16K"].timeline, outside_workspace(8)
    free_of_limit = simulate(timeline)
    for limit in (free_of_limit.reserved, free_of_limit.reserved - 1, 39 * 1024 * MiB):
        cramped = simulate(timeline, limit=limit)
        assert (cramped.retries == 0) == (limit == free_of_limit.reserved)
        assert cramped.allocated_peak == free_of_limit.allocated_peak
        assert count_retries(timeline, 8, limit + outside, expandable=True) == cramped.retries
    assert count_retries(timeline, 8, free_of_limit.allocated_peak - 1 + outside, expandable=True) is None


def test_fsdp_gathers_and_reduces_in_streams_of_its_own(plans):
    storages = plans["fsdp", "16K"].timeline.storages
    streams = streams_of(plans["fsdp", "16K"].timeline)
    gathers = [int(storages.size[entry]) for entry, stream in streams.items() if stream == "all-gather"]
    reduces = [int(storages.size[entry]) for entry, stream in streams.items() if stream == "reduce"]
    # The last unit, and each layer once in forward and once in backward: the whole and this rank's part.
    last, layer = 2 * (2 * 128256 + 1) * 4096, 2 * 218112000
    assert sorted(gathers) == sorted(
        -(-size // 512) * 512 for whole in (last, *[layer] * 4) for size in (whole, whole // 8)
    )
    assert sorted(reduces) == sorted(-(-size // 512) * 512 for size in (last // 4, layer // 4, layer // 4))


def test_a_plan_says_what_is_reserved(plans):
    plan = plans["fsdp", "16K"]
    assert plan.to_json()["reserved_peak"] == 45279608832 + outside_workspace(8)
    assert plan.reserved_peak(expandable=False) == (
        simulate(plan.timeline, expandable=False).reserved + outside_workspace(8)
    )
    assert lab.plan("tiny", "fsdp", tokens=256, ranks=2, workspace=False).reserved_peak() is None
