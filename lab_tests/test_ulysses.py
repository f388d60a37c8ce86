"""Ulysses has the plain model's loss and every one of its gradients."""

import pytest
import torch
import torch.distributed as dist

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.rope import apply_rope
from lab.techniques.ulysses import apply_ulysses, ulysses_attention
from lab_tests.support.operators import Calls
from lab_tests.support.reference import build, config, error, subgroup, tokens, truth, worst_errors

# family, H, K, C, b, S: shapes where no two quotients coincide, and one of each kind of head sharing.
CASES = [
    ("llama", 24, 6, 2, 2, 40),
    ("llama", 24, 24, 4, 1, 44),
    ("llama", 24, 2, 4, 2, 36),
    ("llama", 40, 1, 4, 1, 36),
    ("llama", 24, 6, 1, 1, 35),
    ("qwen2", 28, 4, 2, 1, 42),
    ("qwen2", 28, 4, 4, 2, 36),
    ("qwen3", 24, 6, 2, 2, 38),
    ("mistral", 40, 8, 4, 1, 52),
]


def model_and_positions(cfg, ids, group, dtype):
    model = build(cfg, dtype)
    apply_rope(model)
    apply_ulysses(model, group=group)
    local = ids.shape[1] // dist.get_world_size(group)
    return model, torch.arange(local) + local * dist.get_rank(group)


def errors_of(cases, dtype):
    """One cluster call for all cases; each rank's gradients are summed, so rank 0's verdict is everyone's."""
    groups = {ranks: subgroup(ranks) for ranks in (1, 2, 4)}
    found = []
    for family, heads, kv_heads, ranks, rows, length in cases:
        cfg, ids, group = config(family, heads, kv_heads), tokens(rows, length), groups[ranks]
        model, positions = model_and_positions(cfg, ids, group, dtype)
        found.append(worst_errors(cfg, ids, model, positions, group))
    return found


def test_loss_and_gradients_are_the_plain_models(ranks4):
    for rank in ranks4.apply(errors_of, CASES, torch.float64):
        for case, (loss, gradient) in zip(CASES, rank, strict=True):
            assert loss < 1e-9, case
            assert gradient < 1e-9, case


def test_loss_and_gradients_in_single_precision(ranks4):
    for rank in ranks4.apply(errors_of, CASES[:3], torch.float32):
        for case, (loss, gradient) in zip(CASES[:3], rank, strict=True):
            assert loss < 5e-6, case
            assert gradient < 5e-6, case


def bf16_errors(cases):
    """The worst gradient's error against fp32 on the same rounded weights: ours, and the plain model's."""
    found = []
    for family, heads, kv_heads, ranks, rows, length in cases:
        cfg, ids, group = config(family, heads, kv_heads), tokens(rows, length), subgroup(ranks)
        model, positions = model_and_positions(cfg, ids, group, torch.bfloat16)
        right = truth(cfg, ids, torch.float32, rounded=torch.bfloat16)
        plain = error(truth(cfg, ids, torch.bfloat16)[1], right[1])
        found.append((worst_errors(cfg, ids, model, positions, group, right)[1], plain))
    return found


def test_bf16_is_no_worse_than_plain_bf16(ranks4):
    cases = [CASES[0], CASES[2], CASES[7]]
    for case, (ours, plain) in zip(cases, ranks4.apply(bf16_errors, cases)[0], strict=True):
        assert 0 < ours < 1.5 * plain, case


def calls_of_a_layer():
    cfg = config("llama", 32, 8, layers=1)
    model, positions = model_and_positions(cfg, tokens(1, 40), dist.group.WORLD, torch.float32)
    with Calls() as forward:
        logits = model(input_ids=tokens(1, 40)[:, positions], position_ids=positions[None]).logits
    with Calls() as backward:
        logits.sum().backward()
    return [(c["all_to_all"], c["attention forward"], c["attention backward"]) for c in (forward, backward)]


def test_four_all_to_alls_a_layer_and_direction(ranks4):
    assert ranks4.apply(calls_of_a_layer) == [[(4, 1, 0), (4, 0, 1)]] * 4


def bytes_of_attention():
    group, (heads, kv_heads, local, dim, width) = dist.group.WORLD, (24, 2, 20, 10, 2)
    q, k, v = (
        torch.randn(1, local, h, dim, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    meter = Meter()
    with meter.measure(torch.nn.Module()), meter.phase("forward"):
        out = ulysses_attention(q, k, v, group=group)
    replicated = max(kv_heads, dist.get_world_size())
    held = width * local * dim * (4 * heads + 2 * kv_heads + 2 * replicated) + 4 * local * heads
    peak = held + width * local * dim * heads
    assert out.shape == q.shape
    return int(meter.timeline().total[-1]) - held, meter.timeline().device_peak - peak


def test_bytes_are_the_docstrings(ranks4):
    assert ranks4.apply(bytes_of_attention) == [(0, 0)] * 4


def check_refusal(heads, kv_heads):
    with pytest.raises(RecipeError, match="ulysses=4"):
        apply_ulysses(build(config("llama", heads, kv_heads), torch.float32), group=dist.group.WORLD)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (24, 6), (12, 3)])
def test_degrees_that_the_heads_do_not_allow_are_refused(ranks4, heads, kv_heads):
    ranks4.apply(check_refusal, heads, kv_heads)
