"""What a number of tokens takes in days and money, and the share of the GPUs' peak that a step reaches."""

from dataclasses import asdict
from typing import Any

import pytest

import lab
from lab.errors import LabError
from lab.models import shape_of
from lab.models.lora import Lora
from lab.planning.bill import Bill, Order, make_bill, make_order
from lab.planning.hardware import hardware
from lab.planning.model_flops import model_flops
from lab.recipe.jobs import Job, Machine
from lab.recipe.recipe import Recipe
from lab_tests.support.costs import ATTENTION, D, E, H, I, K, L, S, V, model_config, planned_costs
from lab_tests.support.reference import config

MATRICES = L * (2 * E * H * D + 2 * E * K * D + 3 * E * I) + V * E


def job(tokens: int = 1000, ranks: int = 12, **more: Any) -> Job:
    return Job("tiny", Recipe(), tokens, ranks, **more)


def test_a_bill_is_exact() -> None:
    order = Order(7 * 3000 * 24, 2.5)
    bill = make_bill(order, job(rows=3), Machine(ranks_per_node=8), 3600.0)
    # 12 ranks are on two nodes, and the money is that of the GPUs with ranks.
    assert bill == Bill(steps=168, days=7.0, node_hours=336.0, gpu_hours=2016.0, money=5040.0)
    assert bill.to_json() == asdict(bill)
    assert bill.text(order) == (
        "504K tokens take 168 steps, 7 days, 336 node hours, 5,040 at 2.5 for a GPU hour (estimate)"
    )
    without = make_bill(Order(order.tokens), job(rows=3), Machine(ranks_per_node=8), 3600.0)
    assert (without.money, without.gpu_hours, without.money_text) == (None, 2016.0, "-")
    assert "GPU hour" not in without.text(Order(order.tokens))


def test_the_last_step_is_whole() -> None:
    of_a_step = job(rows=3, accumulate=2)
    assert [Order(tokens).steps_of(of_a_step) for tokens in (6000, 6001, 12000, 12001)] == [1, 2, 2, 3]
    # Beyond what a float can count.
    assert Order(2**62 + 1).steps_of(job(tokens=2)) == 2**61 + 1


def test_an_order_is_decimal_and_may_be_text() -> None:
    assert make_order("10B", "2.5") == Order(10**10, 2.5)
    assert make_order("1.5T", 3) == Order(15 * 10**11, 3.0)
    assert make_order("500m", None) == Order(5 * 10**8)
    assert make_order(None, None) is None


@pytest.mark.parametrize(
    ("total", "price", "said"),
    [
        ("10B", -2.5, "price=-2.5: give the money for one GPU hour, a number above 0 such as 2.5"),
        ("10B", 0, "price=0: give the money"),
        ("10B", "nan", "price='nan': give the money"),
        ("10B", "inf", "price='inf': give the money"),
        ("10B", "2,5", "price='2,5': give the money"),
        ("10B", True, "price=True: give the money"),
        (0, 2.5, "0 is not a total of tokens: write 500M, 10B or 1T, which are decimal: 10B = 10^10"),
        ("10G", 2.5, "'10G' is not a total of tokens: write 500M, 10B or 1T"),
        ("-1B", 2.5, "'-1B' is not a total of tokens"),
        ("1.5", 2.5, "'1.5' is not a total of tokens"),
        (None, 2.5, "price=2.5 without tokens_total: give the tokens to be trained too, such as 10B"),
    ],
)
def test_an_order_that_is_none_is_refused_in_one_line(total: Any, price: Any, said: str) -> None:
    with pytest.raises(LabError) as refused:
        make_order(total, price)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_fewer_tokens_than_a_step_has_are_refused_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lab.planning.fit.plan_job", None)
    said = r"^tokens_total=3K is less than a step has: 3 rows x 1024 tokens = 3072; give at least as many$"
    with pytest.raises(LabError, match=said):
        lab.fit("tiny", tokens="1K", ranks=4, rows=3, tokens_total=3000)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_model_needs_what_a_plain_step_computes_but_for_the_scores_of_backward(rows: int) -> None:
    step = Job(model_config(), Recipe(), S, 1, rows)
    needed = model_flops(shape_of(model_config()), step)
    assert needed == rows * 3 * (2 * MATRICES * S + L * ATTENTION)
    assert needed == planned_costs(1, rows=rows).flops - rows * L * ATTENTION // 2


def test_no_recipe_changes_what_the_model_needs() -> None:
    shape = shape_of(model_config())
    checkpointed = Job(model_config(), Recipe(fsdp=True, ulysses=4, checkpoint=True), S, 4)
    assert model_flops(shape, checkpointed) == model_flops(shape, Job(model_config(), Recipe(), S, 1))
    computed = planned_costs(4, fsdp=True, ulysses=4, checkpoint=True).flops * 4
    assert computed > model_flops(shape, checkpointed)


def test_a_token_needs_its_experts_and_the_router() -> None:
    mixture = config("mixtral")
    shape = shape_of(mixture)
    step = lab.plan(mixture, Recipe(), tokens=S, ranks=1)
    attention = shape.L * 2 * S * S * shape.H * shape.D
    assert step.model_flops == step.costs.flops - attention // 2


def test_a_window_and_a_document_need_the_pairs_that_see_each_other() -> None:
    shape = shape_of(model_config())
    one, two = (
        model_flops(shape, Job(model_config(), Recipe(), S, 1, documents=documents))
        for documents in (None, (100, 60))
    )
    assert one - two == 3 * L * 2 * H * D * (S**2 - 100**2 - 60**2)
    windows = shape_of(config("gemma3_text"))
    seen = {window: sum(min(key, window or S) for key in range(S)) for window in set(windows.windows)}
    pairs = sum(seen[window] for window in windows.windows)
    every = sum(range(S)) * windows.L
    assert pairs < every
    without = {**vars(windows), "windows": (None,) * windows.L}
    fewer = model_flops(type(windows)(**without), job(S)) - model_flops(windows, job(S))
    # The pairs of a token with itself are counted half.
    assert fewer == pytest.approx(3 * 4 * windows.H * windows.D * (every - pairs), rel=0.02)


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    shape = shape_of(model_config())
    adapters = Lora(r=2, targets=("q_proj", "v_proj"))
    trained = L * 2 * ((E + H * D) + (E + K * D))
    step = Job(model_config(), Recipe(), S, 1, lora=adapters)
    assert model_flops(shape, step) == 4 * MATRICES * S + 6 * trained * S + 3 * L * ATTENTION


def test_mfu_is_of_the_dense_peak_of_all_ranks() -> None:
    made = lab.plan(model_config(), Recipe(fsdp=True, ulysses=4), tokens=S, ranks=4, rows=2)
    peak = hardware("h100").matmul.value
    assert peak == 989e12
    needed = 2 * 3 * (2 * MATRICES * S + L * ATTENTION)
    assert made.mfu == pytest.approx(needed / (made.step_seconds * 4 * peak), rel=1e-12)
    assert (made.to_json()["mfu"], made.to_json()["model_flops"]) == (made.mfu, needed)
    day = made.bill(Order(2 * S * 1000, 2.0))
    assert (day.steps, day.money) == (1000, pytest.approx(1000 * made.step_seconds * 4 / 3600 * 2))
