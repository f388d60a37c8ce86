"""What a widget is answered when a reader clicks: the holders at that row, sums over ranks, and knobs."""

from dataclasses import replace

import numpy as np
import pytest

import lab
from lab.memory.categories import CATEGORIES
from lab.show.live.messages import RECORDED_INTERVALS, recorded_messages
from lab.show.live.recorded import Recorded
from lab.training.records import Ended, Run, Started
from lab_tests.support.runs import finished_run
from lab_tests.support.shown import Page


@pytest.fixture(scope="module")
def plan():
    return lab.plan("tiny", "offload", tokens=768, ranks=2, workspace=False)


@pytest.fixture(scope="module")
def recorded(plan):
    return lab.show.timeline(plan).recorded


def of_ranks(plan, *timelines):
    return lab.show.timeline(Run(plan.title, plan.job, None, (), (), timelines)).recorded


def ask(recorded, row, **how):
    return recorded.answer({"rank": 0, "row": row, "memory": "device", "all": False} | how)


def test_the_tensors_of_a_row_add_up_to_its_bytes(plan, recorded):
    rows = np.random.default_rng(3).integers(0, len(plan.timeline), 40)
    for row in [*rows.tolist(), 0, len(plan.timeline) - 1, int(plan.timeline.total.argmax())]:
        answer = ask(recorded, row)
        assert answer["total"] == sum(item["bytes"] for item in answer["items"]) == plan.timeline.total[row]
        for number, category in enumerate(CATEGORIES):
            held = sum(item["bytes"] for item in answer["items"] if item["category"] == category)
            assert held == plan.timeline.device[row, number]
        host = ask(recorded, row, memory="host")
        assert host["total"] == sum(item["bytes"] for item in host["items"]) == plan.timeline.host[row]


def test_a_row_is_told_from_others_at_the_same_second(plan, recorded):
    timeline = plan.timeline
    same = np.flatnonzero((np.diff(timeline.seconds) == 0) & (np.diff(timeline.total) != 0))
    assert len(same) > 10
    for row in same[:10].tolist():
        assert ask(recorded, row)["total"] == timeline.total[row] != ask(recorded, row + 1)["total"]


def test_at_the_peak_the_answer_is_that_of_the_plan(plan, recorded):
    answer, holders = ask(recorded, int(plan.timeline.total.argmax())), plan.holders().grouped()
    assert [(item["bytes"], item["count"], item["knob"], item["units"]) for item in answer["items"]] == [
        (one.bytes, one.count, one.knob, one.units) for one in holders
    ]
    assert answer["when"].startswith(f"step 1 · {lab.units.format_seconds(holders.moment.seconds)} · ")
    assert answer["name"] == ""


def test_all_ranks_are_added_up_at_one_time(plan):
    slow = replace(plan.timeline, seconds=plan.timeline.seconds * 1.5)
    both = of_ranks(plan, plan.timeline, slow)
    row = len(plan.timeline) // 2
    answer = ask(both, row, all=True)
    second = int(np.searchsorted(slow.seconds, plan.timeline.seconds[row], side="right")) - 1
    assert [(one["row"], one["total"]) for one in answer["ranks"]] == [
        (row, plan.timeline.total[row]),
        (second, slow.total[second]),
    ]
    assert second != row
    assert answer["total"] == plan.timeline.total[row] + slow.total[second]
    assert sum(item["bytes"] for item in answer["items"]) == answer["total"]
    assert answer["name"] == "all ranks"
    assert ask(both, row, rank=1)["total"] == slow.total[row]


def test_ranks_that_hold_the_same_are_added_up_at_the_same_row(plan):
    """Also where several rows are of one instant. Seen red: the other rank was read at the last of them."""
    both, timeline = of_ranks(plan, plan.timeline, plan.timeline), plan.timeline
    same = np.flatnonzero((np.diff(timeline.seconds) == 0) & (np.diff(timeline.total) != 0))
    for row in (*same[:10].tolist(), *same[:10] + 1, int(timeline.total.argmax())):
        assert ask(both, int(row), all=True)["total"] == 2 * timeline.total[row]


def test_timelines_of_different_runs_are_not_added_up(plan):
    named = lab.show.timeline({"a": plan.timeline, "b": plan.timeline}).recorded
    assert not ask(named, 5, all=True)["all"]
    assert [content["addable"] for content, _ in recorded_messages(named)] == [False, False]
    assert named.answer({"free": "4 GiB"})["text"].startswith("the job of this timeline is not known")


