"""The bytes of Ulysses, and the degrees that are refused. Its gradients are in the table of cases."""

import pytest
import torch
import torch.distributed as dist

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.ulysses import apply_ulysses, ulysses_attention
from lab_tests.support.reference import build, config


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
