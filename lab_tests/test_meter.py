"""The meter against counts by hand, and against the profiler's own memory events."""

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from lab import models
from lab.memory.categories import CATEGORIES
from lab.memory.meter import Meter
from lab.memory.resizes import report_resizes
from lab.recipe.recipe import Recipe
from lab.step.one_rank import one_rank
from lab_tests.support.memory_events import peak_of_events
from lab_tests.support.metered_step import FP32, TwoLayers, metered_step


def test_peak_equals_a_count_by_hand():
    model, x = TwoLayers(), torch.randn(11, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    meter = Meter()
    metered_step(meter, model, optimizer, x)
    timeline = meter.timeline()
    parameters = (7 * 5 + 3 * 7) * FP32
    forward = [
        (x.numel() + 11 * 7) * FP32,  # x and W1 x^T
        (x.numel() + 2 * 11 * 7) * FP32,  # and its relu, which backward needs: W1 x^T lives to the end of it
        (x.numel() + 11 * 7 + 11 * 3) * FP32,  # W1 x^T is gone, the output is there
    ]
    ops = [timeline.moment(row).op for row in range(len(timeline))]
    assert timeline.total[ops.index("aten.mm")] == parameters + forward[0]
    assert timeline.total[ops.index("aten.relu")] == parameters + forward[1]
    # Backward: dy (expanded from one number) with dW2 and d relu, before relu's output can go.
    scalar = FP32
    at_peak = (x.numel() + 11 * 7) + (3 * 7) + (11 * 7)
    held = parameters + at_peak * FP32 + 2 * scalar
    peak = timeline.peak
    assert (peak.phase, peak.op, peak.shapes) == ("backward", "aten.threshold_backward", "11x7 11x7")
    assert peak.device == held + (11 * 7) * FP32
    assert peak.by_category["parameters"] == parameters


def test_everything_is_freed_again():
    model, x = TwoLayers(), torch.randn(11, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    meter = Meter()
    metered_step(meter, model, optimizer, x)
    gc.collect()
    last = meter.timeline().moment(-1)
    loss = FP32
    assert {name: size for name, size in last.by_category.items() if size} == {
        "parameters": (7 * 5 + 3 * 7) * FP32, "activations": x.numel() * FP32, "temporary buffers": loss,
    }  # fmt: skip


def test_categories_of_a_training_step():
    model, x = TwoLayers(), torch.randn(11, 5)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    metered_step(Meter(), model, optimizer, x)
    meter = Meter()
    metered_step(meter, model, optimizer, x)
    timeline = meter.timeline()
    parameters = (7 * 5 + 3 * 7) * FP32
    by_phase = {
        phase: timeline.rows([timeline.phases[p] == phase for p in timeline.phase])
        for phase in timeline.phases
    }
    most = {
        phase: dict(zip(CATEGORIES, rows.device.max(axis=0).tolist(), strict=True))
        for phase, rows in by_phase.items()
    }
    assert most["forward"]["gradients"] == 0
    assert most["backward"]["gradients"] == parameters
    assert most["optimizer"]["optimizer"] == 2 * parameters + 2 * FP32  # two moments, two step counters
    assert most["forward"]["activations"] >= 11 * 7 * FP32
    assert by_phase["optimizer"].moment(-1).by_category["activations"] == x.numel() * FP32


def test_backward_names_the_module_whose_forward_it_undoes():
    model = TwoLayers()
    meter = Meter()
    metered_step(meter, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(11, 5))
    timeline = meter.timeline()
    rows = [timeline.moment(row) for row in range(len(timeline))]
    named = {(m.phase, m.module) for m in rows if m.op == "aten.mm"}
    assert named == {
        ("forward", "first"), ("forward", "second"), ("backward", "second"), ("backward", "first")
    }  # fmt: skip


def test_a_resized_storage_is_followed():
    """FSDP frees an unsharded parameter by resizing its storage, which crosses no dispatcher."""
    model = TwoLayers()
    meter = Meter()
    with meter.measure(model), meter.phase("forward"):
        held = torch.zeros(1000)
        before = meter.timeline().moment(-1).device
        held.untyped_storage().resize_(0)
        torch.zeros(1)
        freed = before - meter.timeline().moment(-1).device
    assert freed == 1000 * FP32 - FP32
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


def test_resizes_reach_all_who_listen_in_whatever_order_they_end():
    first, second, storage = [], [], torch.zeros(7).untyped_storage()
    outer, inner = report_resizes(first.append), report_resizes(second.append)
    outer.__enter__()
    inner.__enter__()
    storage.resize_(8)
    outer.__exit__(None, None, None)
    storage.resize_(12)
    inner.__exit__(None, None, None)
    storage.resize_(16)
    assert (len(first), len(second)) == (1, 2)
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


def test_peak_agrees_with_the_profilers_memory_events():
    """A whole step of a real model. The profiler sees what is allocated while it looks: not the input ids."""
    tokens = 384
    model = models.build("tiny").train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 256, (1, tokens))

    def step(meter):
        with meter.measure(model, optimizer):
            with meter.phase("forward"):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()

    step(Meter())
    meter = Meter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(meter)
    timeline = meter.timeline()
    grown = timeline.device_peak - int(timeline.total[0])
    assert grown - ids.numel() * ids.element_size() == peak_of_events(profiler)


def scratch_of_flash(tokens: int) -> int:
    """Bytes at the profiler's peak of attention's forward and backward that the meter did not see."""
    q, k, v = (torch.randn(1, 6, tokens, 24, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, 6, tokens, 24)
    meter = Meter()
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        meter.measure(nn.Module()),
        meter.phase("forward"),
    ):
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)
    seen = meter.timeline().device_peak - 4 * q.numel() * FP32
    return peak_of_events(profiler) - seen


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads")
def test_flash_attention_keeps_a_number_a_head_and_token_and_a_mebibyte_a_thread_inside_itself():
    short, long = scratch_of_flash(1024), scratch_of_flash(3072)
    row_sums = 6 * FP32
    assert long - short == (3072 - 1024) * row_sums
    assert 1.0 <= (short - 1024 * row_sums) / 2 / 2**20 < 1.01


def test_growth_is_handed_out_once_and_in_order():
    model, grown = TwoLayers(), []
    meter = Meter(on_growth=grown.append, interval=0.0)
    metered_step(meter, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(11, 5))
    seconds = [s for rows in grown for s in rows.seconds.tolist()]
    assert seconds == meter.timeline().seconds.tolist()
    assert len(grown) > 5


class UsesAWeight(nn.Module):
    """Multiplies by a weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.head.weight.T


def test_a_gathered_parameter_has_its_name_where_its_module_is_not_entered() -> None:
    model, meter = UsesAWeight(), Meter()
    with one_rank(Recipe(fsdp=True), 4, "loopback") as mesh:
        fully_shard(model, mesh=mesh)
        with meter.measure(model), meter.phase("forward"):
            model(torch.randn(3, 8))
    storages = meter.timeline().storages
    [whole] = np.flatnonzero(storages.size == 40 * 8 * FP32)
    name = storages.kinds[storages.kind[whole]].name
    assert (name, CATEGORIES[storages.category[whole]]) == ("head.weight", "parameters")


def test_hooks_are_gone_after_a_step_that_fails():
    model = TwoLayers()
    meter = Meter()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        metered_step(meter, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(11, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert threading.active_count() >= 1
    assert len(meter.timeline()) > 0