@pytest.mark.long
def test_a_size_is_answered_with_knobs_and_a_bad_one_with_its_error(recorded):
    freed = recorded.answer({"free": "100KiB"})
    assert freed == {"kind": "freed", "text": freed["text"], "knobs": ["norm_tile"]}
    assert freed["text"].startswith("set norm_tile=256: ")
    assert recorded.answer({"free": "1TiB"})["knobs"] == []
    bad = recorded.answer({"free": "<b>lots</b>"})
    assert (bad["kind"], bad["of"]) == ("error", "free")
    assert bad["text"] == "'<b>lots</b>' is not an amount of memory: write 80GiB, 512MiB or a number of bytes"


@pytest.mark.parametrize(("rank", "row"), [(0, -1), (0, 10**7), (-1, 0), (1, 0)])
def test_an_instant_outside_is_one_line(recorded, rank, row):
    answer = ask(recorded, row, rank=rank)
    assert answer["text"] == f"rank {rank}, row {row}: there is no such instant in this timeline"


def test_a_stopped_run_says_that_it_has_no_tensors():
    answer = ask(lab.show.timeline(finished_run(2)).recorded, 5)
    assert (answer["kind"], answer["of"]) == ("error", "row")
    assert answer["text"].startswith("this timeline has no storages: those of a run that was stopped")


def test_a_whole_timeline_is_sent_with_the_number_of_each_row(plan):
    ((content, buffers),) = recorded_messages(lab.show.timeline(plan, planned=plan).recorded)
    rows, numbers, at, line = buffers
    numbers = np.frombuffer(numbers, dtype=np.uint32)
    table = np.frombuffer(rows, dtype=np.float32).reshape(len(numbers), -1)
    assert len(numbers) <= 2 * RECORDED_INTERVALS
    assert content["count"] == len(plan.timeline)
    np.testing.assert_array_equal(table[:, 0], plan.timeline.seconds[numbers].astype(np.float32))
    np.testing.assert_allclose(table[:, 1:9].sum(axis=1), plan.timeline.total[numbers], rtol=1e-6)
    assert plan.timeline.total[numbers].max() == plan.timeline.device_peak
    assert len(at) == len(line) > 0
    assert np.frombuffer(line, dtype=np.float32).max() == np.float32(plan.timeline.device_peak)
    by_row = lab.show.timeline(plan, over="operators").recorded
    ((content, (rows, numbers, *_)),) = recorded_messages(by_row)
    assert content["over"] == "operators"
    positions = np.frombuffer(rows, dtype=np.float32).reshape(-1, table.shape[1])[:, 0]
    np.testing.assert_array_equal(positions, np.frombuffer(numbers, dtype=np.uint32))


# ---- the widget ----------------------------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch):
    return Page(monkeypatch, {"cellId": "a"})


def test_a_displayed_timeline_answers_and_leaves_its_picture(page, plan):
    picture = lab.show.timeline(plan)
    picture._ipython_display_()
    ((widget, where),) = page.shown
    data, _ = widget._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    widget._handle_custom_msg({"ready": True, "stays": True}, [])
    assert page.kinds == ["recorded", "replaced"]
    still, replaced = page.shown[1]
    assert replaced == {**where, "update": True}
    assert (still.text, hasattr(still, "_ipython_display_")) == (picture.text, False)
    widget._handle_custom_msg({"rank": 0, "row": 7, "memory": "device", "all": False}, [])
    assert page.sent[-1][0]["total"] == plan.timeline.total[7]
    widget._handle_custom_msg({"free": "100KiB"}, [])
    assert page.kinds[-1] == "freed"


def test_on_another_page_the_widget_stays_where_it_is(page, plan):
    lab.show.timeline(plan)._ipython_display_()
    page.shown[0][0]._handle_custom_msg({"ready": True, "stays": False}, [])
    assert page.kinds == ["recorded"]
    assert len(page.shown) == 1


def test_without_a_browser_a_timeline_is_its_picture(plan):
    with pytest.raises(NotImplementedError):
        lab.show.timeline(plan)._ipython_display_()


def test_a_run_that_starts_says_what_it_waits_for(page):
    watch = lab.show.live()
    watch(Started(lambda: None, 4))
    ((widget, _),) = page.shown
    assert widget.look["waiting"] == "starting 4 ranks"
    watch(Ended("failed"))
    assert widget.comm is None
    assert len(page.shown) == 1


def test_a_run_that_cannot_start_ends_for_its_watcher():
    told = []
    cluster = lab.Cluster(ranks=2)
    with pytest.raises(Exception, match="not started"):
        lab.run("tiny", "fsdp", tokens=64, cluster=cluster, watch=told.append)
    assert [type(message) for message in told] == [Started, Ended]
    assert told[0].ranks == 2
    assert told[1].how == "failed"


def test_only_a_recorded_job_has_knobs(plan):
    alone = Recorded("", {"": plan.timeline}, None)
    assert ask(alone, 3)["items"][0]["units"] is None
