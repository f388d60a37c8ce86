"""The steps that come with the lab are those that are planned now."""

from datetime import date
from functools import cache

import pytest

from lab.models.presets import PRESETS
from lab.planning import answers, plan_cache
from lab.planning.answers import SHIPPED, is_current, known_answer
from lab.planning.scaling import LENGTHS
from lab_tests.proofs.scalings import Shipped, shipped

DAY = date.today().toordinal()
"""The sample changes from day to day."""

MAKE = "run `python -m lab_tests.proofs scalings`"


@cache
def named() -> list[Shipped]:
    return [*shipped()]


def check(entries: list[Shipped], number: int) -> None:
    """Walk one of these entries at one of its lengths."""
    entry = entries[number % len(entries)]
    assert entry.holds(DAY % LENGTHS), f"{entry.title}: {MAKE}"


@pytest.mark.first
def test_every_entry_comes_with_the_lab():
    missing = [entry for entry in named() if not entry.nbytes]
    assert not missing, f"{len(missing)} entries are missing: {MAKE}"


@pytest.mark.first
def test_no_entry_is_left_over():
    left = {*SHIPPED.glob("*.plan")} - {file for entry in named() for file in entry.files}
    assert not left, f"no entry has {', '.join(sorted(file.name for file in left))}: {MAKE}"


@pytest.mark.first
def test_the_entries_are_of_these_sources():
    assert is_current(), f"a source that steps depend on has changed: {MAKE}"


def test_entries_of_other_sources_are_not_used(monkeypatch, tmp_path):
    job = named()[0].jobs[0]
    monkeypatch.setattr(plan_cache, "folder", lambda kind: tmp_path / kind)
    assert known_answer(job, workspace=True)
    monkeypatch.setattr(answers, "WALKED", ("recipe",))
    assert known_answer(job, workspace=True) is None


@pytest.mark.parametrize("other", [True, False], ids=["that of another job", "missing"])
def test_an_entry_does_not_hold_that_is(monkeypatch, tmp_path, other):
    plain, fsdp = named()[:2]
    files = fsdp.files if other else [tmp_path / "missing.plan"] * 2
    monkeypatch.setattr(Shipped, "files", files)
    assert not plain.holds()


def test_a_sample_is_what_is_planned_now():
    """Of those that are there, the half with the fewest bytes, which are planned in the least time."""
    there = sorted((entry for entry in named() if entry.nbytes), key=lambda entry: entry.nbytes)
    check(there[: len(there) // 2], DAY)


@pytest.mark.long
@pytest.mark.parametrize("model", PRESETS)
def test_an_entry_of_each_preset_is_what_is_planned_now(model):
    of_model = [entry for entry in named() if entry.jobs[0].model == model]
    # Windows of 2047 keys make no lengths alike.
    assert of_model or model == "phi3-mini"
    if of_model:
        # One that is missing does not hold.
        check([entry for entry in of_model if entry.nbytes] or of_model, DAY)
