"""Pictures, the words beside them, and the messages to the browser while ranks run."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot

import lab
import lab.show
from lab.errors import LabError, ResultError
from lab.memory.timeline import Timeline, TimelineBuilder
from lab.show import palette, panels
from lab.show.live import messages, thinning
from lab.show.live import timeline as live_timeline
from lab.show.live import widget as live_widget
from lab.training.records import Progress, Started
from lab.units import GiB, MiB
from lab_tests.support.runs import OPERATORS, PEAK, finished_run, follow, timeline_builder
from lab_tests.support.shown import Page, count_pixels, execute_cell, pixels

ROOT = Path(__file__).parents[1]


# ---- pictures ------------------------------------------------------------------------------------------


def test_each_category_has_its_colour_everywhere() -> None:
    assert " ".join(palette.CATEGORY_COLOURS) == (
        "#0072B2 #E69F00 #009E73 #D55E00 #DDCC88 #882255 #56B4E9 #AAAAAA"
    )


def test_a_timeline_is_drawn_in_its_colours_and_said_in_words() -> None:
    picture = lab.show.timeline(timeline_builder().since())
    assert picture.png.startswith(b"\x89PNG")
    assert 5_000 < len(picture.png) < 200_000
    # A page shows through at the edges.
    assert (pixels(picture)[0, 0, 3], pixels(picture)[-1, -1, 3]) == (0, 0)
    areas = [count_pixels(picture, colour) for colour in palette.CATEGORY_COLOURS]
    # As held: activations most, then parameters, gradients, optimizer; other is a ripple on top.
    assert areas[3] > areas[0] > areas[1] > areas[2] > areas[7] > 500
    assert repr(picture) == "Memory timeline: peaks at 700.0 MiB (backward: aten.mm in layers.3)."
    assert pyplot.get_fignums() == []


def test_a_run_has_a_panel_for_each_rank_and_names_every_peak() -> None:
    run = finished_run(5)
    picture = lab.show.timeline(run)
    shown = [axes for axes in picture.figure.axes if axes.get_visible()]
    titles = [axes.get_title(loc="left") for axes in shown]
    assert titles == [f"rank {rank} · peak 700.0 MiB" for rank in range(5)]
    assert {axes.get_xlim() for axes in shown} == {(0, max(one.seconds[-1] for one in run.timelines))}
    assert len({axes.get_ylim() for axes in shown}) == 1
    # Three columns; below the third of them there is nothing.
    assert [axes.get_xlabel() for axes in shown] == ["", "", "seconds", "seconds", "seconds"]
    assert picture.text.startswith("Memory timeline of tiny · fsdp: rank 0 peaks at 700.0 MiB (backward: ")
    assert picture.text.count("peaks at") == 5


def test_many_steps_are_drawn_with_few_shapes() -> None:
    few, many = (
        lab.show.timeline(finished_run(1, steps=steps, rows=10)).figure.axes[0] for steps in (5, 500)
    )
    assert len(many.get_children()) <= len(few.get_children())


def test_host_bytes_get_a_lane_of_their_own() -> None:
    without, lane = lab.show.timeline(finished_run(2)), lab.show.timeline(finished_run(2, host=MiB))
    assert len(lane.figure.axes) == 2 * len(without.figure.axes)
    host = palette.COLOURS["host"]
    assert count_pixels(lane, host) > 10_000 > count_pixels(without, host)


def test_a_disk_has_a_lane_below_that_of_the_host() -> None:
    picture = lab.show.timeline(finished_run(2, host=MiB, disk=3 * MiB))
    axes = picture.figure.axes
    assert [one.get_ylabel().split("\n")[0] for one in axes[::2]] == ["MiB", "host", "disk"]
    tops = [max(path.vertices[:, 1].max() for c in one.collections for path in c.get_paths()) for one in axes]
    assert tops[2:] == [59 * MiB] * 2 + [3 * 59 * MiB] * 2
    assert count_pixels(picture, palette.COLOURS["disk"]) > 10_000
    only = lab.show.timeline({"disk": timeline_builder(disk=MiB).since()}).figure.axes
    assert [one.get_ylabel().split("\n")[0] for one in only] == ["MiB", "disk"]


def test_operators_can_stand_where_seconds_would_lie() -> None:
    figure = lab.show.timeline(timeline_builder(rows=11).since(), over="operators").figure
    assert figure.axes[0].get_xlim() == (0, 2 * 3 * 11 - 1)
    assert figure.axes[0].get_xlabel() == "operators"


def test_an_empty_timeline_is_refused() -> None:
    for empty in (TimelineBuilder().since(), {}):
        with pytest.raises(LabError, match="no rows"):
            lab.show.timeline(empty)


def test_a_plan_lies_on_the_measured_clock() -> None:
    run, plan = timeline_builder(steps=3).since(), timeline_builder(rank=2, steps=2).since()
    laid = panels.align_plan(run, plan, run.seconds)
    assert np.array_equal(np.concatenate([at for at, _ in laid]), run.seconds)
    # The third step is compared with the plan's last.
    held = [bytes_ for _, bytes_ in laid]
    assert np.array_equal(np.concatenate(held[:6]), plan.total)
    assert [h.max() for h in held[6:]] == [h.max() for h in held[3:6]]
    text = lab.show.timeline(run, planned=plan).text
    assert text.endswith("; planned peak 700.0 MiB.")


def test_a_micro_batch_is_compared_with_the_same_micro_batch_of_the_plan() -> None:
    """A step of two micro-batches whose bytes differ, measured with five rows a phase, planned with three."""

    def of(rows: int) -> Timeline:
        builder = TimelineBuilder()
        # As in the lab's step: each micro-batch has a forward and a backward, and the optimizer comes once.
        phases = ["forward", "backward", "forward", "backward", "optimizer"]
        for number, phase in enumerate(phases):
            for row in range(rows):
                held = [100 * number + row, *[0] * 7]
                builder.add(number + row / rows, held, 0, phase=phase, module="", op=OPERATORS[0], step=0)
        return builder.since()

    run = of(5)
    laid = panels.align_plan(run, of(3), run.seconds)
    assert [held.tolist() for _, held in laid] == [[100 * n, 100 * n + 1, 100 * n + 2] for n in range(5)]
    for number, (at, _) in enumerate(laid):
        assert at.tolist() == pytest.approx([number, number + 0.4, number + 0.8])
    # Of a plan of one micro-batch, the second one has no line.
    one = of(3).rows([True] * 6 + [False] * 6 + [True] * 3)
    assert [held[0] for _, held in panels.align_plan(run, one, run.seconds)] == [0, 100, 400]


def test_bars_are_stacked_and_summed() -> None:
    bars = {"plain": {"parameters": 3 * GiB, "activations": 9 * GiB}, "fsdp": timeline_builder().since().peak}
    picture = lab.show.stack(bars, title="tiny", limit=8 * GiB)
    assert picture.text == "tiny: plain 12.0 GiB, fsdp 700.0 MiB; the line stands at 8.00 GiB."
    written = [text.get_text() for text in picture.figure.axes[0].texts]
    assert written == ["12.0 GiB", "700.0 MiB", "8.00 GiB"]
    nine, three = (count_pixels(picture, palette.COLOURS[name]) for name in ("activations", "parameters"))
    assert 2.7 < nine / three < 3.3
    assert picture.figure.axes[0].get_xlabel() == "GiB"


def test_a_category_without_colour_is_refused() -> None:
    with pytest.raises(LabError, match=r"\['fish'\].*parameters, gradients"):
        lab.show.stack({"plain": {"fish": 3}})


def test_curves_end_where_nothing_more_fits() -> None:
    picture = lab.show.curves(
        [1024, 4096, 16384], {"naive": [16.0, 256.0, None], "flash": [8.0, 32.0, 128.0]}
    )
    assert picture.text == "Bytes over tokens: naive 256 B at 4K, flash 128 B at 16K."
    lines = picture.figure.axes[0].lines
    assert [list(line.get_xdata()) for line in lines] == [[1024, 4096], [1024, 4096, 16384]]
    assert picture.figure.axes[0].get_xscale() == picture.figure.axes[0].get_yscale() == "log"
    seconds = lab.show.curves([8, 32], {"a": [0.25, 4]}, unit="seconds", log=False, title="Steps")
    assert seconds.text == "Steps over tokens: a 4 s at 32."
    assert seconds.figure.axes[0].get_yscale() == "linear"


def test_curves_of_another_length_are_refused() -> None:
    with pytest.raises(LabError, match=r"2 values.*\['a'\]"):
        lab.show.curves([1, 2], {"a": [1.0], "b": [1.0, 2.0]})


def test_source_is_named_within_the_project() -> None:
    shown = lab.show.source(Timeline.moment)
    lines = (ROOT / "lab/memory/timeline.py").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "def moment(" in text)
    assert shown.place == f"lab/memory/timeline.py:{line}"
    assert shown.code.startswith("def moment(self, row: int) -> Moment:\n    ")
    assert str(ROOT) not in shown._repr_markdown_() + repr(shown)
    assert "~~~~python\ndef moment(" in shown._repr_markdown_()
    assert re.fullmatch(r"json:\d+", lab.show.source(json.dumps).place)


# ---- thinning ------------------------------------------------------------------------------------------


def test_thinning_keeps_the_highest_and_the_last_of_each_stretch() -> None:
    random = np.random.default_rng(7)
    at, held = np.sort(random.random(1000) ** 3), random.integers(0, 30, 1000)
    kept = thinning.thin_rows(at, held, 13)
    stretch = np.minimum((at - at[0]) / (at[-1] - at[0]) * 13, 12).astype(int)
    for n in range(13):
        rows = np.flatnonzero(stretch == n)
        assert set(kept[np.isin(kept, rows)]) == {rows[held[rows].argmax()], rows[-1]}
    assert len(thinning.thin_rows(at[:0], held[:0], 13)) == 0


def test_a_momentary_peak_is_drawn_as_wide_as_a_stretch() -> None:
    at = np.array([0.0, 0.5, 0.5 + 1e-9, 1.0])
    places, rows = thinning.widen_peaks(at, np.array([3, 9, 2, 2]), 10)
    assert rows.tolist() == [0, 1, 2, 3]
    assert places.tolist() == pytest.approx([0, 0.5, 0.6, 1.0])


# ---- live ----------------------------------------------------------------------------------------------


def decode(content: dict[str, Any], buffer: bytes, names: dict[int, str]) -> list[tuple[Any, ...]]:
    """As the script reads it: seconds, total, host, disk, phase, module, op, step of each row."""
    names.update(enumerate(content["names"], content["known"]))
    table = np.frombuffer(buffer, dtype=np.float32).reshape(-1, 15).astype(float)
    return [
        (row[0], row[1:9].sum(), row[9], row[10], *(names[int(n)] for n in row[11:14]), int(row[14]))
        for row in table
    ]


def test_a_message_brings_new_rows_only_and_each_name_once() -> None:
    builder, known, names = timeline_builder(host=3 * MiB), {}, {}
    first, second = builder.since(), builder.since(170)
    sent = decode(*messages.browser_message(Progress(1, 5, 0, 2, None, first.rows(range(170))), known), names)
    content, buffer = messages.browser_message(Progress(1, 5, 1, 2, 2.5, second), known)
    assert (content["rank"], content["ranks"], content["step"], content["steps"]) == (1, 5, 1, 2)
    assert content["loss"] == 2.5
    # The first rows were forward, backward and optimizer in layers 0 to 2: layer 3 alone is new.
    assert content["names"] == ["layers.3"]
    again = decode(content, buffer, names)
    assert min(row[0] for row in again) == pytest.approx(second.seconds[0], abs=0.5)
    assert min(row[0] for row in again) > max(row[0] for row in sent)
    for row in sent + again:
        moment = first.moment(int(np.searchsorted(first.seconds, row[0] + 1e-5)) - 1)
        held = moment.device, moment.host, moment.disk
        assert row[1:] == (*held, moment.phase, moment.module, f"{moment.op} {moment.shapes}", moment.step)


def test_a_message_is_small_and_holds_the_peak() -> None:
    timeline = timeline_builder(rows=4000).since()
    content, buffer = messages.browser_message(Progress(0, 1, 1, 2, 2.5, timeline), {})
    assert len(buffer) <= 2 * messages.INTERVALS * 15 * 4
    assert len(json.dumps(content)) < 1000
    assert max(row[1] for row in decode(content, buffer, {})) == PEAK


def test_a_run_ends_in_one_picture_where_the_widget_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_timeline, "_WARM_UP", 0.0)
    page, run = Page(monkeypatch, {"cellId": "a"}), finished_run(3)
    follow(lab.show.live(height=321), run)
    (widget, opened), (picture, closed) = page.shown
    assert isinstance(widget, live_widget.TimelineWidget)
    assert widget.look["height"] == 321
    assert [colour for _, colour in widget.look["categories"]] == list(palette.CATEGORY_COLOURS)
    assert closed == {"display_id": opened["display_id"], "update": True}
    assert picture.text == lab.show.timeline(run).text
    assert page.open_at_update == [True]
    # It stays on the page, in the picture's place, and has the timelines to their end.
    assert widget.comm is not None
    assert page.kinds == ["rows"] * 6 * 3 + ["recorded"] * 3 + ["replaced"]
    for sent in (page.sent[:18], page.sent[18:21]):
        names: dict[int, str] = {}
        rows = [decode(content, buffers[0], names) for content, buffers in sent]
        assert max(row[1] for some in rows for row in some) == PEAK
        assert len({name for content, _ in sent for name in content["names"]}) == len(names) == 10


def test_the_first_messages_wait_until_a_page_can_have_loaded_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, *(10.0 + 0.1 * n for n in range(1, 100))])
    monkeypatch.setattr(live_timeline.time, "monotonic", lambda: next(clock))
    page, timeline, watch = Page(monkeypatch, {"cellId": "a"}), timeline_builder().since(), lab.show.live()
    counts = []
    for _ in range(6):
        watch(Progress(0, 1, 0, 2, None, timeline))
        counts.append(len(page.sent))
    assert counts == [0, 0, 0, 4, 5, 6]


def test_one_watcher_follows_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_timeline, "_WARM_UP", 0.0)
    page, watch = Page(monkeypatch, {"cellId": "a"}), lab.show.live()
    follow(watch, finished_run(1))
    first = len(page.sent)
    follow(watch, finished_run(2, peak=PEAK // 2 + MiB))
    follow(watch, finished_run(1, peak=PEAK + MiB))
    # No axis is lower than the peaks of the runs before: the pictures can be compared.
    widgets = [thing for thing, _ in page.shown if isinstance(thing, live_widget.TimelineWidget)]
    assert [widget.look["highest"] for widget in widgets] == [0, PEAK, PEAK]
    pictures = [thing for thing, _ in page.shown if not isinstance(thing, live_widget.TimelineWidget)]
    tops = [picture.figure.axes[0].get_ylim()[1] for picture in pictures]
    assert tops == [1.12 * PEAK, 1.12 * PEAK, 1.12 * (PEAK + MiB)]
    assert len({where["display_id"] for _, where in page.shown}) == 3
    assert page.sent[first][0]["known"] == 0
    assert page.sent[first][0]["names"]


def test_the_widgets_stop_calls_what_the_run_said_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page, watch, stopped = Page(monkeypatch, {"cellId": "a"}), lab.show.live(), []
    # The first run does not say how it is stopped.
    for run in ("", "second", "third"):
        if run:
            watch(Started(partial(stopped.append, run), 1))
        watch(Progress(0, 1, 0, 2, None, timeline_builder().since()))
        page.shown[-1][0]._handle_custom_msg({"stop": True}, [])
        watch(finished_run(1))
    assert stopped == ["second", "third"]
    # A widget logs what its callbacks raise.
    assert not caplog.records


def test_where_nobody_looks_on_there_is_the_picture_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(2)
    # A script is told in words.
    follow(lab.show.live(), run)
    assert capsys.readouterr().out == f"{lab.show.timeline(run).text}\n"
    page = Page(monkeypatch, {})
    follow(lab.show.live(), run)
    assert [(thing.text, where) for thing, where in page.shown] == [(lab.show.timeline(run).text, {})]
    assert page.sent == []


def test_a_plan_with_another_workspace_is_no_line_over_measured_bytes() -> None:
    plans = [lab.plan("tiny", "fsdp", tokens=24, ranks=2, workspace=workspace) for workspace in (False, True)]
    assert lab.show.timeline(plans[0], planned=plans[0].timeline).text
    for number, said in (
        (0, "the plan counts .* workspace=False$"),
        (1, "the measured bytes have .* workspace=True$"),
    ):
        with pytest.raises(ResultError, match=f"^{said}"):
            lab.show.timeline(plans[number], planned=plans[1 - number])


@pytest.mark.long
def test_an_executed_notebook_stores_a_picture_and_its_words(tmp_path: Path) -> None:
    notebook = execute_cell(
        "from lab_tests.support.runs import finished_run, follow\nimport lab.show\n"
        "follow(lab.show.live(), finished_run(2))\nlab.show.timeline(finished_run(1))",
        tmp_path,
    )
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data", "execute_result"]
    for output in outputs:
        assert set(output.data) == {"image/png", "text/plain"}
        assert output.data["text/plain"].startswith("Memory timeline of tiny · fsdp: ")
        assert output.metadata["image/png"] == {"width": 900}
    assert "widgets" not in notebook.metadata
