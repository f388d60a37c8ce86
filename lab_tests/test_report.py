"""Plans, ladders and fits as text."""

import pytest

from lab.commands.report import draw_ladder, fit_text, ladder_text, plan_text
from lab.planning import plan as planning
from lab.planning.bill import Order
from lab.planning.fit import Fits
from lab.planning.max_context import MaxContext
from lab.planning.plan import plan, plan_job, plan_ladder
from lab.recipe.recipe import Recipe
from lab_tests.support.models import quick_config

SMALL = {"tokens": 4096, "ranks": 2, "device_memory": "140MiB", "host_memory": "21GiB", "workspace": False}
MODEL = quick_config(2)


@pytest.fixture(scope="module")
def plans():
    return plan_ladder(MODEL, **SMALL)


def test_a_plan_says_what_it_found(plans):
    made = plans["offload"]
    text = plan_text(made)
    first, second, *_ = text.splitlines()
    assert first == "2-layer llama · offload · 2 ranks · 4K tokens"
    assert second == "fsdp ulysses=2 checkpoint offload=inputs compute_dtype=bfloat16"
    for part in (
        "1.00 MiB per rank",
        "2.00 MiB per node",
        made.peak.op.removeprefix("aten."),
        "verdict       fits",
        f"MFU           {made.mfu:.1%} (estimate): of the peak of 2 GPUs in dense bf16",
    ):
        assert part in text
    assert "verdict       does not fit: device memory" in plan_text(plans["plain"])
    assert "note" not in text


@pytest.mark.long
def test_ranks_that_repeat_each_others_work_are_named():
    assert "--set ring=3, or more rows" in plan_text(plan("tiny", "fsdp", tokens=1024, ranks=12, ulysses=4))
    assert "or more rows" not in plan_text(plan("tiny", "fsdp", tokens=1024, ranks=12, ulysses=4, rows=3))


def test_a_ladder_has_a_bar_a_rung_and_cuts_the_longest(plans):
    lines = ladder_text(plans).splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()[0] in plans}
    assert list(rows) == list(plans)
    bars = {name: line.count("█") for name, line in rows.items()}
    assert bars["plain"] == 32
    assert "»" in rows["plain"]
    assert "»" not in rows["upipe"]
    assert [("✗" in line) for line in rows.values()] == [not p.fits for p in plans.values()]


def test_a_knob_by_hand_holds_on_the_rungs_that_have_its_technique(plans, monkeypatch):
    def only_plain(job, machine):
        """Plans the first rung; of the others the job is all that is looked at."""
        return plan_job(job, machine) if job.recipe_name == "plain" else job

    monkeypatch.setattr(planning, "plan_job", only_plain)
    found = plan_ladder(MODEL, **SMALL, overlap=True, ulysses=2)
    assert [p.title for p in found.values()] == [p.title for p in plans.values()]
    assert {name: p.recipe.ulysses for name, p in found.items()}["fsdp"] == 1
    assert (found["upipe"].recipe.overlap, found["upipe"].recipe.head_chunk) == (True, 2)
    assert found["plain"].device_peak == plans["plain"].device_peak


def test_a_ladder_is_drawn_into_a_file(plans, tmp_path):
    draw_ladder(plans, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_a_longest_context_says_what_stops_the_next(plans):
    text = repr(MaxContext(1024, "device", plans["upipe"], plans["plain"]))
    assert "max context   1K tokens (1,024)" in text
    assert f"stopped by    device memory at {plans['plain'].tokens:,} tokens" in text
    assert f"\nverdict       {plans['upipe'].verdict}\n" in text


def test_fitting_recipes_are_ranked_and_the_pareto_front_marked(plans):
    ranked = sorted((plans["tiling"], plans["upipe"]), key=lambda p: p.step_seconds)
    text = fit_text(Fits(ranked))
    assert "  1 ↓ " in text
    assert "+0.0%" in text
    assert f" {ranked[1].mfu:.1%} " in text
    assert "days" not in text


def test_fitting_recipes_have_the_days_and_the_money_of_an_order(plans):
    ranked = sorted((plans["tiling"], plans["upipe"]), key=lambda p: p.step_seconds)
    fits = Fits(ranked, Order(10**13, 2.5))
    text = fit_text(fits)
    for bill in fits.bills:
        assert f"   {bill.days_text}   " in text
        assert f"   {bill.money_text}   " in text
    assert f"\nThe fastest: 10T tokens take 2,441,406,250 steps, {fits.bills[0].days_text} days, " in text
    assert f", {fits.bills[0].money_text} at 2.5 for a GPU hour (estimate).\n" in text
    [row] = [line for line in fit_text(Fits(ranked[:1], Order(10**13))).splitlines() if "1 ↓" in line]
    assert f" {fits.bills[0].days_text} - " in " ".join(row.split())


def test_a_recipe_in_one_line():
    assert Recipe().summary == "plain"
    tiled = Recipe(fsdp=True, checkpoint=True, mlp_tile=8, norm_tile=8, loss_tile=8)
    assert tiled.summary == "fsdp checkpoint tiles=8"
    assert Recipe(mlp_tile=8, loss_tile=16).summary == "mlp_tile=8 loss_tile=16"
