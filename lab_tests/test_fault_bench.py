"""The rows of `lab bench faults` on locks. The faults of ranks are tested in test_cluster and test_faults."""

import pytest

from lab.bench import faults


@pytest.mark.slow
def test_a_stale_lock_stops_nobody() -> None:
    row = faults._stale_lock(1, lambda _: None)
    assert row["fault"] == "a stale lock"
    assert (row["unbroken"], row["left over"]) == ("1 of 1", 0)
    assert 0 < row["recovery"] < faults.PATIENCE


@pytest.mark.slow
def test_a_second_training_in_a_folder_is_refused_and_the_first_goes_on() -> None:
    row = faults._two_trainings(1, lambda _: None)
    assert row["fault"] == "two trainings in one folder"
    assert (row["unbroken"], row["left over"]) == ("1 of 1", 0)
    assert 0 < row["message"] < faults.PATIENCE
