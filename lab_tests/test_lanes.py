"""Spans in lanes on one axis, and timelines by name, one above the other."""

import numpy as np
import pytest

import lab.show
from lab.errors import LabError
from lab_tests.support.runs import timeline_builder
from lab_tests.support.shown import rectangles

RUNS = {
    "ahead": {"layers": [("1", 10.0, 12.0), ("0", 12.0, 14.5)], "copies": [("0", 10.5, 10.5001)]},
    "late": {"layers": [("1", 3.0, 5.0), ("0", 6.0, 8.0)], "copies": [("0", 5.0, 6.0)]},
}


def bars(axes):
    """(start, end, row, colour) of every bar."""
    return [(left, right, (low + high) / 2, colour) for left, low, right, high, colour in rectangles(axes)]


def test_every_span_is_a_bar_from_its_runs_beginning():
    picture = lab.show.lanes(RUNS, title="Back from the host")
    (axes,) = picture.figure.axes
    found = bars(axes)
    assert [bar[:3] for bar in found if bar[1] - bar[0] > 0.1] == [
        (0, 2, 0), (2, 4.5, 0), (0, 2, 2.5), (3, 5, 2.5), (2, 3, 3.5),
    ]  # fmt: skip
    # Too short to be seen: a four-hundredth of the axis.
    assert found[2][:3] == (0.5, pytest.approx(0.5 + 5 / 400), 1)
    layers, copies = found[0][3], found[2][3]
    assert layers != copies
    assert [colour for *_, colour in found] == [layers, layers, copies] * 2
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "ahead: layers", "ahead: copies", "late: layers", "late: copies",
    ]  # fmt: skip
    assert axes.get_xlim() == (0, 5)
    assert repr(picture) == "Back from the host: ahead 4.5 s, late 5 s."


def test_a_label_is_written_where_it_has_room():
    crowded = [("31", at / 1000, at / 1000 + 0.0001) for at in range(5)] + [("last", 1.0, 2.0)]
    (axes,) = lab.show.lanes({"one": {"layers": crowded}}).figure.axes
    assert [text.get_text() for text in axes.texts] == ["31", "last"]


@pytest.mark.parametrize("runs", [{}, {"one": {}}, {"one": {"layers": []}}])
def test_no_lanes(runs):
    with pytest.raises(LabError, match="no lanes"):
        lab.show.lanes(runs)


def test_timelines_by_name_stand_one_above_the_other_on_the_same_axes():
    before, after = timeline_builder(steps=1).since(), timeline_builder(rank=3, steps=1, rows=30).since()
    picture = lab.show.timeline({"before": before, "after": after})
    upper, lower = picture.figure.axes
    assert upper.get_position().x0 == lower.get_position().x0
    assert upper.get_xlim() == lower.get_xlim() == (0, before.seconds[-1] - before.seconds[0])
    assert upper.get_ylim() == lower.get_ylim()
    assert [axes.get_title(loc="left").split(" · ")[0] for axes in (upper, lower)] == ["before", "after"]
    drawn = [axes.collections[0].get_paths()[0].vertices[:, 0] for axes in (upper, lower)]
    assert np.allclose([line.min() for line in drawn], 0)
    assert "before peaks at" in repr(picture)
    assert "after peaks at" in repr(picture)


def test_a_kind_of_which_nothing_ran_has_an_empty_lane():
    picture = lab.show.lanes({"alone": {"layers": [("0", 0.0, 2.0)], "copies": []}})
    (axes,) = picture.figure.axes
    assert len(bars(axes)) == 1
    assert [label.get_text() for label in axes.get_yticklabels()] == ["alone: layers", "alone: copies"]
