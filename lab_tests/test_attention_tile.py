"""Attention's backward in pairs of sequence tiles: its gradients, its calls, its bytes and its costs."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode

import lab
from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.memory.workspace import Workspace
from lab.models import shape_of
from lab.planning import fake_step as walking
from lab.planning.cuda_workspace import cuda_workspace, flash_backward_workspace
from lab.recipe.jobs import Machine, make_job
from lab.recipe.recipe import Recipe
from lab.step.kernel_limits import torch_refusal
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.attention.kernel import Kernel
from lab.techniques.attention.kernels import apply_kernel
from lab.techniques.attention.tiled_backward import tiled_kernel
from lab.techniques.ring import ring_kernel
from lab.techniques.slices import repetitions, short_loops
from lab.techniques.upipe.layer import apply_upipe
from lab.techniques.upipe.schedule import schedule
from lab_tests.support.costs import model_config, walked
from lab_tests.support.models import small_config
from lab_tests.support.reference import build, config

B, S, H, D = 3, 40, 8, 10
SCALE = 0.23
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def tensors(group=4, keys=S, dtype=FP64, causal=True, rows=B, tokens=S):
    """The gradient of the output, q, k, v, the output and the LSE, with the layout that the kernels have."""
    make = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(rows, n, h, D, generator=make, dtype=FP64).to(dtype).transpose(1, 2)
        for n, h in ((tokens, H), (keys, H // group), (keys, H // group), (tokens, H))
    )
    return grad, q, k, v, *FLASH.forward(q, k, v, causal=causal, scale=SCALE)


def relative(found, right):
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("tile", [1, 7, 8, 20, 39, 40, 64])
@pytest.mark.parametrize(("causal", "keys"), [(True, S), (False, S), (False, 23), (False, 57)])
def test_the_gradients_are_those_of_one_call_and_accumulate_adds_them(group, tile, causal, keys):
    given = tensors(group, keys, causal=causal)
    right = FLASH.backward(*given, causal=causal, scale=SCALE)
    kernel = tiled_kernel(FLASH, tile)
    copies = [t.clone() for t in given]
    found = kernel.backward(*given, causal=causal, scale=SCALE)
    assert relative(found, right) < 1e-14
    assert [(g.shape, g.dtype, g.stride()) for g in found] == [(g.shape, g.dtype, g.stride()) for g in right]
    assert all(map(torch.equal, given, copies)), "backward must not overwrite its arguments"
    sums = [torch.randn_like(t) for t in given[2:4]]
    before = [t.clone() for t in sums]
    assert kernel.accumulate(*given, *sums, causal=causal, scale=SCALE) is None
    added = [total - start for total, start in zip(sums, before, strict=True)]
    assert relative((given[1], *added), right) < 1e-14
    untouched = [0, 2, 3, 4, 5]
    assert all(torch.equal(given[i], copies[i]) for i in untouched), "dq alone is written over an argument"


def test_bf16_is_no_further_from_fp64_than_one_call():
    """A pair's dq is rounded, and then their sum, which for dq alone is a little more than one rounding."""
    given = tensors(dtype=BF16)
    truth = FLASH.backward(*(t.double() for t in given), scale=SCALE)
    kernel = tiled_kernel(FLASH, 7)
    one_call, found = (k.backward(*given, scale=SCALE) for k in (FLASH, kernel))
    assert {g.dtype for g in found} == {BF16}
    limits, errors = (
        [relative([g], [t]) for g, t in zip(grads, truth, strict=True)] for grads in (one_call, found)
    )
    assert 1e-4 < max(errors) <= max(limits)
    assert errors[0] < 1.25 * limits[0]
    sums = [torch.zeros_like(t, dtype=FP32) for t in given[2:4]]
    kernel.accumulate(*given, *sums, scale=SCALE)
    assert torch.equal(given[1], found[0])
    for total, gradient in zip(sums, found[1:], strict=True):
        assert torch.equal(total.to(BF16), gradient)
        assert not torch.equal(total, gradient.float()), "the sums are not rounded"


