"""The table of cases: loss, every gradient, a step, and the plan's bytes, on four ranks.

The mutants that must die here: heads in a wrong order on one side, RoPE missing on k, a corrupted offload
(the wrong layer's input comes back, or the wrong layer's attention), a gradient scaled by 1/P, replicated
keys whose gradients are not summed, labels shifted after the sequence was sharded; a plan that is a byte off.
"""

from collections import Counter
from itertools import combinations, product

import pytest
import torch.distributed as dist

from lab_tests.proofs import cases as table
from lab_tests.proofs.cases import FACTORS, MODELS, OWN, Case, case_of, pairs_in, proved_by, wrong


@pytest.fixture(scope="module")
def rows():
    return table.rows()


@pytest.fixture(scope="module")
def drawn(rows):
    return [case_of(row) for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def of_model(drawn, model):
    return [case for case in drawn if (case.family, case.heads, case.kv_heads) == model]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model)))
def test_the_first_case_of_each_model(ranks4, drawn, folder, model):
    assert wrong(of_model(drawn, model)[0], ranks4, folder) == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model)))
def test_its_further_cases(ranks4, drawn, folder, model, part):
    """In three parts, of which each is short."""
    further = of_model(drawn, model)[1:][part::3]
    found = [(str(case), wrong(case, ranks4, folder)) for case in further]
    assert [one for one in found if one[1]] == []


@pytest.mark.long
@pytest.mark.parametrize("case", OWN, ids=str)
def test_heads_sizes_and_lengths_of_their_own(ranks4, folder, case):
    assert wrong(case, ranks4, folder) == []


def test_every_two_values_meet_but_those_that_are_refused(rows, drawn):
    """Rings that send with windows or documents, degrees that the heads forbid, knobs that need another."""
    met = set().union(*map(proved_by, rows))
    missing = Counter()
    for first, second in combinations(FACTORS, 2):
        for one, other in product(FACTORS[first], FACTORS[second]):
            missing[first, second] += not pairs_in({first: one, second: other}) <= met
    assert len({str(case) for case in drawn}) == len(drawn)
    assert +missing == REFUSED


# Three rings that send with windows, sequences over more ranks than a replica has, of which two gather, and
# Ulysses over four ranks with six key/value heads.
REFUSED = {
    ("model", "ring"): sum(3 * Case(*model).shape().has_windows + (model[2] == 6) for model in MODELS),
    ("ring", "documents"): 3, ("replicas", "ring"): 5, ("stages", "overlap"): 1, ("offload", "segment"): 4,
}  # fmt: skip
CASE = Case(knobs={"fsdp": True, "ulysses": 2, "checkpoint": True, "offload": "inputs"})


def test_a_plan_that_is_wrong_in_anything_is_found(ranks4, folder, monkeypatch):
    assert wrong(CASE, ranks4, folder) == []
    changed = {"device": -1, "host": -1, "op": "-", "module": "-", "categories": {}}
    changed |= {"collectives": Counter(), "holders": Counter()}
    planned = table.answers
    monkeypatch.setattr(table, "answers", lambda timeline: planned(timeline) | changed)
    found = wrong(CASE, ranks4, folder)
    for name in changed:
        assert any(one.startswith(f"rank 0: {name} planned ") for one in found), name
    for rank in range(4):
        assert f"rank {rank}: more bytes on the device than planned" in found


def test_a_gradient_that_is_wrong_on_one_rank_is_found(ranks4, folder, monkeypatch):
    def on_rank(case, job, right):
        from lab_tests.proofs.cases import measure

        factor = 1.0001 if dist.get_rank() == 2 else 1
        return measure(case, job, {name: factor * value for name, value in right.items()})

    monkeypatch.setattr(table, "measure", on_rank)
    found = wrong(CASE, ranks4, folder)
    assert "rank 2: gradient of lm_head.weight is off by 1.0e-04" in found
    assert all(one.startswith("rank 2: ") for one in found)
