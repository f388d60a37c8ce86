"""Attention is checked at some positions: right attention passes, and an error that is put in is found."""

import pytest
import torch

from lab.bench import slice_check
from lab.bench.slice_check import LONG, positions, slice_errors
from lab.techniques.attention.flash import flash_backward, flash_forward

B, H, K, S, D = 2, 12, 3, 150, 10


def attention_and_gradients(dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    q, grad, k, v = (
        torch.randn(B, S, heads, D, generator=make, dtype=torch.float64).to(dtype).transpose(1, 2)
        for heads in (H, H, K, K)
    )
    out, lse = flash_forward(q, k, v)
    return [q, k, v, out, lse], [grad, *flash_backward(grad, q, k, v, out, lse)]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("block", [7, 64, 1000])
def test_what_is_right_is_found_right(dtype, most, block):
    given, gradients = attention_and_gradients(dtype)
    errors = slice_errors(*given, tuple(gradients), block=block)
    assert list(errors) == ["out", "lse", "dq", "dk", "dv"]
    assert max(errors.values()) < most


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize(("row", "found"), [(149, True), (120, True), (119, False)])
def test_an_error_of_one_head_in_one_far_slice_is_found_where_one_looks(monkeypatch, name, row, found):
    monkeypatch.setattr(slice_check, "positions", lambda _: [1, 70, 120, 149])
    given, gradients = attention_and_gradients()
    gradients_of = dict(zip(("dq", "dk", "dv"), gradients[1:], strict=True))
    tensors = gradients_of | {"out": given[3], "lse": given[4]}
    planted = tensors[name].select(2, row).select(1, 1 if name in ("dk", "dv") else 10)
    planted *= 1 + 1e-3
    errors = slice_errors(*given, tuple(gradients), block=64)
    assert errors.pop(name) > 1e-4 if found else errors[name] < 1e-12
    # A wrong out or LSE is part of what dk and dv are held against.
    clean = errors if name in gradients_of else {"dq": errors["dq"]}
    assert max(clean.values()) < 1e-12


def test_nothing_that_is_not_a_number_passes():
    given, gradients = attention_and_gradients()
    gradients[2][1, 2, 149, 3] = torch.nan
    assert not slice_errors(*given, tuple(gradients))["dk"] < 1


def test_positions_are_spread_and_on_both_sides_of_every_border():
    assert positions(torch.empty(2, S, H, D, device="meta").transpose(1, 2)) == [1, 38, 75, 112, 149]
    tokens, heads = 5 * 2**20, 4
    x = torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    found = positions(x)
    assert {1, tokens - 1, LONG - 1, LONG} < {*found}
    for border in (2**31, 2**30, 2**32 // 2):
        # The element at the border is of this token, for one of the heads.
        token = border // (heads * 128)
        assert {token - 1, token} < {*found}
    assert len(found) < 40
    apart = torch.empty(1, heads, tokens, 128, dtype=torch.bfloat16, device="meta")
    assert (2**31 - 3 * tokens * 128) // 128 in positions(apart)
