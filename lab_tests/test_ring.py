"""Ring attention: who holds which tokens, and bytes. Its gradients are in the table of cases."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.recipe.recipe import Recipe
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.ring import apply_ring, local_positions, ring_kernel
from lab.techniques.ulysses_degrees import token_multiple
from lab_tests.support.operators import Calls
from lab_tests.support.reference import build, config


def refusal_of_a_window():
    model = build(config("mistral"), torch.float64)
    try:
        apply_ring(model, group=dist.group.WORLD)
    except RecipeError as error:
        return str(error)
    return ""


def test_a_ring_with_windows_is_refused_by_hand_as_in_a_recipe(ranks4):
    with pytest.raises(RecipeError) as in_a_recipe:
        Recipe(ring=4).check(config("mistral"), 4)
    assert ranks4.apply(refusal_of_a_window) == [str(in_a_recipe.value)] * 4
    apply_ring(build(config("mistral"), torch.float64), group=None)


# ---- who holds which tokens --------------------------------------------------------------------------


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (4, 1), (1, 2), (3, 2), (2, 3), (2, 4), (8, 2)])
def test_positions_are_each_token_once_and_balanced(ulysses, ring):
    length = 5 * token_multiple(ulysses, ring)
    held = [local_positions(length, ulysses=ulysses, ring=ring, index=i) for i in range(ulysses * ring)]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    assert all((p.diff() > 0).all() for p in held)
    assert {len(p) for p in held} == {length // (ulysses * ring)}
    # each ring rank's queries see equally many keys
    work = [sum(int(p.sum()) for p in held[r * ulysses : (r + 1) * ulysses]) for r in range(ring)]
    assert len(set(work)) == 1


def test_positions_of_a_small_mesh_by_hand():
    held = [local_positions(24, ulysses=2, ring=2, index=i).tolist() for i in range(4)]
    assert held == [
        [0, 1, 2, 3, 4, 5],
        [18, 19, 20, 21, 22, 23],
        [6, 7, 8, 9, 10, 11],
        [12, 13, 14, 15, 16, 17],
    ]
    # three Ulysses ranks: the middle one has the end of one piece and the beginning of the other
    assert local_positions(24, ulysses=3, ring=2, index=1).tolist() == [4, 5, 18, 19]


@pytest.mark.parametrize(
    ("ulysses", "ring", "multiple"), [(4, 1, 4), (1, 2, 4), (2, 2, 4), (3, 2, 12), (2, 3, 6)]
)
def test_lengths_that_do_not_divide_are_refused_with_one_that_works(ulysses, ring, multiple):
    assert token_multiple(ulysses, ring) == multiple
    with pytest.raises(RecipeError, match=f"a multiple of {multiple} works, such as {multiple * 4}"):
        local_positions(multiple * 3 + 1, ulysses=ulysses, ring=ring, index=0)


# ---- integers and bytes --------------------------------------------------------------------------


def calls_of_attention():
    q, k, v = (torch.randn(1, 16, h, 10).transpose(1, 2).requires_grad_() for h in (12, 3, 3))
    with Calls() as forward:
        out = attention(q, k, v, kernel=ring_kernel(dist.group.WORLD))
    with Calls() as backward:
        out.sum().backward()
    kinds = ("all_to_all", "attention forward", "attention backward")
    return [tuple(c[kind] for kind in kinds) for c in (forward, backward)]


def test_sends_and_attentions_of_a_ring_of_four(ranks4):
    # keys and values 3 times each way, their gradients 4 times; attention once a step, forward only
    assert ranks4.apply(calls_of_attention) == [[(3, 4, 0), (7, 0, 4)]] * 4


def bytes_of_attention(dtype, local):
    q, k, v = (torch.randn(1, local, h, 10, dtype=dtype).transpose(1, 2) for h in (12, 3, 3))
    kernel = ring_kernel(dist.group.WORLD)
    meter = Meter()
    with meter.measure(torch.nn.Module()), meter.phase("forward"):
        out, lse = kernel.forward(q, k, v)
    held, forward = int(meter.timeline().total[-1]), meter.timeline().device_peak
    meter = Meter()
    with meter.measure(torch.nn.Module()), meter.phase("backward"):
        grads = kernel.backward(out, q, k, v, out, lse)
    del grads
    given = q.nbytes + k.nbytes + v.nbytes
    return held - given, forward - given, meter.timeline().device_peak - given - out.nbytes - lse.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bytes_are_the_docstrings(ranks4, dtype):
    local, heads, kv_heads, dim, wide = 100, 12, 3, 10, max(dtype.itemsize, 4)
    q, k = (dtype.itemsize * local * h * dim for h in (heads, kv_heads))
    wider, lse = wide // dtype.itemsize, wide * local * heads
    forward = q + q * wider + 4 * k + 4 * lse
    backward = q + q * wider + 5 * k + 4 * k * wider
    first, *others = ranks4.apply(bytes_of_attention, dtype, local)
    assert others == [(q + lse, forward, backward)] * 3
    # the first rank meets later keys with the second half of its queries only
    assert first[0] == q + lse
    assert first[1] < forward
    assert first[2] < backward


def test_a_ring_of_one_is_flash_itself():
    assert ring_kernel(None) is FLASH


def test_attention_that_is_not_causal_is_refused():
    q = torch.zeros(1, 1, 4, 8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        kernel = ring_kernel(dist.group.WORLD)
        with pytest.raises(ValueError, match="causal=False with ring attention is not supported"):
            kernel.forward(q, q, q, causal=False)
    finally:
        dist.destroy_process_group()
