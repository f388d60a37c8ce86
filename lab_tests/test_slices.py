"""The loop over tiles: a plan that runs a few of them has the figures of one that runs all."""

import contextlib
from typing import Any

import pytest
from torch._subclasses import FakeTensorMode
from transformers import MistralConfig

from lab.memory.timeline import Timeline
from lab.planning import fake_step as walking
from lab.recipe.jobs import Job, Machine, make_job
from lab.recipe.recipe import Recipe
from lab.techniques.slices import causal_slices, repetitions, short_loops, slices
from lab.units import Ki
from lab_tests.support.costs import walked
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config


@pytest.mark.parametrize(
    ("length", "tile", "expected"),
    [
        (20, 8, [(0, 8), (8, 8), (16, 4)]),
        (20, 5, [(0, 5), (5, 5), (10, 5), (15, 5)]),
        (20, 20, [(0, 20)]),
        (3, 8, [(0, 3)]),
    ],
)
def test_tiles_cover_the_sequence_once_and_in_order(length, tile, expected):
    assert list(slices(length, tile)) == expected
    assert repetitions() == 1


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (50, [(0, 8, 1), (8, 8, 5), (48, 2, 1)]),
        (56, [(0, 8, 1), (8, 8, 5), (48, 8, 1)]),
        (32, [(0, 8, 1), (8, 8, 2), (24, 8, 1)]),
        (20, [(0, 8, 1), (8, 8, 1), (16, 4, 1)]),
        (9, [(0, 8, 1), (8, 1, 1)]),
    ],
)
def test_shortened_the_second_tile_stands_for_all_between(length, expected):
    with FakeTensorMode(), short_loops():
        assert [(*tile, repetitions()) for tile in slices(length, 8)] == expected
        assert sum(size * count for _, size, count in expected) == length
    assert len(list(slices(50, 8))) == 7


def test_a_later_tile_stands_for_the_others_if_more_at_the_beginning_are_different():
    with FakeTensorMode(), short_loops():
        found = [[(*tile, repetitions()) for tile in slices(n, 8, different=2)] for n in (50, 32)]
    assert found[0] == [(0, 8, 1), (8, 8, 1), (16, 8, 4), (48, 2, 1)]
    assert found[1] == [(0, 8, 1), (8, 8, 1), (16, 8, 1), (24, 8, 1)]


def test_loops_in_loops_multiply():
    with FakeTensorMode(), short_loops():
        stands_for = [repetitions() for _ in slices(70, 10) for _ in slices(6, 1)]
    assert stands_for == [1, 4, 1, 5, 20, 5, 1, 4, 1]
    assert sum(stands_for) == 7 * 6
    assert repetitions() == 1


def pairs(length, tile):
    return [(*rows, *keys, repetitions()) for rows, tiles in causal_slices(length, tile) for keys in tiles]


