"""Sliding windows: attention to the last keys against a masked product, its calls, its bytes and refusals."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.attention.flash import FLASH
from lab.techniques.attention.tiled_backward import tiled_kernel
from lab.techniques.attention.window import windowed_kernel
from lab.techniques.precision import accumulation_dtype
from lab_tests.support.operators import Calls

H, G, D, SCALE = 6, 2, 10, 0.3


def tensors(tokens, rows, dtype=torch.float64):
    """Return q, k, v and the gradient of the output, with the memory layout of [b, S, h, D]."""
    make = torch.Generator().manual_seed(tokens)
    wide = torch.float64
    return [
        torch.randn(rows, tokens, heads, D, dtype=wide, generator=make).to(dtype).transpose(1, 2)
        for heads in (H, H // G, H // G, H)
    ]


def masked(q, k, v, dout, window):
    """Return the output, the LSE, and the gradients of attention with a mask."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    place = torch.arange(q.shape[2])
    distance = place[:, None] - place
    mask = (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    scores = q.detach() @ k.detach().repeat_interleave(G, 1).transpose(2, 3) * SCALE
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)


def computed(kernel, q, k, v, dout):
    """Return the same of a kernel, and dq, dk and dv of its ``accumulate``, which adds to ones."""
    out, lse = kernel.forward(q, k, v, scale=SCALE)
    gradients = kernel.backward(dout, q, k, v, out, lse, scale=SCALE)
    dq, sums = q.clone(), [torch.ones_like(t, dtype=accumulation_dtype(t.dtype)) for t in (k, v)]
    kernel.accumulate(dout, dq, k, v, out, lse, *sums, scale=SCALE)
    return out, lse, *gradients, dq, *(t - 1 for t in sums)


def largest_error(found, expected):
    *first, dq, dk, dv = expected
    expected = (*first, dq, dk, dv, dq, dk, dv)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


# ---- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("piece", [1, 16, 1000])
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 24, 31])
def test_a_window_is_a_masked_product(tokens, piece, rows):
    given = tensors(tokens, rows)
    for window in (1, 2, 5, 8, 16, 17, 40):
        kernel = windowed_kernel(FLASH, window, piece=piece)
        error = largest_error(computed(kernel, *given), masked(*given, window))
        assert error < 1e-13, window


@pytest.mark.parametrize("wrong", [-1, 1])
def test_another_window_is_another_result(wrong):
    given = tensors(24, 1)
    found = computed(windowed_kernel(FLASH, 8), *given)
    assert largest_error(found, masked(*given, 8 + wrong)) > 1e-3