@pytest.mark.parametrize("tile", [7, 8, 40])
def test_one_call_for_each_pair_and_a_mask_only_between_the_same_tokens(tile):
    calls = []

    def backward(grad_out, q, k, v, out, lse, *, causal=True, scale=None):
        assert len({grad_out.shape, q.shape, out.shape}) == len({k.shape, v.shape}) == 1
        assert lse.shape == q.shape[:3]
        assert scale == SCALE
        calls.append((q.shape[2], k.shape[2], causal))
        return FLASH.backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)

    kernel = tiled_kernel(Kernel(FLASH.forward, backward), tile)
    kernel.backward(*tensors(), causal=True, scale=SCALE)
    n, rest = -(-S // tile), S % tile or tile
    lengths = [tile] * (n - 1) + [rest]
    assert calls == [(lengths[i], lengths[j], i == j) for i in range(n) for j in range(i + 1)]
    assert len(calls) == n * (n + 1) // 2
    calls.clear()
    kernel.backward(*tensors(keys=23, causal=False), causal=False, scale=SCALE)
    assert len(calls) == n * -(-23 // tile)
    assert not any(causal for *_, causal in calls)


def test_forward_is_the_kernels_own_so_its_limit_on_cuda_stays():
    assert tiled_kernel(FLASH, 8).forward is FLASH.forward
    assert ring_kernel(None, tiled := tiled_kernel(FLASH, 8)) is tiled
    shape, tokens = shape_of(small_config(num_attention_heads=24, head_dim=128)), 2**20
    refusals = [torch_refusal(Recipe(attention_tile=tile), shape, tokens) for tile in (None, 2**16)]
    assert refusals[0] == refusals[1] is not None


def test_what_is_no_tile_and_a_mask_between_other_tokens_are_refused():
    with pytest.raises(RecipeError, match=r"^attention_tile=0: a tile is a number of tokens; use 1 or more"):
        tiled_kernel(FLASH, 0)
    for value in (0, -3, True, 2.5, "8"):
        with pytest.raises(
            RecipeError, match=f"^attention_tile={value!r}: it takes a whole number, 1 or more"
        ):
            Recipe(attention_tile=value)
    with pytest.raises(ValueError, match="40 queries to 23 keys"):
        tiled_kernel(FLASH, 8).backward(*tensors(keys=23, causal=False))


# ---- bytes -------------------------------------------------------------------------------------------


def pair_bytes(rows, tile, heads, group, dtype):
    """b*t*h*D*(w + f + 2*w/G) of the docstring."""
    width, wide = dtype.itemsize, max(dtype.itemsize, 4)
    return rows * tile * heads * D * (width + wide) + 2 * rows * tile * heads // group * D * width


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("dtype", "tile"), [(BF16, 8), (BF16, 25), (FP32, 7), (FP64, 12)])
def test_backward_holds_the_sums_dq_and_one_pair(group, dtype, tile):
    """Beside the gradient of the output. At the end, the sum of dk is rounded while both sums are there."""
    given = tensors(group, dtype=dtype)
    q, k, v = (t.detach().requires_grad_() for t in given[1:4])
    meter, width = Meter(), dtype.itemsize
    with meter.measure(torch.nn.Module()):
        out = attention(q, k, v, kernel=tiled_kernel(FLASH, tile))
        held = int(meter.timeline().total[-1])
        with meter.phase("backward"):
            torch.autograd.grad(out, (q, k, v), given[0])
    one_query, one_key = B * S * H * D, B * S * H // group * D
    sums = 2 * one_key * max(width, 4)
    last = one_key * width * (width < 4)
    made = 2 * width * one_query + sums + max(pair_bytes(B, tile, H, group, dtype), last)
    assert meter.timeline().device_peak - held == made


def upipe_peak(cfg, chunk, group, local, rows, tile):
    """The peak of the backward of one attention module with UPipe, in bf16, beyond x and parameters."""
    model = build(cfg, BF16)
    apply_kernel(model, kernel=tiled_kernel(FLASH, tile))
    apply_upipe(model, head_chunk=chunk, group=group)
    module = model.model.layers[0].self_attn
    x = torch.randn(rows, local, cfg.hidden_size, dtype=BF16, requires_grad=True)
    tables = tuple(torch.randn(1, local, cfg.head_dim, dtype=BF16) for _ in range(2))
    dy, meter = torch.randn_like(x), Meter()
    with meter.measure(module):
        with meter.phase("forward"):
            y, _ = module(hidden_states=x, position_embeddings=tables)
        loss = y.view(y.shape)
        del y
        with meter.phase("backward"):
            torch.autograd.grad(loss, [x, *module.parameters()], dy)
    return meter.timeline().device_peak - sum(t.nbytes for t in (x, *module.parameters(), *tables))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "chunk", "rows"), [(64, 16, 8, 1), (64, 16, 32, 2), (24, 24, 8, 1), (48, 24, 48, 3)]
)
@pytest.mark.parametrize("tile", [110, 1200])
def test_under_upipe_no_whole_dq_dk_or_dv_is_there(eight, heads, kv_heads, chunk, rows, tile):
    """The formula of the docstring of ``tiled_kernel``, with the letters of ``apply_upipe``."""
    ranks, local = 8, 150
    cfg = config("llama", heads, kv_heads, layers=1, hidden_size=heads)
    plan = schedule(heads, kv_heads, ranks, chunk)
    in_flight, groups = ranks * plan.slots_in_flight, plan.slots // plan.slots_in_flight
    hidden, head, wide = 2 * rows * local * cfg.hidden_size, 2 * rows * local * D, 4 // 2
    per_call = chunk // ranks // plan.slots_in_flight
    pair = pair_bytes(rows, min(tile, ranks * local), chunk // ranks, per_call, BF16)
    sums = 2 * head * in_flight * wide
    shared = any(not (run.opens and run.closes) for stage in plan.stages for run in stage)
    stage = max(
        head * (3 * chunk + 2 * in_flight) + sums + pair,
        head * (2 * chunk + 4 * in_flight) + sums,
        head * (4 * chunk + 2 * in_flight) + sums * shared,
    )
    stage += 2 * head * kv_heads * (groups - 1) // groups
    dwo = dwq = 2 * heads * D * cfg.hidden_size
    dwk = 2 * kv_heads * D * cfg.hidden_size
    end = 2 * head * kv_heads + max(hidden + dwq + 2 * dwk, (groups > 1) * head * kv_heads)
    held = head * heads + 4 * rows * local * heads
    assert stage > end
    assert upipe_peak(cfg, chunk, eight, local, rows, tile) == 2 * hidden + held + dwo + max(stage, end)


def test_what_the_kernel_allocates_inside_is_that_of_a_pair():
    found, model = [], cuda_workspace(1)

    def kernel(op, args):
        inside = model.kernel(op, args)
        if inside:
            found.append(inside)
        return inside

    given = tensors(dtype=BF16, rows=1)
    meter = Meter(workspace=Workspace(kernel=kernel))
    with meter.measure(torch.nn.Module()):
        tiled_kernel(FLASH, 8).backward(*given)
    assert found == [flash_backward_workspace(1, H, H // 4, 8, 8, D)] * 15
    assert found[0] < flash_backward_workspace(1, H, H // 4, S, S, D)


# ---- plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [8, 7, 20, 15, 3])
@pytest.mark.parametrize(("causal", "keys"), [(True, S), (False, 57)])
def test_a_shortened_loop_counts_every_pair(tile, causal, keys):
    """The kernel's calls, their floating-point operations and the peak, of fake tensors."""
    found = []
    for loops in (short_loops, contextlib.nullcontext):
        counted, calls = [0, 0], 0

        def backward(grad_out, q, k, v, out, lse, *, causal=True, scale=None, counted=counted):
            nonlocal calls
            calls += 1
            times = repetitions()
            counted[0] += times
            counted[1] += times * q.shape[2] * k.shape[2] * (1 if causal else 2)
            return FLASH.backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)

        with FakeTensorMode(), loops():
            given = tensors_of_shape(keys, causal)
            meter = Meter()
            with meter.measure(torch.nn.Module()):
                tiled_kernel(Kernel(FLASH.forward, backward), tile).backward(*given, causal=causal)
        found.append((*counted, meter.timeline().device_peak))
        assert calls <= (9 if loops is short_loops else counted[0])
    assert found[0] == found[1]
    assert found[0][1] == S * keys * (1 if causal else 2)


def tensors_of_shape(keys, causal):
    q, k = torch.empty(B, S, H, D).transpose(1, 2), torch.empty(B, keys, H // 4, D).transpose(1, 2)
    return q, q, k, k, *FLASH.forward(q, k, k, causal=causal)


def asked(knobs, workspace):
    model = small_config(vocab_size=104, num_attention_heads=24)
    recipe = Recipe(fsdp=True, ulysses=2, checkpoint=True, **knobs)
    return make_job(model, recipe, tokens=500, ranks=4), Machine(workspace=workspace)


@pytest.mark.long
@pytest.mark.parametrize(
    ("knobs", "workspace"),
    [
        ({"attention_tile": 77, "head_chunk": 12}, True),
        ({"attention_tile": 77, "head_chunk": 6, "overlap": True}, False),
        ({"attention_tile": 50, "compute_dtype": "bfloat16"}, False),
        ({"attention_tile": 31, "ring": 2}, True),
    ],
)
def test_a_shortened_step_is_the_whole_step(monkeypatch, knobs, workspace):
    short, short_costs = walked(*asked(knobs, workspace), 1)
    monkeypatch.setattr(walking, "short_loops", contextlib.nullcontext)
    whole, costs = walked(*asked(knobs, workspace), 1)
    assert len(short) < 0.9 * len(whole)
    assert (short.device_peak, short.peak.by_category) == (whole.device_peak, whole.peak.by_category)
    assert (short.peak.op, short.peak.module) == (whole.peak.op, whole.peak.module)
    assert short_costs.flops == costs.flops > 0
    assert short_costs.device_seconds == pytest.approx(costs.device_seconds, rel=1e-12)
    untiled = walked(*asked({**knobs, "attention_tile": None}, workspace), 1)[1]
    assert (costs.flops, costs.link_bytes) == (untiled.flops, untiled.link_bytes)


@pytest.mark.long
def test_a_tile_of_64k_tokens_costs_at_most_a_fiftieth_of_the_seconds():
    def planned(tile):
        recipe = Recipe(
            fsdp=True, ulysses=4, head_chunk=8, checkpoint=True, compute_dtype="bfloat16", attention_tile=tile
        )
        return lab.plan(model_config(), recipe, tokens=2**20, ranks=4)

    one_call, tiled = planned(None), planned(2**16)
    assert one_call.costs.flops == tiled.costs.flops
    assert 1 < tiled.costs.seconds / one_call.costs.seconds < 1.02
    assert tiled.device_peak < one_call.device_peak
