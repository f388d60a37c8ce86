"""What every recipe gives to cuDNN's kernels: a stand-in checks each call, and computes it on the CPU.

Seen red: documents and windows of one token that reach the kernel, a head_dim of 10 without padding, copies
of slices of several rows, and a gradient of the output in another layout than at the call before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.recipe.ladder import RECIPE_NAMES, resolve_recipe
from lab.step import compose
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.one_rank import one_rank
from lab.step.training_step import loss
from lab.techniques.attention import kernel_calls
from lab.techniques.attention.kernels import KERNELS
from lab.torch_private import cpu_flash_attention, cpu_flash_attention_backward
from lab_tests.support import reference

TOKENS = 48
DOCUMENTS = [[20, 1, 27], [20, 1, 27], [48]]
RING = {"ulysses": 2, "ring": 3}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{name}, documents": ("llama", name, {}) for name in RECIPE_NAMES},
    **{f"{name}, row": ("llama", name, {}) for name in ("plain", "tiling", "upipe", "streamed")},
    **{f"{name}, ring": ("llama", name, RING) for name in ("tiling", "upipe", "streamed")},
    **{f"{name}, tiles": ("llama", name, {"attention_tile": 11}) for name in ("tiling", "upipe")},
    **{f"upipe, chunks of {chunk}": ("llama", "upipe", {"head_chunk": chunk}) for chunk in (4, 8)},
    **{
        f"{family}, {name}, documents": (family, name, {})
        for family in ("gpt_oss", "mistral", "qwen3")
        for name in ("ulysses", "upipe", "streamed")
    },
    "gpt_oss, plain, documents": ("gpt_oss", "plain", {}),
}
"""A family, a recipe by name, and knobs. Other batches than a row or documents have two rows."""

OWN: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 2}, "qwen3": {"head_dim": 10}}


class CuDNN:
    """The operators of cuDNN.

    Attributes:
        calls: The number of calls.
        copies: The number of tensors that were copied, because they did not have the layout of q.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = self.copies = 0
        # Torch keeps a graph by the strides of q, k and v, which has the strides of out and grad_out too.
        self._graphs: dict[Any, Any] = {}
        in_layout_of = kernel_calls._in_layout_of

        def counted(q: Tensor, x: Tensor) -> Tensor:
            result = in_layout_of(q, x)
            self.copies += result is not x
            return result

        patch.setattr(kernel_calls, "_in_layout_of", counted)
        patch.setattr(kernel_calls, "cudnn_attention", self.forward)
        patch.setattr(kernel_calls, "cudnn_attention_backward", self.backward)
        patch.setattr(compose, "kernel_for", lambda *_: KERNELS["cudnn"])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        self._check(q, k, v)
        out, lse = cpu_flash_attention(q, k, v, causal=causal, scale=scale)
        return torch.empty_like(q).copy_(out), lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **settings: Any
    ) -> tuple[Tensor, ...]:
        self._check(grad_out, q, k, v, out)
        graph = (settings["causal"], *((t.shape, t.stride()) for t in (q, k, v)))
        built_for = strides(out), strides(grad_out)
        assert self._graphs.setdefault(graph, built_for) == built_for
        found = cpu_flash_attention_backward(grad_out, q, k, v, out, lse, **settings)
        return tuple(torch.empty_like(t).copy_(grad) for t, grad in zip((q, k, v), found, strict=True))

    def _check(self, *tensors: Tensor) -> None:
        """Check for 16-byte loads of half precision along D, for expanded tensors, and for one token."""
        self.calls += 1
        for t in tensors:
            *others, head_dim = strides(t)
            assert head_dim == 1
            assert not any(n % 8 for n in (t.shape[-1], t.storage_offset(), *others))
            assert 0 not in strides(t)
            assert t.numel()
            assert t.shape[2] > 1


def strides(x: Tensor) -> list[int]:
    """Return the strides of the dimensions that have several elements."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_what_cudnn_is_given(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, name, knobs = CASES[case]
    config = reference.config(family, heads=8, kv_heads=4, **{"head_dim": 16, **OWN.get(family, {})})
    documents = DOCUMENTS if "documents" in case else None
    ranks, rows = 6 if knobs == RING else 2, 3 if documents else 1 if "row" in case else 2
    recipe = resolve_recipe(name, config, ranks, TOKENS, compute_dtype=None, **knobs)
    ids = torch.randint(0, reference.VOCABULARY, (rows, TOKENS))
    cudnn = CuDNN(monkeypatch)
    with one_rank(recipe, ranks, "loopback") as mesh:
        model = reference.build(config, torch.float32)
        apply_recipe(model, recipe, mesh)
        loss(model, shard_batch(ids, recipe, mesh, documents=documents)).backward()
    assert cudnn.calls
    # gpt-oss joins the halves of the rotated heads, [b, h, S, D]. Only an exchange or UPipe puts the tokens
    # before the heads again, so without them each gradient of an output is copied.
    assert cudnn.copies == (12 if case == "gpt_oss, plain, documents" else 0)
