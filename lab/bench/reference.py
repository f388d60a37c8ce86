"""The plain model with which all results are compared: transformers' own, with sdpa.

In transformers, the softmax of eager attention and the rotary tables are computed in fp32, so two right fp64
models can differ by 1e-7. gpt-oss has no sdpa, and its own eager attention computes in the model's dtype. The
gradients of a right model differ from those of this model by about 1e-15. The norms compute in fp32 here too,
because the techniques call the same norms; but see ``exact_modules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from lab.decoder import FAMILIES


def build(cfg: PretrainedConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Return a model of transformers with sdpa or its own eager attention, and its own loop over experts.

    All parameters are random, because biases of 0 or norms of 1 could hide a bug.
    """
    torch.manual_seed(seed)
    attention = FAMILIES[cfg.model_type].attention
    model = AutoModelForCausalLM.from_config(
        cfg, attn_implementation=attention, experts_implementation="eager", dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
            if parameter.ndim == 1:
                parameter.add_(1.0)
    # A plan has fake tensors, for which ``to`` fails.
    result: PreTrainedModel = model if dtype == torch.float64 else model.to(dtype)
    return result


@contextmanager
def exact_modules() -> Iterator[None]:
    """Let what the Gemma and Cohere families compute in fp32 be in fp64 if its input is, in this block.

    Their norms multiply by their scales in fp32, so the gradient of a scale is a sum over tokens in fp32,
    which depends on the order of the tokens by 1e-7. Other families multiply in the input's dtype. Cohere's
    own attention rotates q and k in fp32, and UPipe in the input's dtype. All models of this process are
    changed, so that a model with techniques is compared with a plain one with the same modules.
    """
    cohere: tuple[Any, ...] = (modeling_cohere, modeling_cohere2)
    changed: list[tuple[Any, str, Callable[..., Any]]] = [
        (GemmaRMSNorm, "forward", _gemma_norm),
        (Gemma3RMSNorm, "forward", _gemma_norm),
        (modeling_cohere.CohereLayerNorm, "forward", _cohere_norm),
        (modeling_cohere2.Cohere2LayerNorm, "forward", _cohere_norm),
        *((module, "apply_rotary_pos_emb", _cohere_rotation) for module in cohere),
    ]
    before = [getattr(place, name) for place, name, _ in changed]
    try:
        for place, name, exact in changed:
            setattr(place, name, exact)
        yield
    finally:
        for (place, name, _), own in zip(changed, before, strict=True):
            setattr(place, name, own)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _gemma_norm(norm: Any, x: Tensor) -> Tensor:
    wide = _wide(x)
    out: Tensor = norm._norm(wide) * (1.0 + norm.weight.to(wide.dtype))
    return out.type_as(x)


def _cohere_norm(norm: Any, x: Tensor) -> Tensor:
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    normalized = (wide - mean) * torch.rsqrt(variance + norm.variance_epsilon)
    out: Tensor = norm.weight.to(wide.dtype) * normalized
    return out.type_as(x)


def _cohere_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        wide = _wide(x)
        crossed = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
        return (wide * cos[:, None] + crossed * sin[:, None]).type_as(x)

    return rotate(q), rotate(k)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all labels, in the dtype of the logits but at least in fp32.

    The loss of transformers rounds fp64 to fp32.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter by name, and check that every parameter has one."""
    by_name = {name: p.grad for name, p in model.named_parameters()}
    missing = [name for name, gradient in by_name.items() if gradient is None]
    assert not missing, f"no gradient: {missing}"
    return {name: gradient for name, gradient in by_name.items() if gradient is not None}


def error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a gradient, in the Frobenius norm."""
    assert actual.keys() == expected.keys()
    assert all(actual[n].isfinite().all() and expected[n].norm() > 0 for n in expected)
    return max(
        float((actual[n].double() - expected[n].double()).norm() / expected[n].double().norm())
        for n in expected
    )
