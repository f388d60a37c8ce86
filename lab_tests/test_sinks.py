"""Attention sinks against a softmax with one more logit, the sinks of a rank's heads, and biases of experts.

Seen red: a sink that is forgotten or another head's, its gradient forgotten, doubled, or of a part of the
queries; the LSE without the sinks; UPipe's sinks of another rank, and their gradients; biases of experts that
are forgotten, not weighted, or another expert's, and their gradients summed over all rows.
"""

from itertools import pairwise

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import lab
from lab import models
from lab.memory.meter import Meter
from lab.models.lora import Lora
from lab.recipe.recipe import Recipe
from lab.techniques import experts
from lab.techniques.attention import sinks as module
from lab.techniques.attention.flash import FLASH, attention
from lab.techniques.attention.sinks import sink_gradients, sink_kernel
from lab.techniques.attention.tiled_backward import tiled_kernel
from lab.techniques.attention.window import windowed_kernel
from lab.techniques.experts import grouped_outer_product, grouped_product, grouped_sum
from lab.techniques.upipe.projections import HeadProjections
from lab.techniques.upipe.schedule import schedule
from lab_tests.support import parity, reference

H, G, D, SCALE = 6, 2, 10, 0.3


def tensors(tokens, rows=2, dtype=torch.float64):
    """Return q, k, v, the sinks, and the gradient of the output."""
    make = torch.Generator().manual_seed(tokens)
    sizes = [(rows, heads, tokens, D) for heads in (H, H // G, H // G)]
    given = [torch.randn(size, dtype=torch.float64, generator=make).to(dtype) for size in (*sizes, (H,))]
    return *given, torch.randn(sizes[0], dtype=torch.float64, generator=make).to(dtype)


def softmax_with_one_more_logit(q, k, v, sinks, dout, window):
    """Return the output, the LSE, and the gradients of q, k, v and the sinks."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v, sinks)]
    q, k, v, sinks = leaves
    place = torch.arange(q.shape[2])
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < window)
    scores = q @ k.repeat_interleave(G, 1).transpose(2, 3) * SCALE
    logits = sinks[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat((scores.masked_fill(~seen, -torch.inf), logits), -1)
    out = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(G, 1)
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, dout)


KERNELS = {
    "flash": (FLASH, 10**6),
    "in tiles": (tiled_kernel(FLASH, 8), 10**6),
    "a window": (windowed_kernel(FLASH, 5), 5),
    "a window in tiles": (windowed_kernel(tiled_kernel(FLASH, 3), 7, piece=10), 7),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("tokens", [1, 5, 31])
def test_a_sink_is_one_more_logit(name, tokens, monkeypatch):
    monkeypatch.setattr(module, "SINK_PIECE", 12)
    (kernel, window), (*given, dout) = KERNELS[name], tensors(tokens)
    right = softmax_with_one_more_logit(*given, dout, window)
    *leaves, sinks = (t.requires_grad_() for t in given)
    with_sinks = sink_kernel(kernel, sinks)
    out = attention(*leaves, scale=SCALE, kernel=with_sinks)
    found = (
        out.detach(),
        with_sinks.forward(*leaves, scale=SCALE)[1].detach(),
        *torch.autograd.grad(out, (*leaves, sinks), dout),
    )
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_half_precision_is_rounded_once_more():
    *given, dout = tensors(31, dtype=torch.bfloat16)
    right = softmax_with_one_more_logit(*(t.double() for t in given), dout.double(), 10**6)
    q, k, v, sinks = given
    out, lse = sink_kernel(FLASH, sinks).forward(q, k, v, scale=SCALE)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), right[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), right[1], rtol=1e-3, atol=1e-3)
    found = sink_gradients(dout, out, lse, sinks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right[5], rtol=5e-2, atol=5e-2)


def test_sinks_that_are_frozen_have_no_gradient_and_no_products(monkeypatch):
    monkeypatch.setattr("lab.techniques.attention.flash.sink_gradients", None)
    q, k, v, sinks, dout = tensors(9)
    attention(q.requires_grad_(), k, v, kernel=sink_kernel(FLASH, sinks)).backward(dout)
    assert q.grad is not None


@pytest.mark.parametrize("piece", [16, 64])
def test_the_products_of_a_piece_are_in_memory_at_once(piece, monkeypatch):
    monkeypatch.setattr(module, "SINK_PIECE", piece)
    rows, tokens = 2, 256
    out, dout = (torch.ones(rows, H, tokens, D, dtype=torch.bfloat16) for _ in range(2))
    lse, sinks = torch.zeros(rows, H, tokens), torch.zeros(H)
    meter = Meter()
    with meter.measure(torch.nn.Module()):
        sink_gradients(dout, out, lse, sinks)
    given = sum(t.nbytes for t in (out, dout, lse, sinks))
    # The shares of all tokens; the products of a piece, and their sums over D; and two sums for each head.
    own = 4 * rows * H * tokens + 4 * rows * H * piece * (D + 1) + 2 * 4 * H
    assert meter.timeline().device_peak == given + own


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "chunk"), [(6, 1, 8), (6, 2, 8), (6, 2, 12), (6, 3, 6), (1, 4, 8), (2, 4, 12)]
)
def test_each_head_range_has_the_sinks_of_its_heads(kv_heads, ranks, chunk):
    plan = schedule(24, kv_heads, ranks, chunk)
    heads, numbers, seen = HeadProjections(plan, D), torch.arange(24), []
    for rank in range(ranks):
        for i, stage in enumerate(plan.stages):
            found = [n for part in stage for n in heads.of_range(numbers, part, rank).flatten().tolist()]
            assert found == plan.query_heads(i, rank)
            seen += found
    assert sorted(seen) == list(range(24))


# ---- biases of experts -----------------------------------------------------------------------------------


def test_each_row_has_the_bias_of_its_expert():
    """The second expert has no rows."""
    make = torch.Generator().manual_seed(0)
    rows, weights, biases = (
        torch.randn(size, dtype=torch.float64, generator=make) for size in ((7, 3), (3, 3, 5), (3, 5))
    )
    ends, chosen = torch.tensor([4, 4, 7], dtype=torch.int32), [0, 0, 0, 0, 2, 2, 2]
    right = torch.stack([row @ weights[e] + biases[e] for row, e in zip(rows, chosen, strict=True)])
    torch.testing.assert_close(grouped_product(rows, weights, ends, biases), right)
    torch.testing.assert_close(
        grouped_sum(right, ends), torch.stack((right[:4].sum(0), torch.zeros(5).double(), right[4:].sum(0)))
    )


def test_an_expert_without_rows_has_no_gradient_whatever_the_kernel_writes(monkeypatch):
    """A kernel of some GPUs leaves what was in memory where an expert has no rows."""

    def grouped_mm(left, right, *, offs):
        out = torch.full((len(offs), left.shape[0], right.shape[1]), torch.nan, dtype=left.dtype)
        for expert, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
            if start < end:
                out[expert] = left[:, start:end] @ right[start:end]
        return out

    make = torch.Generator().manual_seed(0)
    grads, rows = (torch.randn(7, size, dtype=torch.float64, generator=make) for size in (8, 16))
    ends = torch.tensor([0, 4, 4, 7, 7], dtype=torch.int32)
    right = grouped_outer_product(grads, rows, ends), grouped_sum(grads, ends)
    assert [bool(t.any()) for t in right[0]] == [False, True, False, True, False]
    monkeypatch.setattr(experts, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(experts, "grouped_mm", grouped_mm)
    torch.testing.assert_close((grouped_outer_product(grads, rows, ends), grouped_sum(grads, ends)), right)


# ---- what is refused, and what the settings mean -----------------------------------------------------------


@pytest.mark.long
def test_frozen_sinks_under_adapters(ranks4):
    """The adapters of attention get the gradients of one rank, and the sinks none."""
    for errors in ranks4.apply(adapter_errors, Recipe(fsdp=True, ulysses=2, head_chunk=8, mlp_tile=5)):
        assert errors < 1e-9
    for errors in ranks4.apply(
        adapter_errors,
        Recipe(fsdp=True, ulysses=2, head_chunk=8, checkpoint=True, offload="inputs", stream=9),
    ):
        assert errors < 1e-9


def adapter_errors(recipe):
    gradients = []
    for given in (Recipe(), recipe):
        ranks = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        model = models.build(reference.config("gpt_oss"), lora=Lora(2)).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    values = torch.arange(parameter.numel(), dtype=torch.float64)
                    parameter.copy_((values % 7 - 3).view_as(parameter) / 10)
        lab.apply_recipe(model, given, ranks)
        lab.loss(model, lab.shard_batch(parity.token_ids(), given, ranks)).backward()
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is None for n, p in model.named_parameters() if not p.requires_grad)
        gradients.append({n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in trained.items()})
    return reference.error(*reversed(gradients))
