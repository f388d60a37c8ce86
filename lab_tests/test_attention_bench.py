"""The benchmark of attention kernels, on CPU at small size."""

import json
import math

import pytest
import torch
import transformers
from click.testing import CliRunner

from lab.bench import attention
from lab.bench.table import rows_text
from lab.commands.cli import main
from lab.techniques.attention.flash import flash_backward, flash_forward
from lab.techniques.attention.kernel import Kernel
from lab.techniques.attention.kernels import FASTEST_FIRST, kernel_support, missing_requirement


@pytest.fixture
def only(monkeypatch):
    """The bench with one kernel in the place of torch's."""

    def put(forward=flash_forward, backward=flash_backward):
        monkeypatch.setattr(attention, "KERNELS", {"torch": Kernel(forward, backward)})

    return put


@pytest.mark.parametrize("heads_first", [False, True])
def test_the_memory_order_of_the_gradient_is_the_one_asked_for(heads_first):
    """And the call before has the other one, at the same shapes, if heads come first."""
    calls = []

    def backward(grad_out, *rest, **settings):
        calls.append((grad_out.shape[2], grad_out.stride(1) > grad_out.stride(2)))
        return flash_backward(grad_out, *rest, **settings)

    figures = attention.measure_kernel(
        Kernel(flash_forward, backward), 40, torch.device("cpu"), heads=6, kv_heads=2,
        heads_first=heads_first, repeats=0,
    )  # fmt: skip
    assert calls == [(40, False), (40, heads_first)]
    assert figures["worst error"] < 1e-3
    assert figures["/ matmul"] is None, "products were timed once"


def test_a_row_for_each_kernel_that_is_here_and_each_length():
    said = CliRunner().invoke(main, ["bench", "attention", "--tokens", "96", "--tokens", "33", "--json"])
    assert said.exit_code == 0
    rows = json.loads(said.stdout)
    machine = kernel_support(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    here = [name for name in FASTEST_FIRST if missing_requirement(name, machine, 128) is None]
    assert [(row["kernel"], row["tokens"]) for row in rows] == [(name, n) for n in (96, 33) for name in here]
    for row in rows:
        assert row["failed"] is None
        assert 0 < row["worst error"] < 1e-3
        assert min(row["forward s"], row["backward s"], row["TFLOP/s"], row["/ matmul"]) > 0
        for package in (torch, transformers):
            assert f", {package.__name__} {package.__version__}" in row["machine"]


def test_times_are_medians_and_each_kernel_is_its_own(only, monkeypatch):
    monkeypatch.setattr(attention, "rounds", lambda *_: [[9.0, 1.0, 2.0], *[[1.0, 3.0, 2.0]] * 4])
    only()
    [row] = attention.measure_attention([64], lambda said: None)
    assert (row["forward s"], row["backward s"]) == (1.0, 3.0)
    assert row["TFLOP/s"] == 7 * 4 * 64**2 * 128 / 4 / 1e12
    assert row["/ matmul"] == pytest.approx(7 * 4 * 64**2 * 128 / 4 / (10 * 2 * 512**3 / 2))


def test_a_kernel_that_is_wrong_far_away_is_seen_and_one_that_is_not_a_number(only):
    def forward(q, k, v, **more):
        out, lse = flash_forward(q, k, v, **more)
        out[:, 1, -1] *= 1.01
        return out, lse

    only(forward)
    [row] = attention.measure_attention([64], lambda said: None)
    assert row["worst error"] > 5e-3
    only(backward=lambda dout, q, *rest: (q * math.nan, *flash_backward(dout, q, *rest)[1:]))
    [row] = attention.measure_attention([64], lambda said: None)
    assert math.isnan(row["worst error"])


def test_a_kernel_that_fails_says_so_in_its_row(only):
    def forward(*_, **__):
        raise RuntimeError("too long\nand more")

    only(forward)
    [row] = attention.measure_attention([64], lambda said: None)
    assert row["failed"] == "too long"
    assert {row[name] for name in ("forward s", "backward s", "TFLOP/s", "/ matmul", "worst error")} == {None}


def test_the_machine_of_all_rows_is_named_once_below_them():
    rows = [{"kernel": "torch", "tokens": n, "machine": "a GPU, torch 2"} for n in (5, 7)]
    above, below = rows_text([*rows, {**rows[0], "machine": None}], as_json=False).rsplit("\n", 1)
    assert below == "  on a GPU, torch 2"
    assert "machine" not in above
    assert len(above.splitlines()) == 2 + 3
    assert json.loads(rows_text(rows, as_json=True)) == rows
