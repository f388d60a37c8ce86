"""A Trainer with a recipe and bf16=True is about as far from fp32 as the plain Trainer of a model in bf16."""

from pathlib import Path

import pytest

from cluster.ranks import Cluster
from lab_tests.support.small_trainings import Case, Outcome, expected, long_trainer, outcome
from lab_tests.support.trainers import launch

pytestmark = pytest.mark.slow

CASES = {
    "upipe": Case(dtype="float32"),
    "replicas": Case("tiling", knobs={"fsdp": False}, dtype="float32"),
}


def outcomes_in_bf16(folder: Path) -> dict[str, Outcome]:
    """Runs on ranks."""
    return {name: outcome(long_trainer(case, folder / name, bf16=True)) for name, case in CASES.items()}


def distance(found: Outcome, right: Outcome) -> float:
    """Of losses, norms and the evaluation: the largest relative difference."""
    pairs = zip(
        [*found.losses, *found.norms, found.evaluation],
        [*right.losses, *right.norms, right.evaluation],
        strict=True,
    )
    return max(abs(a - b) / b for a, b in pairs)


def test_bf16_is_at_most_half_again_as_far_from_fp32_as_plain_bf16(ranks4: Cluster, tmp_path: Path) -> None:
    right = expected(Case(dtype="float32"), tmp_path / "fp32")
    plain = distance(expected(Case(dtype="bfloat16"), tmp_path / "bf16"), right)
    for rank in launch(ranks4, 4, outcomes_in_bf16, tmp_path):
        for name, found in rank.items():
            assert 1e-5 < distance(found, right) < 1.5 * plain, name
