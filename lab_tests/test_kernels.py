"""Kernels by name: each against a stand-in with its library's signature, the choice, and the refusals."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import lab
from cluster.errors import RankError
from lab import models
from lab.commands import doctor
from lab.commands.base import OneLineErrors
from lab.decoder import decoder_of
from lab.errors import RecipeError
from lab.recipe.recipe import BY_NAME, Recipe
from lab.step.compose import apply_recipe
from lab.techniques.attention import kernels
from lab.techniques.attention.documents import Documents, documents_kernel
from lab.techniques.attention.flash import FLASH, flash_backward, flash_forward
from lab.techniques.attention.kernel import Kernel
from lab.techniques.attention.kernel_calls import MODULES
from lab.techniques.attention.kernels import (
    FASTEST_FIRST,
    KERNELS,
    KernelSupport,
    choose_kernel,
    kernel_for,
    kernel_support,
    missing_requirement,
)
from lab.techniques.attention.window import windowed_kernel
from lab.techniques.ring import ring_kernel
from lab_tests.support.reference import textbook_attention

B, H, K, S, D = 2, 12, 3, 40, 10


# ---- stand-ins: the signatures and layouts of the libraries, computed by torch's kernel for CPU ------------


def _attend(q, k, v, causal, scale):
    """[b, S, h, D], D a multiple of 8 and innermost -> the same, and LSE [b, h, S]."""
    assert all(t.shape[-1] % 8 == 0 and t.stride(-1) == 1 for t in (q, k, v))
    assert 1 not in (q.shape[1], k.shape[1]), "cuDNN refuses a sequence of one token"
    out, lse = flash_forward(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal, scale=scale)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def _differentiate(dout, q, k, v, out, lse, causal, scale, into):
    """Reads the LSE as what it is in memory, as a kernel given a pointer; writes into what it gets."""
    assert lse.is_contiguous()
    assert all(t.shape[-1] % 8 == 0 and t.stride(-1) == 1 for t in (dout, q, k, v, out, *into))
    assert 1 not in (q.shape[1], k.shape[1])
    turned = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    for target, found in zip(into, flash_backward(*turned, lse, causal=causal, scale=scale), strict=True):
        target.copy_(found.transpose(1, 2))
    return torch.zeros(lse.shape)


def flash_attn_2():
    """Releases 2.8.0 to 2.8.4."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert alibi_slopes is None
        assert not return_softmax
        return *_attend(q, k, v, causal, softmax_scale), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert alibi_slopes is None
        assert not deterministic
        return _differentiate(dout, q, k, v, out, softmax_lse, causal, softmax_scale, (dq, dk, dv))

    return _flash_attn_forward, _flash_attn_backward


def flash_attn_3():
    """Its interface since it registers operators with torch."""

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
        seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        unused = (k_new, v_new, qv, out_, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k)
        unused += (max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin)
        assert {*unused, seqlens_rotary, q_descale, k_descale, v_descale} == {None}
        assert (window_size_left, window_size_right, num_splits) == (-1, -1, 1)
        return *_attend(q, k, v, causal, softmax_scale), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert {cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k} == {None}
        return _differentiate(dout, q, k, v, out, softmax_lse, is_causal, softmax_scale, (dq, dk, dv))

    return _flash_attn_forward, _flash_attn_backward


def flash_attn_3_before():
    """The same as of the tag v2.8.3: no defaults before causal, a pair for the window."""
    latest_forward, latest_backward = flash_attn_3()

    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin,
        seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1,
        pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        return latest_forward(q, k, v, k_new, v_new, qv, out, softmax_scale=softmax_scale, causal=causal)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
        max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
        deterministic=False, sm_margin=0,
    ):  # fmt: skip
        return latest_backward(
            dout, q, k, v, out, softmax_lse, dq=dq, dk=dk, dv=dv, softmax_scale=softmax_scale,
            is_causal=causal,
        )  # fmt: skip

    return _flash_attn_forward, _flash_attn_backward


def flash_attn_4():
    """Its interface as of the tag fa4-v4.0.0.beta27; of what is not used, the arguments before those used."""

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None,
        tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None,
        _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False,
    ):  # fmt: skip
        assert {qv, page_table, softcap, window_size_left, window_size_right, learnable_sink} == {None}
        out, lse = _attend(q, k, v, causal, softmax_scale)
        return out, lse if return_lse else None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None,
    ):  # fmt: skip
        assert (softcap, window_size_left, window_size_right) == (0.0, None, None)
        found = tuple(torch.empty_like(t) for t in (q, k, v))
        _differentiate(dout, q, k, v, out, lse, causal, softmax_scale, found)
        return found

    return _flash_attn_fwd, _flash_attn_bwd