def test_under_a_causal_mask_a_tile_meets_the_tiles_up_to_itself():
    assert pairs(20, 8) == [
        (0, 8, 0, 8, 1), (8, 8, 0, 8, 1), (8, 8, 8, 8, 1),
        (16, 4, 0, 8, 1), (16, 4, 8, 8, 1), (16, 4, 16, 4, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("length", [8, 9, 20, 32, 50, 56, 64])
def test_shortened_the_pairs_stand_for_all_pairs_of_their_kind(length):
    def count(found):
        kinds = {}
        for start, size, first, keys, times in found:
            kind = (size, keys, start == first)
            kinds[kind] = kinds.get(kind, 0) + times
        return kinds

    whole = pairs(length, 8)
    with FakeTensorMode(), short_loops():
        # In a loop around it, as another technique may have.
        short = [pairs(length, 8) for _ in slices(70, 10)]
    assert len(short[1]) <= 7
    assert count(short[0]) == count(whole)
    assert count(short[1]) == {kind: 5 * times for kind, times in count(whole).items()}
    assert repetitions() == 1


def test_real_tensors_are_never_shortened():
    with pytest.raises(AssertionError, match="unwritten"), short_loops():
        pass
    assert len(list(slices(50, 8))) == 7


def test_a_loop_that_fails_leaves_nothing_to_the_next_plan():
    def interrupted():
        with FakeTensorMode(), short_loops():
            for start, _ in slices(70, 10):
                if start == 10:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert repetitions() == 1


def asked(rung: str, workspace: bool, **changed: Any) -> tuple[Job, Machine]:
    config = small_config(vocab_size=104)
    # s = 125: tiles of 23, 31 and 37 leave 10, 1 and 14; the loss takes a tile in blocks of 3 and one of 1.
    settings = {"mlp_tile": 23, "norm_tile": 31, "loss_tile": 37, **changed}
    return make_job(config, rung, tokens=500, ranks=4, ulysses=2, **settings), Machine(workspace=workspace)


# The workspace of CUDA has no part in loops, so it is on in one of the two.
@pytest.mark.parametrize(("rung", "workspace"), mostly_long([("tiling", False), ("upipe", True)], 0))
def test_a_shortened_step_is_the_whole_step(monkeypatch, rung, workspace):
    short, short_costs = walked(*asked(rung, workspace), 2)
    monkeypatch.setattr(walking, "short_loops", contextlib.nullcontext)
    whole, costs = walked(*asked(rung, workspace), 2)
    assert len(short) < 0.6 * len(whole)
    assert (short.device_peak, short.host_peak) == (whole.device_peak, whole.host_peak)
    assert short.peak.by_category == whole.peak.by_category
    assert (short.peak.op, short.peak.module) == (whole.peak.op, whole.peak.module)
    for number in ("flops", "link_bytes", "host_bytes"):
        assert getattr(short_costs, number) == getattr(costs, number) > 0
    assert short_costs.device_seconds == pytest.approx(costs.device_seconds, rel=1e-12)
    assert short_costs.host_seconds == pytest.approx(costs.host_seconds, rel=1e-12)
    assert short.seconds[-1] == pytest.approx(whole.seconds[-1], rel=1e-12)


@pytest.mark.long
def test_a_shortened_step_of_windows_is_the_whole_step(monkeypatch):
    """Of five pieces, the last one shorter, and of a block that is shorter than a window."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = small_config(MistralConfig, sliding_window=48 * Ki, **sizes)
    job, machine = Job(model, Recipe(), tokens=230 * Ki + 30, ranks=1), Machine()
    short, short_costs = walked(job, machine, 1)
    monkeypatch.setattr(walking, "short_loops", contextlib.nullcontext)
    whole, costs = walked(job, machine, 1)
    assert len(short) < len(whole)
    assert short.device_peak == whole.device_peak
    assert highest(short) == highest(whole)
    assert short_costs.flops == costs.flops > 0
    assert short_costs.device_seconds == pytest.approx(costs.device_seconds, rel=1e-12)


def highest(timeline: Timeline) -> dict[tuple[str, str, str], int]:
    """The most device bytes at each operator of each module, by phase."""
    found: dict[tuple[str, str, str], int] = {}
    for row, held in enumerate(timeline.device.sum(1).tolist()):
        op, module = timeline.ops[timeline.op[row]].name, timeline.modules[timeline.module[row]]
        where = timeline.phases[timeline.phase[row]], module, op
        found[where] = max(found.get(where, 0), held)
    return found


@pytest.mark.long
# Copies to the host are under way while a tile is computed: of one stage, and of several; of tiles that are
# copied on the device first, as those of several rows are.
@pytest.mark.parametrize(
    "knobs", [{"head_chunk": None, "rows": 8}, {"segment": 2}, {"offload": "attention", "rows": 8}], ids=str
)
def test_every_operator_of_a_shortened_step_of_streamed_layers_holds_as_much(monkeypatch, knobs):
    # s = 125: tiles of 23 leave 10.
    job, machine = asked("upipe", workspace=False, mlp_tile=None, stream=23, **knobs)
    short, short_costs = walked(job, machine, 2)
    monkeypatch.setattr(walking, "short_loops", contextlib.nullcontext)
    whole, costs = walked(job, machine, 2)
    assert len(short) < 0.7 * len(whole)
    assert highest(short) == highest(whole)
    for number in ("flops", "link_bytes", "host_bytes", "tile_writes", "tile_reads"):
        assert getattr(short_costs, number) == getattr(costs, number) > 0
