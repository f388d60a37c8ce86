"""Sliders with a picture: the picture of a choice, and the message where a choice is refused."""

import pytest

import lab.show
from lab.errors import LabError
from lab.show.picture import Picture, styled_figure


def picture_of(text):
    with styled_figure(1.0) as figure:
        figure.text(0.1, 0.5, text)
    return Picture(figure, text)


def test_one_knob_is_drawn_by_its_value_and_begins_at_the_last():
    drawn = []
    found = lab.show.explore(lambda n: (drawn.append(n), picture_of(f"n is {n}"))[1], "n", [3, 5, 7])
    assert drawn == [7]
    found.sliders["n"].index = 1
    assert drawn == [7, 5]
    assert found._repr_mimebundle_()["text/plain"] == "n is 5"


def test_several_knobs_are_drawn_by_name_together():
    found = lab.show.explore(
        lambda *, wide, high: picture_of(f"{wide} x {high}"), wide=[1, 2], high=[10, 20], start={"high": 10}
    )
    assert found.values == {"wide": 2, "high": 10}
    before = found._image.value
    found.sliders["wide"].index = 0
    assert found._repr_mimebundle_()["text/plain"] == "1 x 10"
    assert found._image.value != before


def test_none_is_a_value_like_others():
    found = lab.show.explore(lambda tile: picture_of(f"tile {tile}"), tile=[None, 8], start={"tile": None})
    assert found._repr_mimebundle_()["text/plain"] == "tile None"
    found.sliders["tile"].index = 1
    assert found._repr_mimebundle_()["text/plain"] == "tile 8"


def test_a_refused_value_is_explained_and_the_picture_stays():
    found = lab.show.explore(lab.show.schedule, heads=[32], kv_heads=[8], ranks=[4], head_chunk=[12, 4])
    assert found._refusal.value == ""
    before = found._image.value
    found.sliders["head_chunk"].index = 0
    said = "head_chunk=12: it does not divide the 32 query heads; these work: 4, 8, 16, 32"
    assert found._refusal.value == f"{said}<br>(The picture is that of the last values that worked.)"
    assert found._image.value == before
    assert "lab-stale" in found._image._dom_classes
    found.sliders["head_chunk"].index = 1
    assert found._refusal.value == ""
    assert "lab-stale" not in found._image._dom_classes


def test_another_error_is_not_hidden():
    found = lab.show.explore(lambda n: picture_of(str(1 / n)), "n", [0, 1])
    with pytest.raises(ZeroDivisionError):
        found.sliders["n"].index = 0


def test_a_name_or_knobs_but_not_both():
    for knobs in ({}, {"name": "n", "values": [1], "other": [2]}):
        with pytest.raises(LabError, match="explore takes a name and its values, or knobs by keyword"):
            lab.show.explore(picture_of, **knobs)


def test_a_start_that_is_no_value_is_refused():
    for start in ({"a": 3}, {"b": 1}):
        with pytest.raises(LabError, match=r"a slider begins at one of its values, of a"):
            lab.show.explore(lambda a: None, a=[1, 2], start=start)