def flash_attn_4_before():
    """The same as of the tag fa4-v4.0.0.beta0: no ``qv``, and two results."""
    latest_forward, backward = flash_attn_4()

    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, m_block_size=128,
        n_block_size=128, num_threads=384, num_splits=1, pack_gqa=None, _compute_capability=None,
        score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False,
    ):  # fmt: skip
        return latest_forward(
            q, k, v, page_table=page_table, softmax_scale=softmax_scale, causal=causal, return_lse=return_lse
        )[:2]

    return _flash_attn_fwd, backward


def install(monkeypatch, name, calls):
    package = name.partition(".")[0]
    for part in {package, name}:
        module = ModuleType(part)
        module.__spec__ = ModuleSpec(part, None)
        monkeypatch.setitem(sys.modules, part, module)
    for call in calls:
        setattr(sys.modules[name], call.__name__, call)


@pytest.fixture
def cudnn():
    """Torch's own operators, whose schema the dispatcher checks; on CPU they have no kernel but these."""

    def forward(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale
    ):
        assert attn_bias is None
        assert compute_log_sumexp
        assert (dropout_p, return_debug_mask) == (0.0, False)
        out, lse = _attend(*(t.transpose(1, 2) for t in (query, key, value)), is_causal, scale)
        state = torch.empty((), dtype=torch.int64)
        lengths = (query.shape[2], key.shape[2])
        return out.transpose(1, 2), lse[..., None], state, state, *lengths, state, state, state

    def backward(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
        cum_seq_k, max_q, max_k, dropout_p, is_causal, scale,
    ):  # fmt: skip
        assert logsumexp.shape == (*query.shape[:3], 1)
        assert {attn_bias, cum_seq_q, cum_seq_k} == {None}
        assert (max_q, max_k, dropout_p) == (query.shape[2], key.shape[2], 0.0)
        # Torch keeps a graph by the strides of q, k and v alone, and it holds those of the other two.
        long = [dim for dim, size in enumerate(query.shape) if size > 1]
        strides = [[x.stride(dim) for dim in long] for x in (query, grad_out, out)]
        assert strides[0] == strides[1] == strides[2]
        found = tuple(torch.empty_like(t) for t in (query, key, value))
        tensors = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
        into = tuple(t.transpose(1, 2) for t in found)
        _differentiate(*tensors, logsumexp[..., 0], is_causal, scale, into)
        return found

    with torch.library._scoped_library("aten", "IMPL") as library:
        name = "_scaled_dot_product_cudnn_attention"
        defaults = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
        order = ("query", "key", "value", "attn_bias", "compute_log_sumexp", *defaults)
        library.impl(
            name,
            lambda *given, scale=None: forward(
                **{**defaults, **dict(zip(order, given, strict=False))}, scale=scale
            ),
            "CPU",
        )
        library.impl(f"{name}_backward", lambda *given, scale=None: backward(*given, scale), "CPU")
        yield


def test_auto_takes_torchs_kernel_for_short_calls_where_cudnn_would_build_graphs(cudnn, monkeypatch):
    calls = []

    def noted(name):
        def forward(q, k, v, **settings):
            calls.append((name, "forward", q.shape[2]))
            return FLASH.forward(q, k, v, **settings)

        def backward(*tensors, **settings):
            calls.append((name, "backward", tensors[1].shape[2]))
            return FLASH.backward(*tensors, **settings)

        return Kernel(forward, backward)

    for name in ("torch", "cudnn"):
        monkeypatch.setitem(KERNELS, name, noted(name))
    support = KernelSupport((9, 0), True, dict.fromkeys(MODULES, "no module"))
    monkeypatch.setattr(kernels, "kernel_support", lambda _: support)
    monkeypatch.setattr(kernels, "SHORT", 12)
    device = torch.device("cpu")
    q, k, v, dout = (torch.randn(1, 24, heads, 8).transpose(1, 2) for heads in (6, 2, 2, 6))
    kernel = documents_kernel(kernel_for("auto", device, 128, torch.bfloat16), Documents(((5, 12, 7),)))
    out, lse = kernel.forward(q, k, v)
    kernel.backward(dout, q, k, v, out, lse)
    expected = [("torch", 5), ("cudnn", 12), ("torch", 7)]
    assert calls == [(name, way, n) for way in ("forward", "backward") for name, n in expected]
    calls.clear()
    kernel_for("cudnn", device, 128, torch.bfloat16).forward(q[:, :, :5], k[:, :, :5], v[:, :, :5])
    assert calls == [("cudnn", "forward", 5)]


