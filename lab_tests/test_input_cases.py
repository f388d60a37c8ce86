"""Models and batches as users have them are computed right or refused by name, on every rank."""

import re

import pytest

from cluster.ranks import Cluster
from lab_tests.proofs.input_cases import CASES, RECIPES, expected, outcomes
from lab_tests.support.long_run import mostly_long


@pytest.fixture(scope="module", params=mostly_long(RECIPES, 0))
def answers(request):
    """A recipe, and what each rank of two says with it."""
    with Cluster(ranks=2) as cluster:
        yield request.param, cluster.apply(outcomes, request.param)


@pytest.mark.parametrize("name", CASES)
def test_an_arrival_is_right_or_refused_in_one_line(answers, name):
    recipe, ranks = answers
    for rank in ranks:
        assert re.match(expected(name, recipe), rank[name]), rank[name]
        assert "\n" not in rank[name]
