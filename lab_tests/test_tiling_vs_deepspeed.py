"""The benchmark against DeepSpeed's and TRL's tiles at small size: bytes and errors, without seconds."""

import sys

import pytest

from lab.bench.tiling_vs_deepspeed import compare_tiles

DTYPES = ["float32", "float64", "bfloat16"]
DEEPSPEEDS = ["TiledMLP", "sequence_tiled_compute", "TiledFusedLogitsLoss"]
TRLS = "TRL's chunked head"
ROUNDING = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 5e-3}


def compare():
    said = []
    rows = list(compare_tiles(said.append, tokens=320, hidden=32, tiles=5, repeats=0))
    assert said == [f"{name}, {dtype}" for dtype in DTYPES for name in [*DEEPSPEEDS, TRLS]]
    assert [row["dtype"] for row in rows] == [dtype for dtype in DTYPES for _ in range(4)]
    return rows


def check_against_deepspeed(row):
    assert row["against"] in DEEPSPEEDS
    assert row["ours, s"] is row["theirs, s"] is row["ours / theirs"] is None
    assert 0 < row["ours, error"] <= 1.01 * row["theirs, error"] < 1.01 * ROUNDING[row["dtype"]]
    if row["dtype"] != "bfloat16":
        assert row["ours, bytes"] <= row["theirs, bytes"]
        return
    # DeepSpeed sums over tiles in bf16, which is smaller, and rounds after each.
    assert row["ours, error"] < 0.9 * row["theirs, error"]
    if row["against"] != "TiledFusedLogitsLoss":
        weights = 3 * 32 * 112
        assert row["theirs, bytes"] < row["ours, bytes"] <= row["theirs, bytes"] + weights * (4 + 2)


@pytest.mark.long
def test_a_short_comparison():
    pytest.importorskip("trl")
    rows = compare()
    for row in rows:
        if row["against"] != TRLS:
            check_against_deepspeed(row)
            continue
        assert row["ours, bytes"] < row["theirs, bytes"]
        # TRL computes probabilities and sums in fp32, in every dtype.
        narrowed = row["dtype"] == "float64"
        assert row["ours, error"] < ROUNDING[row["dtype"]]
        assert row["theirs, error"] < ROUNDING["float32" if narrowed else row["dtype"]]
        assert narrowed == (row["theirs, error"] > 1e6 * row["ours, error"])


@pytest.mark.long
def test_without_trl_its_rows_have_no_figures_of_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.kernels", None)
    for row in compare():
        if not row["against"].startswith(TRLS):
            check_against_deepspeed(row)
            continue
        assert row["against"] == f"{TRLS} (not installed)"
        assert row["theirs, bytes"] is row["theirs, error"] is None
        assert 0 < row["ours, error"] < ROUNDING[row["dtype"]]