@pytest.mark.parametrize("which", ["grad_out", "out"])
def test_the_graph_that_cudnn_keeps_gets_the_strides_that_it_was_built_for(cudnn, which):
    q, k, v, grad_out = (torch.randn(2, 24, heads, 8).transpose(1, 2) for heads in (6, 2, 2, 6))
    of_cudnn = KERNELS["cudnn"]
    out, lse = of_cudnn.forward(q, k, v)
    given = {"grad_out": grad_out, "out": out}
    expected = of_cudnn.backward(grad_out, q, k, v, out, lse)
    given[which] = given[which].contiguous()
    found = of_cudnn.backward(given["grad_out"], q, k, v, given["out"], lse)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    # A row of one has any stride.
    first = [x[:1] for x in (grad_out, q, k, v, out, lse)]
    first[0] = first[0].as_strided(first[0].shape, (7, *first[0].stride()[1:]))
    copies = []
    with CountCopies(copies):
        of_cudnn.backward(*first)
    assert copies == []


class CountCopies(TorchDispatchMode):
    """Note the copies of whole tensors."""

    def __init__(self, copies):
        super().__init__()
        self.copies = copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.copies.append(args[0].shape)
        return func(*args, **(kwargs or {}))


PACKAGES = {
    flash_attn_2: "flash-attn-2",
    flash_attn_3: "flash-attn-3",
    flash_attn_3_before: "flash-attn-3",
    flash_attn_4: "flash-attn-4",
    flash_attn_4_before: "flash-attn-4",
}


@pytest.fixture(params=[*PACKAGES, "cudnn", "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        return KERNELS["torch"]
    if request.param == "cudnn":
        request.getfixturevalue("cudnn")
        return KERNELS["cudnn"]
    name = PACKAGES[request.param]
    install(monkeypatch, MODULES[name], request.param())
    return KERNELS[name]


# ---- parity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "keys", "dim"), [(True, S, D), (False, 33, D), (True, S, 16)])
def test_each_kernel_gives_what_torchs_does(kernel, causal, keys, dim):
    make = torch.Generator().manual_seed(0)
    # Some as an exchange leaves them, some as a ring cuts them out.
    q = torch.randn(B, S, H, dim, generator=make, dtype=torch.float64).transpose(1, 2)
    k, v = torch.randn(2, B, K, keys + 3, dim, generator=make, dtype=torch.float64)[:, :, :, 3:].unbind()
    grad = torch.randn(B, H, S, dim, generator=make, dtype=torch.float64)
    out, lse = flash_forward(q, k, v, causal=causal, scale=0.21)
    found, found_lse = kernel.forward(q, k, v, causal=causal, scale=0.21)
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(found_lse, lse)
    # An LSE that lies in memory otherwise, as a slice of a longer one does.
    cut = torch.cat((lse, lse), -1)[..., :S]
    right = flash_backward(grad, q, k, v, out, lse, causal=causal, scale=0.21)
    for wanted, got in zip(
        right, kernel.backward(grad, q, k, v, out, cut, causal=causal, scale=0.21), strict=True
    ):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("causal", "queries", "keys"), [(True, 1, 1), (False, 1, 1), (False, 1, 7), (False, 7, 1), (True, 7, 7)]
)
@pytest.mark.parametrize("dim", [2, 10])
def test_arguments_that_libraries_refuse_or_misread_are_computed(kernel, causal, queries, keys, dim):
    """Sequences of one token; and strides in which D is not innermost."""
    make = torch.Generator().manual_seed(0)
    shapes = ((H, queries), (K, keys), (K, keys))
    q, k, v = (torch.randn(B, h, dim, n, generator=make, dtype=torch.float64).mT for h, n in shapes)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    right, right_lse = textbook_attention(*leaves, causal, 0.21)
    grad = torch.randn(B, H, dim, 1, generator=make, dtype=torch.float64).expand(-1, -1, -1, queries).mT
    right.backward(grad)
    out, lse = kernel.forward(q, k, v, causal=causal, scale=0.21)
    torch.testing.assert_close(out, right.detach())
    torch.testing.assert_close(lse, right_lse.detach())
    # The LSE of these keys; and that of more keys, where these have a share of 1/e of the softmax.
    for more in (0, 1):
        found = kernel.backward(grad, q, k, v, out.mT.contiguous().mT, lse + more, causal=causal, scale=0.21)
        for got, leaf in zip(found, leaves, strict=True):
            torch.testing.assert_close(got, leaf.grad * torch.e**-more)


@pytest.mark.parametrize("window", [1, 2])
def test_windows_and_documents_of_one_token_are_not_given_to_a_library(kernel, window):
    make = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, h, 9, D, generator=make, dtype=torch.float64) for h in (H, K, K, H))
    documents = Documents(((1, 7, 1),))
    found, right = (documents_kernel(windowed_kernel(of, window), documents) for of in (kernel, FLASH))
    results = right.forward(q, k, v)
    torch.testing.assert_close(found.forward(q, k, v), results)
    torch.testing.assert_close(
        found.backward(grad, q, k, v, *results), right.backward(grad, q, k, v, *results)
    )


