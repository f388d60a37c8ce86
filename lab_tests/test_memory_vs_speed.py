"""The picture of memory against throughput."""

import pytest

import lab.show
from lab.errors import LabError
from lab.show.memory_vs_speed import PICKED
from lab.units import MiB

POINTS = {"U=4": (3 * MiB, 700.0), "U=8": (5 * MiB, 900.0)}


def test_both_bars_of_a_name_stand_in_its_row_and_the_picked_ones_are_magenta():
    picture = lab.show.memory_vs_speed(POINTS, picked="U=8", title="Here")
    memory, speed = picture.figure.axes
    assert [bar.get_width() for bar in memory.patches] == [3 * MiB, 5 * MiB]
    assert [bar.get_width() for bar in speed.patches] == [700, 900]
    for axes in (memory, speed):
        colours = [bar.get_facecolor() for bar in axes.patches]
        assert colours[1] != colours[0]
        assert axes.patches[1].get_facecolor()[:3] == tuple(
            int(PICKED[n : n + 2], 16) / 255 for n in (1, 3, 5)
        )


def test_the_words_of_the_picture_hold_no_time():
    assert lab.show.memory_vs_speed(POINTS, picked="U=8").text == (
        "Memory against throughput: U=4 3.00 MiB, U=8 5.00 MiB; U=8 picked."
    )


def test_nothing_to_draw_is_refused():
    with pytest.raises(LabError, match="no point 'U=16' to draw: there are U=4, U=8"):
        lab.show.memory_vs_speed(POINTS, picked="U=16")
    with pytest.raises(LabError, match="there are none"):
        lab.show.memory_vs_speed({})
