"""Addresses of all-to-alls: every address is recorded, memory that is used again counts once."""

import pytest
import torch
import torch.distributed as dist

import lab.show
from lab.errors import LabError
from lab.memory.exchanges import Exchange, Exchanges, memory_ranges
from lab.techniques.exchange import all_to_all
from lab.techniques.rope import apply_rope
from lab.techniques.ulysses import apply_ulysses
from lab.techniques.upipe.layer import apply_upipe
from lab_tests.support.reference import build, config, tokens


def exchange(sent, received, size=100):
    return Exchange(range(sent, sent + size), range(received, received + size))


def test_memory_that_is_used_again_counts_once():
    assert memory_ranges([exchange(0, 500), exchange(500, 0), exchange(50, 900)]) == [
        range(150), range(500, 600), range(900, 1000),
    ]  # fmt: skip
    assert memory_ranges([exchange(0, 100), exchange(200, 1000)]) == [range(300), range(1000, 1100)]
    assert memory_ranges([exchange(0, 50, 400), exchange(100, 200)]) == [range(450)]


def addresses_of_two():
    """Twice the same buffers, once others; and what was really at those addresses."""
    a, b = torch.ones(4, 6), torch.zeros(4, 6)
    with Exchanges() as seen:
        all_to_all(a, dist.group.WORLD, out=b)
        a.mul_(2)
        all_to_all(b, dist.group.WORLD, out=a)
    starts = a.data_ptr(), b.data_ptr()
    found = [(e.sent.start, e.received.start, len(e.sent), len(e.received)) for e in seen.all]
    return found == [(*starts, 96, 96), (*starts[::-1], 96, 96)]


def test_addresses_are_those_of_the_tensors_in_order(ranks4):
    assert ranks4.apply(addresses_of_two) == [True] * 4


def forward_of(technique):
    cfg = config("llama", 24, 4, layers=1)
    model, ids = build(cfg, torch.float32), tokens(1, 2000)
    apply_rope(model)
    technique(model, group=dist.group.WORLD)
    positions = torch.arange(500) + 500 * dist.get_rank()
    with torch.no_grad(), Exchanges() as seen:
        model(input_ids=ids[:, positions], position_ids=positions[None])
    return seen.all


def test_upipes_stages_work_in_less_memory_than_they_move(ranks4):
    def upipe(model, group):
        apply_upipe(model, head_chunk=4, group=group)

    for ulysses, stages in zip(
        ranks4.apply(forward_of, apply_ulysses), ranks4.apply(forward_of, upipe), strict=True
    ):
        assert (len(ulysses), len(stages)) == (4, 12)  # 6 stages: queries, the first with keys; outputs
        moved = sum(len(e.received) for e in stages)
        assert moved == sum(len(e.received) for e in ulysses)
        assert sum(map(len, memory_ranges(stages))) < moved
        # Keys and values have one place each for all stages, and queries go back and forth.
        assert len({e.received.start for e in stages}) < len(stages)


def test_the_picture_is_as_high_as_the_memory_that_is_memory_ranges():
    again = [exchange(0, 4096, 1024), exchange(4096, 0, 1024), exchange(0, 4096, 1024)]
    apart = [exchange(0, 4096, 1024), exchange(8192, 12288, 1024)]
    picture = lab.show.buffer_reuse({"apart": apart, "again": again}, title="Here")
    assert picture.text == (
        "Here: apart receives 2.00 KiB in 2 all-to-alls and reads or writes 4.00 KiB; "
        "again receives 3.00 KiB in 3 all-to-alls and reads or writes 2.00 KiB."
    )
    for axes, heights in zip(
        picture.figure.axes, ([0, 1024, 2048, 3072], [0, 1024, 1024, 0, 0, 1024]), strict=True
    ):
        assert [patch.get_y() for patch in axes.patches] == heights
        assert axes.get_ylim()[1] == 4096 * 1.04
    with pytest.raises(LabError, match="no all-to-alls to draw"):
        lab.show.buffer_reuse({"alone": []})