def test_a_ring_runs_the_kernel_it_is_given():
    said = []

    def forward(*given, causal=True, scale=None):
        said.append(causal)
        return flash_forward(*given, causal=causal, scale=scale)

    def backward(*given, causal=True, scale=None):
        said.append(causal)
        return flash_backward(*given, causal=causal, scale=scale)

    mine = Kernel(forward, backward)
    assert ring_kernel(None, mine) is mine
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        ring, q = ring_kernel(dist.group.WORLD, mine), torch.randn(1, 4, 6, 8)
        ring.backward(q, q, q, q, *ring.forward(q, q, q))
    finally:
        dist.destroy_process_group()
    assert said == [True, False, False] * 2


# ---- the choice --------------------------------------------------------------------------------------------

HOPPER = KernelSupport((9, 0), True, {})


@pytest.mark.parametrize(
    ("machine", "head_dim", "name"),
    [
        (KernelSupport(None, False, {}), 128, "torch"),
        (HOPPER, 128, "flash-attn-3"),
        (HOPPER, 192, "flash-attn-3"),
        (HOPPER, 512, "torch"),
        (replace(HOPPER, missing={"flash-attn-3": "no module"}), 128, "cudnn"),
        (replace(HOPPER, missing={"flash-attn-3": "no module"}), 192, "flash-attn-2"),
        (replace(HOPPER, cudnn=False, missing={"flash-attn-3": "no module"}), 128, "flash-attn-2"),
        (KernelSupport((9, 0), False, {"flash-attn-2": "x", "flash-attn-3": "x"}), 128, "torch"),
        (KernelSupport((8, 0), True, {}), 128, "flash-attn-2"),
        (KernelSupport((10, 0), True, {}), 128, "flash-attn-4"),
        (KernelSupport((10, 3), True, {}), 64, "flash-attn-4"),
        (KernelSupport((10, 0), True, {}), 192, "flash-attn-2"),
        (KernelSupport((10, 0), True, {"flash-attn-4": "no module"}), 128, "cudnn"),
        (KernelSupport((12, 0), True, {}), 128, "cudnn"),
        (KernelSupport((7, 5), True, {}), 128, "torch"),
    ],
)
def test_auto_is_the_fastest_kernel_that_is_there(machine, head_dim, name):
    assert choose_kernel("auto", machine, head_dim) == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_full_precision_auto_is_torch_and_the_others_say_why(dtype):
    assert choose_kernel("auto", HOPPER, 128, dtype) == "torch"
    for name in {*KERNELS} - {"torch"}:
        with pytest.raises(RecipeError, match=f"kernel='{name}': it takes bfloat16 and float16, not float"):
            choose_kernel(name, HOPPER, 128, dtype)


def test_the_names_of_kernels_are_the_recipes():
    assert {*KERNELS, "auto"} == {*BY_NAME["kernel"].choices}
    assert {*FASTEST_FIRST} == {*KERNELS}
    assert all(missing_requirement(name, HOPPER, 128) is None for name in KERNELS)


