"""What follows at a further length of a random job is what a walk gives, to the byte."""

import pytest

from lab.planning import answers
from lab_tests.proofs.length_draws import check, draw

SEEDS = (1, 5, 9, 16, 24, 25, 26, 40, 43, 62, 106, 112, 116, 131, 132, 135, 146, 155, 159, 172)
"""Of the first two hundred, some that take a few seconds, of different families and recipes."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_further_length_of_a_random_job_is_its_own_plan(seed):
    """These take some seconds each; ``python -m lab_tests.proofs length-draws`` has others."""
    drawn = draw(seed)
    found, wrong = check(drawn)
    assert found.lengths
    assert not wrong, drawn


def test_an_answer_that_is_another_one_is_found(monkeypatch):
    drawn = draw(1)
    monkeypatch.setattr(answers.Entry, "at", lambda entry, tokens: answers.Answer(
        entry.facts, tuple(scaling.steps[-1] for scaling in entry.scalings), entry.scalings[0].tokens
    ))  # fmt: skip
    found, wrong = check(drawn)
    assert found.lengths
    assert {"device", "size", "operators", "kinds of storages", "flops", "nbytes"} <= {*wrong}