@pytest.mark.parametrize("tile", [3, 8, 100])
@pytest.mark.parametrize("window", [1, 5, 8, 31, 40])
def test_a_window_of_a_tiled_kernel(window, tile):
    given = tensors(31, 2)
    kernel = windowed_kernel(tiled_kernel(FLASH, tile), window, piece=16)
    assert largest_error(computed(kernel, *given), masked(*given, window)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_in_other_dtypes(dtype):
    given = tensors(31, 1, dtype)
    found, expected = computed(windowed_kernel(FLASH, 8), *given), masked(*(t.double() for t in given), 8)
    wide = torch.float32
    assert [t.dtype for t in found] == [dtype, wide, dtype, dtype, dtype, dtype, wide, wide]
    assert largest_error(found, expected) < (1e-5 if dtype == wide else 0.1)


@pytest.mark.parametrize(
    ("tokens", "window", "piece", "calls"),
    [
        (32, 8, 1000, 2),
        (32, 8, 16, 4),
        (32, 8, 1, 7),
        (35, 8, 1000, 4),
        (8, 8, 1, 1),
        (32, 1, 1000, 0),
        (32, 2, 1000, 1),
    ],
)
def test_blocks_are_computed_together(tokens, window, piece, calls):
    """Two calls for each piece: of the blocks, and of what they see of those before, where there are any.

    One token is not a call.
    """
    q, k, v, dout = tensors(tokens, 1)
    kernel = windowed_kernel(FLASH, window, piece=piece)
    with Calls() as counted:
        results = kernel.forward(q, k, v)
        kernel.backward(dout, q, k, v, *results)
    assert (counted["attention forward"], counted["attention backward"]) == (calls, calls)


# ---- bytes -----------------------------------------------------------------------------------------------


def bytes_of(tokens, dtype):
    """Return the bytes of q, of k, and of an LSE of so many tokens of one row."""
    one = tokens * D * dtype.itemsize
    return one * H, one * H // G, 4 * tokens * H


def peaks(kernel, rows, tokens, dtype):
    """Return the most bytes that forward, backward and ``accumulate`` hold beyond their arguments."""
    q, k, v, dout = tensors(tokens, rows, dtype)
    results = kernel.forward(q, k, v)
    sums = [torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for t in (k, v)]
    calls = [
        (kernel.forward, (q, k, v)),
        (kernel.backward, (dout, q, k, v, *results)),
        (kernel.accumulate, (dout, q, k, v, *results, *sums)),
    ]
    found = []
    for call, arguments in calls:
        meter = Meter()
        with meter:
            for tensor in arguments:
                tensor.view_as(tensor)
            call(*arguments)
        found.append(meter.timeline().device_peak - sum(t.nbytes for t in arguments))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "window", "piece", "later", "merged"),
    [
        (320, 32, 1000, 9, 31),
        (320, 32, 64, 2, 31),
        (320, 32, 1, 1, 31),
        (330, 32, 1, 1, 31),
        (40, 32, 64, 1, 8),
    ],
)
def test_bytes_of_a_window(tokens, window, piece, later, merged, rows, dtype):
    """Of the blocks of a call, ``later`` see keys before them; of each of these, ``merged`` queries do."""
    q, k, lse = bytes_of(later * (window - 1), dtype)
    merged_q, _, merged_lse = bytes_of(later * merged, dtype)
    half = dtype.itemsize < 4
    together = min(tokens // window, max(1, piece // window))
    one_q, one_k, _ = bytes_of(together * window, dtype)
    whole_q, whole_k, whole_lse = (rows * t for t in bytes_of(tokens, dtype))
    sums = 2 * whole_k * (1 + half)
    forward = max(2 * q + 2 * k + lse, 3 * (merged_q + merged_lse) * half)
    part = max(4 * q + 4 * k + lse, q + one_q + 2 * one_k)
    assert peaks(windowed_kernel(FLASH, window, piece=piece), rows, tokens, dtype) == [
        whole_q + whole_lse + forward,
        whole_q + sums + max(part, whole_k * half),
        part,
    ]


def test_a_window_of_all_tokens_holds_what_the_kernel_holds():
    q, k, lse = bytes_of(40, torch.float32)
    assert peaks(windowed_kernel(FLASH, 40), 1, 40, torch.float32) == [q + lse, q + 2 * k, q + 2 * k]
    tiled = tiled_kernel(FLASH, 8)
    windowed = windowed_kernel(tiled, 40)
    assert peaks(windowed, 1, 40, torch.float32) == peaks(tiled, 1, 40, torch.float32)


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_without_keys_is_refused(window):
    with pytest.raises(RecipeError, match=rf"a window of {window} keys: .*give 1 or more"):
        windowed_kernel(FLASH, window)


def test_attention_that_is_not_causal_is_refused():
    q, k, v, dout = tensors(24, 1)
    kernel = windowed_kernel(FLASH, 8)
    results = kernel.forward(q, k, v)
    sums = [torch.zeros_like(t) for t in (k, v)]
    for call, arguments in (
        (kernel.forward, (q, k, v)),
        (kernel.backward, (dout, q, k, v, *results)),
        (kernel.accumulate, (dout, q, k, v, *results, *sums)),
    ):
        with pytest.raises(ValueError, match="causal=False with a window is not supported"):
            call(*arguments, causal=False)