@pytest.mark.parametrize(
    ("name", "machine", "said"),
    [
        (
            "flash-attn-3",
            KernelSupport((8, 6), True, {}),
            "a Hopper GPU .* work here: auto, flash-attn-2, torch",
        ),
        (
            "flash-attn-4",
            KernelSupport((8, 0), True, {}),
            r"a Hopper GPU or a later one \(.* 9.0\); these work here: auto, flash-attn-2, torch$",
        ),
        (
            "flash-attn-3",
            KernelSupport((10, 0), True, {}),
            r"a Hopper GPU \(.* work here: auto, flash-attn-4, cudnn, flash-attn-2, torch$",
        ),
        (
            "flash-attn-4",
            KernelSupport((10, 0), True, {"flash-attn-4": "no CuTe"}),
            r"flash_attn.cute.interface cannot be imported \(no CuTe\)",
        ),
        ("cudnn", KernelSupport((8, 6), True, {}), "a Hopper GPU or a later one"),
        (
            "cudnn",
            replace(HOPPER, cudnn=False),
            "this torch has no cuDNN; .* auto, flash-attn-4, flash-attn-3",
        ),
        ("flash-attn-2", KernelSupport((7, 5), True, {}), "an Ampere GPU .* these work here: auto, torch$"),
        ("flash-attn-2", replace(HOPPER, missing={"flash-attn-2": "an ABI"}), r"interface .* \(an ABI\)"),
    ],
)
def test_a_missing_kernel_says_what_it_lacks_and_which_kernels_are_there(name, machine, said):
    with pytest.raises(RecipeError, match=f"kernel='{name}': .*{said}"):
        choose_kernel(name, machine, 128)


def test_a_package_that_cannot_be_imported_is_found_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    install(monkeypatch, "flash_attn.flash_attn_interface", flash_attn_2())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    machine = kernel_support(torch.device("cuda"))
    assert machine.capability == (9, 0)
    assert list(machine.missing) == ["flash-attn-3", "flash-attn-4"]
    assert "flash_attn_interface" in machine.missing["flash-attn-3"]


def test_the_doctor_says_which_kernel_is_used_and_what_the_others_lack(monkeypatch):
    there = replace(HOPPER, missing={"flash-attn-3": "No module"})
    monkeypatch.setattr(doctor, "kernel_support", lambda device: there)
    lines = [line.split(maxsplit=1) for line in doctor.report().splitlines()]
    assert ["attention", "kernel='cudnn' is the fastest here"] in lines
    assert ["flash-attn-3", "flash_attn_interface cannot be imported (No module)"] in lines
    assert [name for name, said in lines if said == "there"] == [
        "flash-attn-4",
        "cudnn",
        "flash-attn-2",
        "torch",
    ]


# ---- in a recipe -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ranks_and_a_command_refuse_a_missing_kernel_in_one_line(ranks4):
    with pytest.raises(RankError) as refused:
        lab.run("tiny", Recipe(kernel="flash-attn-3"), tokens=64, cluster=ranks4)
    assert isinstance(refused.value.cause, RecipeError)
    assert str(refused.value.cause).startswith("kernel='flash-attn-3': it needs an NVIDIA GPU")

    @click.group(cls=OneLineErrors, invoke_without_command=True)
    def command():
        raise refused.value

    said = CliRunner().invoke(command)
    assert said.exit_code == 2
    assert said.stderr == f"lab: {refused.value.cause}\n"


@pytest.mark.long
def test_a_plan_is_the_same_for_all_kernels():
    plans = [lab.plan("tiny", "plain", tokens=64, ranks=1, kernel=name) for name in ("torch", "flash-attn-3")]
    assert plans[0].timeline.to_json() == plans[1].timeline.to_json()
    assert plans[1].recipe.kernel == "flash-attn-3"


def test_a_recipe_sets_the_kernel_of_every_attention(alone, monkeypatch):
    mesh, model = dist.device_mesh.init_device_mesh("cpu", (1,)), models.build("tiny")
    apply_recipe(model, Recipe(), mesh)
    assert {module.lab_kernel for module in decoder_of(model).attentions} == {FLASH}
    model = models.build("tiny")
    with pytest.raises(RecipeError, match=r"kernel='cudnn': it needs an NVIDIA GPU; .* auto, torch"):
        apply_recipe(model, Recipe(kernel="cudnn"), mesh)
    assert not any("forward" in vars(module) for module in model.modules())
    asked = []
    monkeypatch.setattr(kernels, "kernel_support", lambda device: asked.append(device) or HOPPER)
    assert kernel_for("auto", torch.device("cpu"), 128, torch.bfloat16) is KERNELS["flash-attn-3"]
    apply_recipe(model, Recipe(kernel="flash-attn-2", compute_dtype="bfloat16"), mesh)
    assert {module.lab_kernel for module in decoder_of(model).attentions} == {KERNELS["flash-attn-2"]}
    assert asked == [torch.device("cpu")] * 2
