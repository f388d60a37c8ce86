"""What follows at a further length of a random job is what a walk gives, to the byte."""

import pytest

from lab.planning import answers
from lab_tests.proofs.length_draws import check, draw
from lab_tests.support.long_run import mostly_long

SEEDS = (1, 9, 16, 24, 40, 43, 62, 106, 112, 131, 132, 135, 155, 172)
"""Of the first two hundred, some that take a second or two, of different families and recipes."""

LONGER = (5, 25, 26, 116, 146, 159)


@pytest.mark.parametrize("seed", mostly_long(SEEDS + LONGER, *range(len(SEEDS))))
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
