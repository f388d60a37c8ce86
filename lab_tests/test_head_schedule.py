"""The picture of UPipe's schedule: right pairs, wrong pairs, and the stage of each transfer."""

import pytest

import lab.show
from lab.errors import RecipeError
from lab.show.head_schedule import KEYS, RIGHT, WRONG, in_model_order, pairs
from lab.techniques.upipe.schedule import schedule
from lab_tests.support.shown import count_pixels

SHAPES = [(32, 8, 4, 4), (32, 8, 4, 16), (12, 4, 2, 4), (24, 2, 4, 4), (64, 8, 8, 64), (24, 24, 4, 4)]


def everywhere(plan):
    return [(stage, rank) for stage in range(len(plan.stages)) for rank in range(plan.ranks)]


@pytest.mark.parametrize("shape", SHAPES)
def test_gathered_heads_meet_their_own_keys_and_each_key_is_sent_once_to_a_rank(shape):
    heads, kv_heads, ranks, _ = shape
    plan = schedule(*shape)
    found = [pair for place in everywhere(plan) for pair in pairs(plan, *place)]
    assert sorted(pair.query for pair in found) == list(range(heads))
    assert all(pair.kv == pair.query // (heads // kv_heads) for pair in found)
    for rank in range(ranks):
        sent = [
            {pair.kv for pair in pairs(plan, stage, rank) if pair.sent} for stage in range(len(plan.stages))
        ]
        assert sum(map(len, sent)) == len(set().union(*sent)) == plan.slots


@pytest.mark.parametrize("shape", SHAPES)
def test_in_model_order_the_keys_are_the_same_and_the_queries_those_of_the_weight(shape):
    plan = schedule(*shape)
    taken = [in_model_order(plan, *place) for place in everywhere(plan)]
    assert [pair.query for of_rank in taken for pair in of_rank] == list(range(plan.heads))
    for of_rank, place in zip(taken, everywhere(plan), strict=True):
        assert [pair.kv for pair in of_rank] == [pair.kv for pair in pairs(plan, *place)]


def test_the_methods_own_example_and_where_both_are_the_same():
    plan = schedule(32, 8, 4, 4)
    assert [(p.query, p.kv) for rank in range(4) for p in pairs(plan, 5, rank)] == [
        (17, 4), (21, 5), (25, 6), (29, 7),
    ]  # fmt: skip
    assert [(p.query, p.kv) for rank in range(4) for p in in_model_order(plan, 5, rank)] == [
        (20, 4), (21, 5), (22, 6), (23, 7),
    ]  # fmt: skip
    assert [pairs(plan, stage, 0)[0].sent for stage in range(8)] == [True, *[False] * 3] * 2
    plan = schedule(24, 24, 4, 4)  # no groups, so nothing to get wrong
    assert all(in_model_order(plan, *place) == pairs(plan, *place) for place in everywhere(plan))


def test_the_picture_says_and_shows_how_many_pairs_are_wrong():
    picture = lab.show.schedule(32, 8, 4, 4)
    assert picture.text == (
        "Head schedule, H=32, K=8, C=4, U=4: 8 stages; keys and values are sent in stages 0, 4; "
        "in model order 24 of 32 query heads meet another's keys."
    )
    # 40 squares are right in both panels together, and 24 wrong; two rows of eight are sent.
    right, wrong, sent = (count_pixels(picture, colour) for colour in (RIGHT, WRONG, KEYS))
    assert 1.4 < right / wrong < 1.9
    assert 0.12 < sent / (right + wrong) < 0.2
    same = lab.show.schedule(24, 24, 4, 4)
    assert "in model order 0 of 24" in same.text
    assert count_pixels(same, WRONG) < 0.02 * count_pixels(same, RIGHT)  # in the legend only


def test_many_heads_a_stage_are_drawn_below_one_another():
    above, below = lab.show.schedule(64, 8, 8, 64).figure.axes
    assert below.get_position().y0 < above.get_position().y0


def test_what_the_heads_do_not_allow_is_refused_with_what_works():
    with pytest.raises(RecipeError, match=r"head_chunk=12: .* these work: 4, 8, 16, 32"):
        lab.show.schedule(32, 8, 4, 12)
