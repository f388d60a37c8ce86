"""Gathered keys and values: exact with windows, sinks and documents, alone and inside Ulysses or UPipe."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

import lab
from lab.errors import RecipeError
from lab.memory.categories import CATEGORIES
from lab.memory.meter import Meter
from lab.models import shape_of
from lab.planning.allocator import streams_of
from lab.recipe.recipe import Recipe, torch_refusal
from lab.step.one_rank import ring_ranks
from lab.techniques import gathered
from lab.techniques.attention.documents import Documents
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.attention.tiled_backward import tiled_kernel
from lab.techniques.attention.window import windowed_kernel
from lab.techniques.gathered import apply_gathered, fullest_ranks, gathered_kernel, parts_of
from lab.techniques.precision import accumulation_dtype
from lab.techniques.ring import local_positions
from lab_tests.proofs.cases import OFFLOADED, Case, wrong
from lab_tests.support.costs import FP32, D, K, L, S, planned_costs
from lab_tests.support.long_run import mostly_long
from lab_tests.support.models import small_config
from lab_tests.support.operators import Calls
from lab_tests.support.reference import build, config

GATHER = {"ring": 4, "ring_exchange": "gather"}
PAIRS = {"ulysses": 2, "ring": 2, "ring_exchange": "gather"}

# ---- the whole step on ranks, against transformers' model and against the plan -----------------------------

CASES = (
    Case("llama", 24, 6, {**GATHER, "checkpoint": True}, rows=2, tokens=43),
    Case("llama", 24, 1, {**PAIRS, "head_chunk": 4, "fsdp": True, "attention_tile": 3}, tokens=44),
    Case("mistral", 24, 6, {**GATHER, "fsdp": True}, tokens=43),
    Case("gpt_oss", 24, 6, {**PAIRS, "head_chunk": 6}, tokens=53, documents=(2, 37, 14)),
    Case("llama", 24, 6, {**GATHER, "fsdp": True}, tokens=61, documents=(1, 11, 23, 26), rows=2),
    Case("gemma3_text", 24, 6, {**PAIRS, **OFFLOADED, "stream": 5}, tokens=45, fields={"sliding_window": 2}),
    Case("mistral", 24, 6, {**PAIRS, "attention_tile": 2, "overlap": True, "head_chunk": 4}, tokens=46),
    Case(
        "mistral", 24, 6, {**GATHER, "checkpoint": True, "offload": "attention"}, tokens=96, accumulate=2,
        fields={"sliding_window": 31},
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("case", mostly_long(CASES, 4), ids=str)
def test_loss_gradients_and_bytes_are_right(ranks4, folder, case):
    assert wrong(case, ranks4, folder) == []


# ---- attention alone: every rank in turn, in this process --------------------------------------------------


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and its LSE, by a mask of the keys that each query of each row sees."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def mask_of(documents, window):
    """Return which keys [b, S, S] each query sees."""
    rows = []
    for lengths in documents:
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        ahead = torch.arange(len(number))[:, None] - torch.arange(len(number))
        rows.append((ahead >= 0) & (ahead < (window or 10**9)) & (number[:, None] == number))
    return torch.stack(rows)


def of_all_ranks(monkeypatch, kernel, tensors, ranks, window, documents):
    """Return the output, the LSE and the gradients of the whole sequence, from all ranks one after the other.

    A gather reads the whole keys. Each rank keeps what it would scatter, and all of it is summed here.
    """
    q, k, v, dout = tensors
    tokens = q.shape[2]
    places = [local_positions(tokens, ulysses=1, ring=ranks, index=r) for r in range(ranks)]
    out, dq, scattered = torch.empty_like(q), torch.empty_like(q), []
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))

    def all_gather(own, _):
        of_ranks = [torch.stack((k[:, :, place], v[:, :, place])).chunk(2, 3) for place in places]
        assert_close(own, torch.stack(of_ranks[rank]), rtol=0, atol=0)
        return torch.stack([piece for both in of_ranks for piece in both])

    def reduce_scatter(whole, _):
        scattered.append(whole.clone())
        return whole[2 * rank : 2 * rank + 2]

    monkeypatch.setattr(gathered, "all_gather", all_gather)
    monkeypatch.setattr(gathered, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(gathered, "size_of", lambda _: ranks)
    monkeypatch.setattr(gathered, "rank_in", lambda _: rank)
    several = None if len(documents[0]) == 1 else Documents(documents)
    own_kernel = gathered_kernel(kernel, group=None, window=window, documents=several)
    for rank in range(ranks):
        place = places[rank]
        own = [t[:, :, place] for t in (q, k, v)]
        out[:, :, place], lse[:, :, place] = own_kernel.forward(*own)
        results = out[:, :, place], lse[:, :, place]
        dq[:, :, place], dk, _ = own_kernel.backward(dout[:, :, place], *own, *results)
        assert dk.shape == own[1].shape
    dk, dv = k.clone(), v.clone()
    for whole, of_ranks in ((dk, scattered[::2]), (dv, scattered[1::2])):
        total = torch.stack(of_ranks).sum(0).unflatten(0, (ranks, 2))
        for of_rank, place in zip(total, places, strict=True):
            whole[:, :, place] = torch.cat([*of_rank], 2).to(k.dtype)
    return out, lse, dq, dk, dv


# R, S, the window, the documents of each row
LONG, MANY = ((48,), (48,)), ((7, 3, 30, 8), (7, 3, 30, 8))
PLACES = [
    (2, LONG, None), (3, LONG, None), (4, LONG, 1), (4, LONG, 2), (4, LONG, 7), (4, LONG, 13), (3, LONG, 47),
    (4, LONG, 48), (4, MANY, None), (3, MANY, 5), (4, ((24, 24), (1, 47)), 9), (2, ((12, 36), (48,)), None),
]  # fmt: skip


@pytest.mark.parametrize("kernel", [FLASH, tiled_kernel(FLASH, 5)], ids=["whole", "tiles"])
@pytest.mark.parametrize(("ranks", "documents", "window"), PLACES)
def test_attention_and_gradients_are_those_of_a_mask(monkeypatch, ranks, documents, window, kernel):
    torch.manual_seed(0)
    q, dout = (torch.randn(2, 6, 48, 10, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 3, 48, 10, dtype=torch.float64) for _ in range(2))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = dense(*leaves, mask_of(documents, window))
    right = [out, lse, *torch.autograd.grad(out, leaves, dout)]
    found = of_all_ranks(monkeypatch, kernel, (q, k, v, dout), ranks, window, documents)
    for one, other in zip(found, right, strict=True):
        assert_close(one, other.detach(), rtol=1e-9, atol=1e-9)


def test_a_window_reaches_as_many_keys_before_a_piece_as_it_has_but_one():
    def found(window, *documents):
        of_row = [(slice(None), tokens) for tokens in documents]
        return [part[1:] for part in parts_of(of_row, 6, 4, 1, window)]

    # Pieces 1 and 6: the tokens from 6 to 12 and from 36 to 42.
    assert found(None, slice(0, 48)) == [(slice(0, 6), 0, 6, 12, None), (slice(6, 12), 0, 36, 42, None)]
    assert found(5, slice(0, 48)) == [(slice(0, 6), 2, 6, 12, 4), (slice(6, 12), 32, 36, 42, 4)]
    assert found(12, slice(0, 48)) == [(slice(0, 6), 0, 6, 12, None), (slice(6, 12), 25, 36, 42, 11)]
    assert found(5, slice(0, 7), slice(7, 38), slice(38, 48)) == [
        (slice(0, 1), 2, 6, 7, 4), (slice(1, 6), 7, 7, 12, None), (slice(6, 8), 32, 36, 38, 4),
        (slice(8, 12), 38, 38, 42, None),
    ]  # fmt: skip


@pytest.mark.parametrize("window", [4, 9, 30])
def test_queries_of_zeros_before_a_piece_give_exactly_nothing(window):
    """Their LSE is finite, and keys that no other query sees get no gradient at all."""
    padding, tokens = window - 1, 11
    keys = [torch.randn(1, 3, padding + tokens, 10) for _ in range(2)]
    q, dout, out = (torch.randn(1, 6, padding + tokens, 10) for _ in range(3))
    for t in (q, dout, out):
        t[:, :, :padding] = 0
    kernel = windowed_kernel(FLASH, window)
    _, lse = kernel.forward(q, *keys)
    assert bool(lse.isfinite().all())
    lse[:, :, :padding] = 0
    # The others give nothing either: what is left is that of the padding.
    dout.zero_()
    for gradient in kernel.backward(dout, q, *keys, out, lse):
        assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=0)


# ---- exact counts and bytes --------------------------------------------------------------------------------


def calls_of_attention():
    q, k, v = (torch.randn(1, 16, h, 10).transpose(1, 2).requires_grad_() for h in (12, 3, 3))
    with Calls() as forward:
        out = attention(q, k, v, kernel=gathered_kernel(FLASH, group=dist.group.WORLD))
    with Calls() as backward:
        out.sum().backward()
    kinds = "c10d._allgather_base_", "c10d._reduce_scatter_base_", "attention forward", "attention backward"
    return [tuple(c[kind] for kind in kinds) for c in (forward, backward)]


def test_collectives_and_attentions_of_four_ranks(ranks4):
    # The first piece of the first rank has no earlier keys. In backward, a call for each of the pieces 0 to i
    # and 0 to 7 - i: nine on every rank.
    first, *others = ranks4.apply(calls_of_attention)
    assert first == [(1, 0, 3, 0), (1, 2, 0, 9)]
    assert others == [[(1, 0, 4, 0), (1, 2, 0, 9)]] * 3


def bytes_of_attention(dtype, local, *heads):
    q, k, v = (torch.randn(1, local, h, 10, dtype=dtype).transpose(1, 2) for h in heads)
    kernel = gathered_kernel(FLASH, group=dist.group.WORLD)
    meter = Meter()
    with meter.measure(torch.nn.Module()), meter.phase("forward"):
        # What no operator has seen is not counted.
        out, lse = kernel.forward(q.detach(), k, v)
    held, forward = int(meter.timeline().total[-1]), meter.timeline().device_peak
    meter = Meter()
    with meter.measure(torch.nn.Module()), meter.phase("backward"):
        grads = kernel.backward(out, q, k, v, out, lse)
    del grads
    given = q.nbytes + k.nbytes + v.nbytes
    return held - given, forward - given, meter.timeline().device_peak - given - out.nbytes - lse.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kv_heads", [3, 12])
def test_bytes_are_the_docstrings(ranks4, dtype, kv_heads):
    local, heads, dim, wide = 100, 12, 10, max(dtype.itemsize, 4)
    q, k = (dtype.itemsize * local * h * dim for h in (heads, kv_heads))
    wider, lse, ranks = wide // dtype.itemsize, wide * local * heads, 4
    first, *others = ranks4.apply(bytes_of_attention, dtype, local, heads, kv_heads, kv_heads)
    forward = max(4 * ranks * k, 2 * ranks * k + q * (3 + wider) // 2 + 3 * lse)
    parts = 2 * ranks * k * (1 + wider) + q * (3 + wider) // 2 + k
    backward = max(parts, (3 * ranks + 1) * k * wider + q)
    assert [first, *others] == [(q + lse, forward, backward)] * 4


@pytest.mark.long
def test_what_is_sent():
    for ring in (2, 4):
        more = {"fsdp": True, "ring": ring, "ring_exchange": "gather"}
        plain = {"fsdp": True}
        of_one = 2 * (S // ring) * K * D
        sent = planned_costs(**more).link_bytes - planned_costs(**plain).link_bytes
        assert sent == L * (ring - 1) * of_one * 3 * FP32
        half = {"compute_dtype": "bfloat16"}
        sent = planned_costs(**more, **half).link_bytes - planned_costs(**plain, **half).link_bytes
        # In fp32 the gradients alone.
        assert sent == L * (ring - 1) * of_one * (2 * 2 + FP32)


def test_the_ranks_wait_for_both_collectives():
    ring = {"fsdp": True, "ring": 4}
    sent, waited = (planned_costs(**ring, **more) for more in ({}, {"ring_exchange": "gather"}))
    assert waited.link_seconds > sent.link_seconds
    assert waited.flops == sent.flops


# ---- the plan ----------------------------------------------------------------------------------------------


def kind_of(storages, entry):
    return storages.kinds[storages.kind[entry]]


def test_what_is_gathered_is_no_parameter_and_in_no_stream_of_fsdp():
    more = {"tokens": 1024, "ranks": 4, "fsdp": True, "ulysses": 2, "ring": 2, "workspace": False}
    send, gather = (lab.plan("tiny", "plain", ring_exchange=one, **more) for one in ("send", "gather"))
    storages = gather.timeline.storages
    exchanged = {entry for entry in storages.moves[:, 0].tolist() if len(kind_of(storages, entry).shape) > 1}
    assert exchanged
    assert not {CATEGORIES[storages.category[entry]] for entry in exchanged} & {"parameters", "gradients"}
    assert not exchanged & streams_of(gather.timeline).keys()
    assert len(streams_of(gather.timeline)) == len(streams_of(send.timeline))
    assert gather.ring_rank == 0


def test_which_rank_holds_the_most_of_several_documents():
    # Eight pieces of 6 tokens. The third document begins with piece 3, and no rank but the last has keys
    # before its pieces.
    assert fullest_ranks((12, 6, 30), 4, ()) == [0]
    # Rank 3 has pieces 3 and 4, in a document that ends with them.
    assert fullest_ranks((30, 18), 4, ()) == [3]
    assert fullest_ranks((30, 3, 15), 4, (None,)) == [3]
    # A call of one query with 31 keys, and one of six queries with 30.
    assert fullest_ranks((31, 17), 4, (None,)) == [2, 3]
    assert ring_ranks(Recipe(**GATHER), [], None) == [0]
    assert ring_ranks(Recipe(**GATHER, fsdp=True), [2], (30, 18)) == [0, 1, 2, 3]
    assert ring_ranks(Recipe(**GATHER, fsdp=True), [4], (30, 18)) == [3]


def test_torchs_kernel_has_the_queries_of_one_piece():
    shape = shape_of(
        small_config(hidden_size=64, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    )
    tokens = 2**31 // (32 * 128)
    for recipe, longest, refused in (
        (Recipe(ring=4), 4 * tokens, True), (Recipe(**GATHER), 4 * tokens, False),
        (Recipe(**GATHER), 8 * tokens, True), (Recipe(), tokens, True),
    ):  # fmt: skip
        assert (torch_refusal(recipe, shape, longest) is not None) is refused
    assert torch_refusal(Recipe(**GATHER), shape, 8 * tokens, tokens - 1) is None
    assert torch_refusal(Recipe(), shape, tokens, tokens - 1) is None


# ---- refusals ----------------------------------------------------------------------------------------------


def test_what_a_gather_allows_and_what_it_needs():
    with pytest.raises(RecipeError, match=r"^ring_exchange='gather' with ring=1: .*; set ring with it, or"):
        Recipe(ring_exchange="gather")
    with pytest.raises(RecipeError, match=r"set ring_exchange='gather', or ring=1 and ulysses"):
        Recipe(ring=4).check(config("mistral"), 4)
    Recipe(**GATHER).check(config("mistral"), 4)
    with pytest.raises(RecipeError, match=r"^ring_exchange='around': it takes 'send' or 'gather'"):
        Recipe(ring=2, ring_exchange="around")
    with pytest.raises(RecipeError, match="DeepSpeed's exchange knows neither"):
        Recipe(**GATHER, ulysses_backend="deepspeed")
    with pytest.raises(RecipeError, match="set ring_exchange='gather', or ring=1 and shard"):
        lab.plan("tiny", "plain", tokens=64, ranks=2, ring=2, ulysses=1, documents="24,40")
    knobs = {"ulysses": 1, "ring": 2, "ring_exchange": "gather"}
    assert lab.plan("tiny", "plain", tokens=64, ranks=2, documents="24,40", **knobs).ring_rank in (0, 1)


def test_a_ladder_of_a_model_with_windows_has_a_ring_where_it_gathers():
    model = config("mistral", 24, 6)
    recipes = [lab.ladder(model, 8, 1024, **more)["upipe"] for more in ({}, {"ring_exchange": "gather"})]
    assert [(one.ulysses, one.ring, one.ring_exchange) for one in recipes] == [
        (2, 1, "send"),
        (2, 4, "gather"),
    ]


def test_one_rank_gathers_nothing():
    model = build(config("mistral"), torch.float64)
    apply_gathered(model, group=None)
    assert not any(hasattr(module, "lab_gathered") for module in model.modules())
    kernel = gathered_kernel(FLASH, group=SimpleNamespace())
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="causal=False with gathered attention is not supported"):
        kernel.forward(q, q, q, causal=False)
