"""Attention's output, LSE and gradients; its one entry in transformers' registry changes no other model."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lab.bench.attention import kernel_of
from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.attention import flash
from lab.techniques.attention import matrix_products as exact_attention
from lab.techniques.attention.flash import attention, flash_backward, flash_forward
from lab.techniques.attention.hf_attention import NAME, apply_attention
from lab_tests.support.reference import (
    build,
    config,
    error,
    exact_rotary,
    gradients,
    loss_of,
    textbook_attention,
    tokens,
    truth,
)

B, S, H, K, D = 2, 20, 12, 3, 10


def qkv(dtype=torch.float64, keys=S, heads=H):
    make = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, n, h, D, generator=make, dtype=torch.float64).to(dtype).transpose(1, 2)
        for n, h in ((S, heads), (keys, K), (keys, K))
    ]


@pytest.fixture(params=["flash", "exact"])
def _computed_by(request, monkeypatch):
    """By CPU's flash kernel; and by the products that CUDA runs for what its flash kernels do not take."""
    if request.param == "exact":
        monkeypatch.setattr(flash, "_flash_takes", lambda q: False)
        monkeypatch.setattr(exact_attention, "QUERY_BLOCK", 7)


@pytest.mark.usefixtures("_computed_by")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize(("causal", "keys"), [(True, S), (False, S), (False, 8), (False, 33)])
def test_forward_and_backward_are_the_textbooks(dtype, tolerance, causal, keys):
    q, k, v = qkv(dtype, keys)
    scale = 0.21
    out, lse = flash_forward(q, k, v, causal=causal, scale=scale)
    inputs = [t.double().detach().requires_grad_() for t in (q, k, v)]
    right, right_lse = textbook_attention(*inputs, causal, scale)
    assert error({"out": out}, {"out": right.detach()}) < tolerance
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    assert (lse - right_lse).abs().max() < 100 * tolerance
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    right.backward(grad.double())
    found = flash_backward(grad, q, k, v, out, lse, causal=causal, scale=scale)
    assert {gradient.dtype for gradient in found} == {dtype}
    gradients_of_inputs = {name: x.grad for name, x in zip("qkv", inputs, strict=True)}
    assert error(dict(zip("qkv", found, strict=True)), gradients_of_inputs) < tolerance


@pytest.mark.usefixtures("_computed_by")
def test_backward_from_a_global_lse_adds_up_over_parts_of_the_keys():
    """Over two parts of the keys, each from the out and LSE of the whole, gradients add up."""
    q, k, v = qkv(keys=S)
    out, lse = flash_forward(q, k, v, causal=False)
    grad = torch.randn_like(out)
    whole = flash_backward(grad, q, k, v, out, lse, causal=False)
    halves = [
        flash_backward(grad, q, k[:, :, part], v[:, :, part], out, lse, causal=False)
        for part in (slice(0, 7), slice(7, S))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat((halves[0][i], halves[1][i]), 2), whole[i])


def test_attention_saves_the_bytes_of_its_docstring():
    q, k, v = (t.requires_grad_() for t in qkv(torch.bfloat16))
    meter = Meter()
    with meter.measure(torch.nn.Module()):
        out = attention(q, k, v)
    held = meter.timeline().total[-1]
    assert held == 2 * B * S * D * (2 * H + 2 * K) + 4 * B * H * S
    out.sum().backward()
    assert q.grad is not None
    assert k.grad.shape == k.shape


def test_on_cuda_flash_takes_half_precision_and_heads_of_256():
    """What answers for a tensor on a GPU; there is none here."""

    def on_cuda(dtype, head_dim):
        return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 2, 3, head_dim))

    assert [flash._flash_takes(on_cuda(dtype, 256)) for dtype in flash.HALF_DTYPES] == [True, True]
    assert not flash._flash_takes(on_cuda(torch.bfloat16, 264))
    assert not flash._flash_takes(on_cuda(torch.float32, 8))
    assert not flash._flash_takes(on_cuda(torch.float64, 8))


