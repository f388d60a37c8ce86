"""What other people measured: the rows, refusals, the arithmetic of ratios, and the page that shows them."""

import json
import tomllib
from importlib.resources import files

import pytest

from lab.bench import published
from lab.bench.published import Compared, Measured, compare, measured
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.hardware import make_machine
from lab.planning.plan import plan_job
from lab.recipe.jobs import make_job
from lab.units import GiB
from lab_tests.proofs.pages import ROOT, stored
from lab_tests.support.commands import answer, refusal

TINY = (
    "tiny --tokens 1K --ranks 2 --rows 4 --accumulate 3 --recipe ulysses --device a100 --set checkpoint=true"
)


def row(name="r", source="s", fit="exact", **more):
    return Measured(name, source, "", TINY, fit, **more)


def test_no_figure_that_is_planned_is_stored():
    stored_rows = tomllib.loads(files("lab.bench").joinpath("published.toml").read_text())
    assert set(stored_rows.pop("sources")) == {one.source for one in measured()}
    words = {"source", "config", "state", "plan", "fit", "ran", "lacks", "memory_cause", "time_cause"}
    for fields in stored_rows.values():
        assert set(fields) <= words | {"memory", "time"}
        assert {"memory", "time"} & set(fields)
        number, unit, meaning = fields.get("memory", (1.0, "GB", "active"))
        assert type(number) in (int, float)
        assert unit in published.UNITS
        assert meaning in published.PLANNED
        number, unit = fields.get("time", (1.0, "s"))
        assert type(number) in (int, float)
        assert unit in ("s", "tokens/s a GPU")


def test_each_row_is_a_step_that_a_plan_takes_and_stands_once():
    rows = measured()
    assert len(rows) == len({one.name for one in rows})
    for one in rows:
        job, machine = one.make_job()
        assert one.fit in ("exact", "near", "not")
        assert (job.tokens, machine.workspace) != (0, False)
        assert one.fit != "exact" or not one.lacks
    by_name = {one.name: one for one in rows}
    assert by_name["upipe-paper qwen3-32b upipe 5M"].ran is False
    longest = by_name["alst-15m"].make_job()[0]
    assert (longest.ranks, longest.tokens, longest.recipe.optimizer) == (32, 15_000_000, "host")
    assert by_name["hf-uly-8k-dev"].make_job()[0].accumulate == 8


def test_a_wrong_name_is_refused_with_those_that_exist():
    said = refusal("bench published tune3b-pakced")
    assert said.startswith("no row named 'tune3b-pakced' (did you mean 'tune3b-packed'?): there are tune3b-")
    assert all(one.name in said for one in measured())


def test_a_plan_is_compared_as_the_meaning_of_the_figure_says():
    sizes = {"tokens": 1024, "ranks": 2, "rows": 4, "accumulate": 3}
    made = plan_job(make_job("tiny", "ulysses", checkpoint=True, **sizes), make_machine(device="a100"))
    outside = outside_workspace(2)
    fixed, expandable = (made.reserved_peak(expandable=kind) for kind in (False, True))
    expected = {
        "allocated": made.device_peak - outside,
        "reserved": fixed - outside,
        "reserved, expandable": expandable - outside,
        "nvidia-smi": fixed,
        "limit, expandable": expandable,
        "sum of a figure": made.device_peak,
    }
    assert len({*expected.values()}) > 3
    for meaning, nbytes in expected.items():
        found = compare(row(memory=(2.0, "GiB", meaning), time=(7.0, "tokens/s a GPU")))
        assert found.memory_ratio == nbytes / GiB / 2
        assert found.time == 1024 * 4 * 3 / 2 / made.step_seconds
        assert found.time_ratio == 7 / found.time
    in_gb = compare(row(memory=(3.0, "GB", "active"), time=(5.0, "s")))
    assert in_gb.memory_ratio == (made.device_peak - outside) / 1e9 / 3
    assert in_gb.time_ratio == made.step_seconds / 5


def test_the_distribution_and_what_is_off_follow_from_the_ratios():
    memory, time = (100.0, "GiB", "active"), (10.0, "s")
    found = [
        Compared(row("a", memory=memory, time=time, memory_cause="why"), 94.0, 10.4, fits=True),
        Compared(row("b", "t", memory=memory, time=time), 96.0, 8.0, fits=False),
        Compared(row("c", "t", fit="near", lacks=("x", "y"), memory=memory), 106.0, None, fits=True),
        Compared(row("d", fit="not", lacks=("x",), memory=memory, ran=False), 200.0, None, fits=True),
        Compared(row("e", lacks=("x",), memory=memory), refusal="no such thing"),
    ]
    rows = {one["planned / measured"]: [*one.values()][1:] for one in published.distribution(found)}
    assert rows == {
        "memory, allocated, exact": [2, 0.94, pytest.approx(0.95), 0.96, 1, 2],
        "memory, allocated, near": [1, 1.06, 1.06, 1.06, 0, 1],
        "seconds, exact": [2, 0.8, pytest.approx(0.92), 1.04, 1, 1],
    }
    assert [said for one in found for said in one.causes] == [
        "a, memory 0.94: why",
        "b, time 0.80: cause not found",
        "c, memory 1.06: cause not found",
        "d, memory 2.00: cause not found",
        "e, no plan: no such thing",
    ]
    assert published.lacking(found) == [
        {"not expressible": "x", "sources": 2, "which": "s, t"},
        {"not expressible": "y", "sources": 1, "which": "t"},
    ]
    assert published.otherwise(found) == [
        "b ran, and the plan does not fit",
        "d was out of memory, and the plan fits",
    ]


QUICK = ["lit-llama2-7b-lora-512", "upipe figure upipe 3M"]


def test_the_command_prints_rows_as_the_page_has_them():
    said = json.loads(answer(["bench", "published", *QUICK, "--json"]))
    assert [one["row"] for one in said["rows"]] == QUICK
    lines = stored()["bench published"].splitlines()
    for one in said["rows"]:
        assert one["planned"] / one["measured"] == one["ratio"]
        words = {word for line in lines if line.startswith(f"  {one['row']}  ") for word in line.split()}
        assert {f"{one[name]:.4g}" for name in ("measured", "planned", "ratio")} <= words
        assert f"  {one['row']}: {one['command']}" in lines


def test_the_readme_has_the_distribution_of_the_page():
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    shares = {"memory, allocated, exact": "5%", "memory, reserved": "5%", "seconds, exact": "10%"}
    for kind, share in shares.items():
        [line] = [line for line in stored()["bench published"].splitlines() if line.startswith(f"  {kind}  ")]
        n, _, median, _, within_5, within_10 = line.removeprefix(f"  {kind}").split()
        assert f"{float(median):.2f} for" in text
        assert f"({within_5 if share == '5%' else within_10} of {n} within {share})" in text
