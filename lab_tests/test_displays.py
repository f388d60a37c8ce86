"""Results as the last line of a cell: their text in a terminal, a table and a picture in a notebook."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import RichOutput, capture_output
from traitlets.config import Config

import lab
from lab.memory.moment import Moment
from lab.memory.timeline import Timeline, TimelineBuilder
from lab.models import config_of
from lab.planning.fit import Fits
from lab.planning.max_context import MaxContext
from lab.planning.plan import Plan
from lab.recipe.jobs import Disk
from lab.rehearsing.rehearsal import Rehearsal
from lab.show.displays import MOST_RANKS, display_of
from lab.units import MiB, format_bytes
from lab_tests.support.runs import finished_run, timeline_builder

MODEL = config_of("tiny")
MODEL.num_hidden_layers = 2
HOSTILE = "<img src=x onerror=alert(1)>$\\frac$"


@pytest.fixture(scope="module")
def plan() -> Plan:
    given: Any = {"device_memory": "80GiB", "host_memory": "2TiB"}
    return lab.plan(MODEL, "upipe", tokens=320, ranks=4, **given)


@pytest.fixture(scope="module")
def results(plan: Plan) -> dict[str, Any]:
    """One of each; the rehearsal's and the run's bytes are invented."""
    timeline = plan.timeline
    larger = replace(
        plan,
        job=replace(plan.job, tokens=1344),
        timeline=replace(timeline, device=timeline.device * 2, host=timeline.host * 2),
    )
    timeline = timeline_builder(host=MiB).since()
    return {
        "Plan": plan,
        "Timeline": timeline,
        "Run": finished_run(3, host=MiB),
        "Rehearsal": Rehearsal(
            timeline, timeline.device_peak, *[None] * 4, {"forward": 0.25, "backward": 0.5}, 2, 2.5, 0,
            layers=1, of_layers=2, machine="CPU", device_memory=None, device_memory_asked=None,
            plan=plan, whole=larger,
        ),
        "MaxContext": MaxContext(plan.tokens, "device", plan, larger),
        "Fits": Fits((larger, plan)),
    }  # fmt: skip


NAMES = ("Plan", "Timeline", "Run", "Rehearsal", "MaxContext", "Fits")


def started(plan: Plan, more: int) -> Moment:
    """The start of a plan whose peak is there, and so many bytes higher than that of its step."""
    device, by = plan.timeline.device_peak + more, plan.start.by_category
    other = by["other"] + device - plan.start.device
    return replace(plan.start, device=device, by_category={**by, "other": other})


def with_disk(plan: Plan) -> Plan:
    """The plan with three times its host bytes on a disk too."""
    machine = replace(plan.machine, disk=Disk(3 * 2**40))
    return replace(plan, machine=machine, timeline=replace(plan.timeline, disk=3 * plan.timeline.host))


def held(result: Any) -> list[int]:
    """Every number of bytes that the table of a result has."""
    match result:
        case Plan() | Timeline():
            return [result.device_peak, *result.peak.by_category.values(), result.host_peak]
        case MaxContext():
            return held(result.plan) + held(result.next_plan)
        case Rehearsal():
            return [n for one in (result, result.plan, result.whole) for n in held(one.timeline)]
        case Fits():
            return [n for plan in result for n in (plan.device_peak, plan.host_peak_per_node)]
        case _:
            return [n for timeline in result.timelines for n in held(timeline)]


class Elements(HTMLParser):
    """The tags of a text, the hints under the pointer, and all that is written."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.hints: list[str] = []
        self.written = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.hints += [value for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        self.written += f" {data}"


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """The shell of a notebook, in which the lab is imported."""
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    importlib.reload(lab)
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


def outputs_of(shell: InteractiveShell, result: object) -> tuple[list[RichOutput], str]:
    """What a cell with the result as its last line displays, and what it prints."""
    shell.user_ns["result"] = result
    with capture_output() as captured:
        shell.run_cell("result").raise_error()
    return captured.outputs, captured.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_a_table_and_a_picture(name, results, shell):
    table, picture = outputs_of(shell, results[name])[0]
    assert table.data["text/plain"] == repr(results[name])
    sizes = [f"{size:,} bytes" for size in held(results[name]) if size]
    assert len(sizes) >= 4
    assert set(sizes) <= set(Elements(table.data["text/html"]).hints)
    assert picture.data["image/png"].startswith(b"\x89PNG")
    assert picture.data["text/plain"].endswith(".")
    assert shell.user_ns["_"] is results[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_short(name, results):
    lines = repr(results[name]).splitlines()
    assert len(lines) < 14
    assert max(map(len, lines)) < 200


def test_the_texts(results, plan):
    peak = "backward: mm 5x7 7x11 in layers.3"
    assert repr(results["Timeline"]) == f"Timeline of 360 rows, device peak 700.0 MiB ({peak})"
    assert repr(results["Run"]).splitlines() == [
        "Run of tiny · fsdp",
        "losses        2.5000 2.2500",
        "seconds       0.5 0.25",
        "device peak   700.0 MiB on rank 0, the highest of 3 ranks",
        f"at the peak   {peak}",
        "host peak     59.0 MiB per rank",
    ]
    job = "2-layer llama · upipe · 4 ranks · 320 tokens"
    for text in (
        f"Plan of {job}\nrecipe        {plan.recipe.summary}\nstate         {plan.state}\ndevice peak   ",
        f"at the peak   {plan.peak}\nhost peak     ",
        f"\nnote          {plan.notes[0]}\nverdict       fits",
    ):
        assert text in repr(plan)
    unlimited = replace(plan, machine=replace(plan.machine, device_memory=None, host_memory=None))
    assert unlimited.summary.endswith(" per device: no memory was given")
    many = replace(plan.peak, op="aten._foreach_add_", shapes="1 2x3 4 5", module="", phase="optimizer")
    assert str(many) == "optimizer: _foreach_add_ 1 2x3 4 ..."
    rehearsal = repr(results["Rehearsal"])
    assert "measured      as one rank of 4 on CPU, 1 of 2 layers\ndevice peak   700.0 MiB, " in rehearsal
    assert "step          750 ms: forward 250 ms, backward 500 ms\nextrapolated  " in rehearsal
    longest = repr(results["MaxContext"])
    assert longest.startswith(f"MaxContext of {job}")
    assert "max context   320 tokens (320)" in longest
    for limit, memory in (("device", "device_need"), ("host", "host_peak_per_node")):
        needed = format_bytes(getattr(results["MaxContext"].next_plan, memory))
        stopped = f"stopped by    {limit} memory at 1,344 tokens, which need {needed}\n"
        assert stopped in repr(replace(results["MaxContext"], limit=limit))


def test_two_lengths_that_are_rounded_alike_are_both_shown(plan):
    """Seen red: 6.00M tokens was the name of both, and the longer one was shown."""
    fits, beyond = (replace(plan, job=replace(plan.job, tokens=tokens)) for tokens in (6286848, 6286856))
    shown = display_of(MaxContext(6286848, "device", fits, beyond)).html
    assert all(f"{one.tokens:,} tokens" in shown for one in (fits, beyond))


def test_of_many_recipes_that_fit_the_text_has_few_and_a_notebook_folds_the_others(plan):
    down = [replace(plan, start=started(plan, (20 - n) * MiB)) for n in range(10)]
    fits = Fits((*down, replace(down[3])))
    lines = repr(fits).splitlines()
    assert lines[0].startswith("11 recipes fit 2-layer llama · 4 ranks · 320 tokens. ")
    assert [line.split()[0] for line in lines[1:]] == ["state", "1", "2", "3", "4", "5", "6", "7", "..."]
    assert lines[-1].endswith("3 more")
    front, every = display_of(fits).html.split("<details>")
    assert (front.count("<tr>"), every.count("<tr>")) == (2 + 1 + 10, 1 + 11)


def test_of_many_ranks_the_ones_that_hold_the_most_are_shown(shell):
    run = finished_run(MOST_RANKS + 2)
    less = tuple(timeline.rows(range(3)) for timeline in run.timelines[:2])
    run = replace(run, timelines=(*less, *run.timelines[2:]))
    assert "\ndevice peak   700.0 MiB on rank 2, the highest of 10 ranks\n" in repr(run)
    table, picture = outputs_of(shell, run)[0]
    written = Elements(table.data["text/html"]).written
    assert "8 of 10 ranks" in written
    assert [f"rank {rank} " in f"{written} " for rank in range(10)] == [False] * 2 + [True] * 8
    assert picture.data["text/plain"].startswith("Memory timeline: rank 2 peaks at ")


def test_what_measured_nothing_has_no_picture(shell):
    empty = TimelineBuilder().since()
    for result in (empty, replace(finished_run(1), timelines=(empty,))):
        [table] = outputs_of(shell, result)[0]
        assert Elements(table.data["text/html"]).hints == []


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [("device", "device_peak"), ("host", "host_peak_per_node"), ("disk", "disk_peak_per_node")],
)
def test_the_bars_of_the_longest_context_are_of_the_memory_that_stops_it(results, limit, sizes):
    longest = replace(results["MaxContext"], limit=limit)
    if limit == "disk":
        longest = replace(longest, plan=with_disk(longest.plan), next_plan=with_disk(longest.next_plan))
        assert "disk peak" in display_of(longest).html
    bars = display_of(longest).draw().text
    for plan in (longest.plan, longest.next_plan):
        assert f"{plan.tokens:,} tokens {format_bytes(getattr(plan, sizes))}" in bars
    assert bars.endswith({"device": "at 80.0 GiB.", "host": "at 1.98 TiB.", "disk": "at 3.00 TiB."}[limit])


@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_shows_the_text(name, results, shell, monkeypatch):
    monkeypatch.setattr(shell, "display_formatter", type(shell.display_formatter)(parent=shell))
    shell.display_formatter.active_types = ["text/plain"]
    importlib.reload(lab)
    outputs, printed = outputs_of(shell, results[name])
    assert outputs == []
    assert repr(results[name]) in printed


def test_without_a_shell_the_lab_imports_neither_ipython_nor_matplotlib():
    code = "import json, sys, lab; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"IPython", "matplotlib", "torch"} & set(json.loads(done.stdout))


def test_a_name_is_text_in_the_table_and_in_the_picture(plan, shell):
    start = replace(started(plan, MiB), module=HOSTILE)
    hostile = replace(plan, job=replace(plan.job, model=HOSTILE, recipe_name=HOSTILE), start=start)
    for result, times in ((hostile, 3), (Fits((hostile,)), 1), (replace(finished_run(1), title=HOSTILE), 1)):
        table, picture = outputs_of(shell, result)[0]
        elements = Elements(table.data["text/html"])
        assert elements.tags <= {"div", "b", "table", "tr", "th", "td", "span", "details", "summary"}
        assert elements.written.count(HOSTILE) == times
        assert "image/png" in picture.data
