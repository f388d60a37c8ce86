"""What is no category of bytes has colours and lines of its own; a long legend is below the title."""

from itertools import combinations

import pytest
from matplotlib.colors import to_hex

import lab.show
from lab.errors import LabError
from lab.show.palette import COLOURS


def test_eight_lines_have_eight_styles():
    tokens = [1024, 2048]
    picture = lab.show.curves(tokens, {f"rung {n}": [n + 1.0, n + 2.0] for n in range(8)}, unit="seconds")
    (axes,) = picture.figure.axes
    assert len(axes.lines) == 8
    for one, other in combinations(axes.lines, 2):
        # matplotlib says "--" of every pattern of dashes, so the pattern itself is compared.
        for style in (
            lambda line: line.get_color(),
            lambda line: line.get_marker(),
            lambda line: line._dash_pattern,
        ):
            assert style(one) != style(other)


def test_parts_that_are_no_categories_have_colours_of_their_own():
    bars = {"published": {"state": 5, "attention": 7}, "planned": {"parameters": 3, "activations": 4}}
    picture = lab.show.stack(bars, series=("state", "attention"))
    drawn = {to_hex(bar.get_facecolor()).upper() for bar in picture.figure.axes[0].patches}
    assert len(drawn) == 4
    assert len(drawn & set(COLOURS.values())) == 2
    with pytest.raises(LabError, match=r"unknown categories \['attention', 'state'\]"):
        lab.show.stack(bars)


def test_a_legend_that_does_not_fit_beside_the_title_is_below_it():
    for count, title_in_legend in ((2, ""), (9, "The same title")):
        bar = dict.fromkeys(list(COLOURS)[:count], 1)
        figure = lab.show.stack({"a": bar}, title="The same title").figure
        assert figure.legends[0].get_title().get_text() == title_in_legend
        assert (figure.get_suptitle() == "The same title") == (not title_in_legend)
