"""Ring attention alone and inside Ulysses or UPipe: exact, causal, and balanced."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.recipe.recipe import Recipe
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.ring import apply_ring, local_positions, ring_kernel
from lab.techniques.rope import apply_rope
from lab.techniques.ulysses import apply_ulysses
from lab.techniques.ulysses_degrees import token_multiple
from lab.techniques.upipe.layer import apply_upipe
from lab_tests.support.operators import Calls
from lab_tests.support.reference import build, config, error, tokens, truth, worst_errors

# family, H, K, C, R, U (None: Ulysses), b, S
CASES = [
    ("llama", 24, 6, 1, 2, None, 2, 36),
    ("llama", 24, 6, 1, 4, None, 1, 56),
    ("qwen2", 28, 4, 1, 4, None, 2, 40),
    ("qwen3", 24, 1, 1, 4, None, 1, 40),
    ("llama", 24, 6, 2, 2, None, 2, 44),
    ("mistral", 24, 1, 2, 2, None, 1, 44),
    ("llama", 24, 6, 2, 2, 2, 1, 44),
    ("llama", 24, 6, 2, 2, 6, 2, 52),
    ("llama", 24, 6, 2, 2, 24, 1, 44),
    ("qwen3", 24, 1, 2, 2, 4, 2, 36),
    ("qwen2", 28, 4, 1, 4, 2, 1, 40),
]


def mesh(ulysses, ring):
    """This rank's Ulysses group, ring group and index in C*R; rank = (data*R + ring)*C + ulysses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {}
    for base in range(0, world, ulysses * ring):
        rows = [[base + r * ulysses + c for c in range(ulysses)] for r in range(ring)]
        for kind, members in (("ulysses", rows), ("ring", list(zip(*rows, strict=True)))):
            for ranks in members:
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    mine[kind] = group
    return mine["ulysses"], mine["ring"], rank % (ulysses * ring)


def errors_of(cases, dtype, rounded=None):
    groups, found = {}, []
    for family, heads, kv_heads, c, r, chunk, rows, length in cases:
        if (c, r) not in groups:
            of_all = [dist.new_group(list(range(b, b + c * r))) for b in range(0, 4, c * r)]
            groups[c, r] = (*mesh(c, r), of_all[dist.get_rank() // (c * r)])
        ulysses, ring, index, both = groups[c, r]
        # Windows allow no ring.
        more = {"sliding_window": None} if family == "mistral" else {}
        cfg, ids = config(family, heads, kv_heads, **more), tokens(rows, length)
        model = build(cfg, dtype)
        apply_rope(model)
        if chunk is not None:
            apply_upipe(model, head_chunk=chunk, group=ulysses)
        apply_ring(model, group=ring)
        if chunk is None:
            apply_ulysses(model, group=ulysses)
        positions = local_positions(length, ulysses=c, ring=r, index=index)
        right = truth(cfg, ids, torch.float64 if rounded is None else torch.float32, rounded)
        plain = error(truth(cfg, ids, dtype)[1], right[1]) if rounded is not None else 0.0
        found.append((*worst_errors(cfg, ids, model, positions, both, right), plain))
    return found


def test_loss_and_gradients_are_the_plain_models(ranks4):
    for rank in ranks4.apply(errors_of, CASES, torch.float64):
        for case, (loss, gradient, _) in zip(CASES, rank, strict=True):
            assert loss < 1e-9, case
            assert gradient < 1e-9, case


def test_loss_and_gradients_in_single_precision(ranks4):
    cases = [CASES[1], CASES[6]]
    for case, (loss, gradient, _) in zip(
        cases, ranks4.apply(errors_of, cases, torch.float32)[0], strict=True
    ):
        assert loss < 5e-6, case
        assert gradient < 5e-6, case


@pytest.mark.long
def test_bf16_is_no_worse_than_plain_bf16(ranks4):
    cases = [CASES[1], CASES[4], CASES[6]]
    found = ranks4.apply(errors_of, cases, torch.bfloat16, rounded=torch.bfloat16)[0]
    for case, (_, gradient, plain) in zip(cases, found, strict=True):
        assert 0 < gradient < 1.5 * plain, case


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


# ---- causality --------------------------------------------------------------------------------------


def moved_positions(length, ulysses, ring, chunk, changed):
    """Change one token at a time; which global positions' logits move?"""
    of_ulysses, of_ring, index = mesh(ulysses, ring)
    model = build(config("llama", 24, 6), torch.float64)
    apply_rope(model)
    apply_ring(model, group=of_ring)
    if chunk is None:
        apply_ulysses(model, group=of_ulysses)
    else:
        apply_upipe(model, head_chunk=chunk, group=of_ulysses)
    positions = local_positions(length, ulysses=ulysses, ring=ring, index=index)

    def logits(ids):
        with torch.no_grad():
            return model(input_ids=ids[:, positions], position_ids=positions[None]).logits[0]

    ids = tokens(1, length)
    before, moved = logits(ids), []
    for token in changed:
        other = ids.clone()
        other[0, token] = (ids[0, token] + 1) % 101
        moved.append(positions[(logits(other) != before).any(-1)].tolist())
    return moved


MESHES = [(1, 4, None), (2, 2, None), (2, 2, 4), (1, 2, None)]


@pytest.mark.parametrize(("ulysses", "ring", "chunk"), MESHES)
def test_a_changed_token_moves_itself_and_what_follows_and_nothing_before(ranks4, ulysses, ring, chunk):
    length = 40
    changed = [0, 3, 13, 21, 29, 38]
    ranks = ranks4.apply(moved_positions, length, ulysses, ring, chunk, changed)
    for i, token in enumerate(changed):
        moved = sorted(p for rank in ranks[: ulysses * ring] for p in rank[i])
        assert moved == list(range(token, length))


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


# ---- integers, bytes, fakes --------------------------------------------------------------------------


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


def test_fake_tensors_go_through():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        with FakeTensorMode():
            shape = (1, 5 * 2**20 // 8, 4, 128)
            q, k, v = (
                torch.empty(shape, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
            )
            attention(q, k, v, kernel=ring_kernel(dist.group.WORLD)).sum().backward()
        assert q.grad.shape == k.grad.shape == q.shape
    finally:
        dist.destroy_process_group()
