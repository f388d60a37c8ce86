"""A timeline: its peak and its moments."""

import numpy as np
import pytest

from lab.memory.categories import CATEGORIES
from lab.memory.moment import Op
from lab.memory.timeline import Timeline, TimelineBuilder


@pytest.fixture
def timeline() -> Timeline:
    builder = TimelineBuilder()
    for row in range(700):
        held = [10, 0, 20, row % 97, 0, 0, 0, 900 if row == 333 else 3]
        builder.add(
            row / 100,
            held,
            5 * (row == 401),
            phase="forward" if row < 300 else "backward",
            module=f"layers.{row % 7}",
            op=Op("aten.mm", f"{row % 5}x3"),
            step=row // 500,
        )
    return builder.since(0)


def test_the_peak_says_what_ran_where_and_who_held_what(timeline):
    peak = timeline.peak
    assert (peak.device, peak.phase, peak.module, peak.op, peak.shapes, peak.step) == (
        10 + 20 + 333 % 97 + 900, "backward", "layers.4", "aten.mm", "3x3", 0,
    )  # fmt: skip
    assert peak.by_category == dict(zip(CATEGORIES, (10, 0, 20, 333 % 97, 0, 0, 0, 900), strict=True))
    assert timeline.host_peak == 5


def test_since_hands_out_only_what_is_new(timeline):
    builder = TimelineBuilder()
    assert len(builder.since(0)) == 0
    for second in range(4):
        builder.add(second, (1, 2, 3, 4, 5, 6, 7, 8), 0, phase="p", module="m", op=Op("o"), step=0)
    assert builder.since(3).seconds.tolist() == [3.0]
    assert np.array_equal(builder.since(0).total, [36] * 4)