def test_a_size_beyond_torchs_kernel_on_cuda_is_refused_before_it_runs(monkeypatch):
    """Of a tensor on a GPU, which is not here, the shape."""
    shape = (1, 4, 2**22, 104)
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=shape, stride=lambda _: 1)
    with pytest.raises(RecipeError, match=r"^4 heads of 4194304 tokens .* 2147483648 .* smaller head_chunk"):
        flash_forward(q, q, q)
    called = []
    monkeypatch.setattr(flash, "cuda_flash_attention", lambda *a, **k: called.append(a))
    with pytest.raises(TypeError):  # the stand-in gives no results
        kernel_of("torch", q.device).forward(q, q, q, scale=1.0)
    assert len(called) == 1, "the bench of attention measures what is refused elsewhere"
    assert flash.query_limit_refusal(2**22 - 1, 4, 128) is None
    assert flash.query_limit_refusal(2**22, 4, 96) is None


def test_causal_between_different_lengths_is_refused():
    q, k, v = qkv(keys=33)
    with pytest.raises(ValueError, match="20 queries to 33 keys"):
        flash_forward(q, k, v)


@pytest.mark.long
@pytest.mark.usefixtures("_computed_by")
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("kv_heads", [24, 6, 1])
def test_a_model_has_the_reference_loss_and_gradients(family, kv_heads):
    """Other families are in the table of cases."""
    cfg, ids = config(family, kv_heads=kv_heads), tokens(2, 33)
    model = exact_rotary(build(cfg))
    apply_attention(model)
    loss = loss_of(model(input_ids=ids).logits, ids.roll(-1, 1)) / ids.numel()
    loss.backward()
    right_loss, right = truth(cfg, ids)
    assert abs(loss - right_loss) < 1e-9 * abs(right_loss)
    assert error(gradients(model), right) < 1e-9


def test_no_mask_is_made_and_no_other_model_is_touched():
    shared = config()
    first, second = (AutoModelForCausalLM.from_config(shared, attn_implementation="sdpa") for _ in range(2))
    for module in (*first.modules(), *second.modules()):
        if hasattr(module, "config"):
            module.config = shared
    before, entries = copy.deepcopy(shared.to_dict()), set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    apply_attention(first)
    apply_attention(first)
    assert shared.to_dict() == before
    assert set(ALL_ATTENTION_FUNCTIONS.valid_keys()) == entries
    implementations = {m.config._attn_implementation for m in first.modules() if hasattr(m, "config")}
    assert implementations == {NAME}
    assert len({id(m.config) for m in first.modules() if hasattr(m, "config")}) == 1
    assert second.model.layers[0].self_attn.config._attn_implementation == "sdpa"
    masks = []
    first.model.layers[0].register_forward_pre_hook(
        lambda _, __, given: masks.append(given["attention_mask"]), with_kwargs=True
    )
    first(input_ids=tokens(1, 8), position_ids=torch.arange(8)[None])
    assert masks == [None]


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": torch.ones(1, 1, 8, 8)},
        {"dropout": 0.1},
        {"is_causal": False},
    ],
)
def test_arguments_that_the_kernel_does_not_take_are_refused(given):
    q, k, v = qkv()
    call = ALL_ATTENTION_FUNCTIONS[NAME]
    with pytest.raises(RecipeError, match="causal over whole rows"):
        call(torch.nn.Module(), q, k, v, **{"attention_mask": None, **given})


def test_another_window_than_the_models_is_refused():
    q, k, v = qkv()
    module = torch.nn.Module()
    for noted, given in ((None, 4), (5, 4), (5, None)):
        module.lab_window = noted
        with pytest.raises(RecipeError, match=f"a window of {given} keys, where the model had {noted}"):
            ALL_ATTENTION_FUNCTIONS[NAME](module, q, k, v, None, sliding_window=given)


def test_a_cache_is_refused():
    q, k, v = qkv(keys=33)
    with pytest.raises(RecipeError, match="use_cache=False"):
        ALL_ATTENTION_FUNCTIONS[NAME](torch.nn.Module(), q, k, v, None)
