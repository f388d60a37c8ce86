"""Faults of one process: a lock that is stale, a lock that is held, an owner that is killed."""

from pathlib import Path

import pytest

from lab_tests.proofs.faults import PATIENCE, measure_fault

pytestmark = pytest.mark.long


@pytest.mark.parametrize("fault", ["a stale lock", "two trainings in one folder"])
def test_a_lock_stops_nobody_but_a_second_training(fault: str) -> None:
    """Who holds the lock goes on."""
    row = measure_fault(fault, 1, lambda _: None)
    assert (row["unbroken"], row["left over"]) == ("1 of 1", 0)
    taken = row["recovery"] if fault == "a stale lock" else row["message"]
    assert isinstance(taken, float)
    assert 0 < taken < PATIENCE


def test_nothing_is_left_when_the_owner_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    row = measure_fault("the owner is killed", 1, lambda _: None)
    assert row["left over"] == 0
    assert isinstance(row["recovery"], float)
    assert 0 < row["recovery"] < 20
