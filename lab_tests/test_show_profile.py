"""The picture of a profiled step: lanes of the longest operators, gaps, and one axis with the bytes."""

import pytest

import lab.show
from lab.errors import LabError
from lab.memory.moment import Op
from lab.memory.profiling import Call, Profile
from lab.memory.timeline import TimelineBuilder
from lab.show.profiles import _gaps
from lab.units import MiB

START = 7.0


def profile(calls=None) -> Profile:
    """Ten seconds from 7 on, after an earlier step; one operator a second, of half a second."""
    rows = TimelineBuilder()
    where = {"phase": "forward", "module": "", "op": Op("-")}
    rows.add(1.0, [900 * MiB, *[0] * 7], 0, step=0, **where)
    for second in range(11):
        held = [MiB, 0, 0, second * MiB, *[0] * 4]
        rows.add(START + second, held, 0, step=1, **where)
    names = ["aten.mm"] * 5 + ["aten.add"] * 3 + ["aten.silu", "aten.mul"]
    made = [
        Call(name, f"model.layers.{k % 2}.mlp", "forward", START + k, 0.5) for k, name in enumerate(names)
    ]
    return Profile(rows.since(), tuple(made if calls is None else calls), (), 0.1, b"", None)


def lanes(picture):
    below = picture.figure.axes[1]
    names = [tick.get_text() for tick in below.get_yticklabels()]
    return dict(zip(names, [text.get_text() for text in below.texts], strict=True))


def test_a_lane_for_each_of_the_longest_one_for_the_rest_and_one_for_the_gaps():
    assert lanes(lab.show.profile(profile(), lanes=2)) == {
        "mm": "2.5 s, 25%, 5 calls",
        "add": "1.5 s, 15%, 3 calls",
        "2 others": "1 s, 10%",
        "no operator": "5 s, 50%",
    }
    by_module = lanes(lab.show.profile(profile(), by="module"))
    assert by_module == {"mlp": "5 s, 50%, 10 calls", "no operator": "5 s, 50%"}


def test_the_bytes_are_the_last_steps_and_share_the_axis():
    picture = lab.show.profile(profile(), title="tiny, rank 3")
    above, below = picture.figure.axes
    assert above.get_xlim() == below.get_xlim() == (START, START + 10)
    assert "peak 11.0 MiB" in above.get_title(loc="left")
    assert picture.text.startswith("tiny, rank 3: 10 s, most by op in aten.mm 2.5 s in 5 calls")
    assert [below.xaxis.get_major_formatter()(tick, 0) for tick in below.get_xticks()][:2] == ["0", "2"]


def test_what_runs_beside_an_operator_leaves_no_gap():
    beside = [Call("gloo:x", "", "", START + 1, 7.0), Call("a", "", "", START + 2, 1.0)]
    assert _gaps(profile(beside)) == [(START, 1.0), (START + 8, 2.0)]


def test_nothing_to_draw_is_said():
    with pytest.raises(LabError, match="lanes=0 of 4: at least one lane"):
        lab.show.profile(profile(), lanes=0)
    with pytest.raises(LabError, match="lanes=8 of 0"):
        lab.show.profile(profile([]))
