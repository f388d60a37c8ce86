"""The benchmark against DeepSpeed at small size: fewer heads at a time take less memory."""

import pytest

from cluster.ranks import Cluster
from lab.bench.upipe_vs_deepspeed import compare_attentions

# The first use of DeepSpeed compiles an operator on this machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_short_comparison():
    said = []
    # Ranks of its own: DeepSpeed's module keeps the first world group for good.
    with Cluster(ranks=2) as cluster:
        theirs, ulysses, *upipe = rows = compare_attentions(
            cluster, said.append, tokens=2048, head_dim=4, repeats=1
        )
    assert said == ["6 attentions on 2 ranks, warming up", "round 1 of 1"]
    assert [row["ranks"] for row in rows] == [2] * 6
    assert theirs["seconds / DeepSpeed's"] == theirs["bytes / DeepSpeed's"] == 1
    for row in rows:
        assert row["seconds"] == pytest.approx(row["seconds / DeepSpeed's"] * theirs["seconds"])
        assert row["bytes"] == pytest.approx(row["bytes / DeepSpeed's"] * theirs["bytes"])
    assert ulysses["bytes"] <= theirs["bytes"]
    overlapped = upipe.pop(1)
    assert overlapped["attention"] == "UPipe, U = C, overlap"
    peaks = [row["bytes"] for row in upipe]
    assert peaks == sorted(set(peaks))
    # x, dy and the output; and of the rest what a stage of one head in eight takes
    assert peaks[0] < overlapped["bytes"] < theirs["bytes"]
    assert 3 * 2048 // 2 * 64 * 4 < peaks[0] < 0.7 * theirs["bytes"]
