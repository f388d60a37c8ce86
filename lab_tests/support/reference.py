"""The plain model with which all results are compared: transformers' own, with sdpa; and small configs.

In transformers, the softmax of eager attention and the rotary tables are computed in fp32, so two right fp64
models can differ by 1e-7. gpt-oss has no sdpa, and its own eager attention computes in the model's dtype. The
gradients of a right model differ from those of this model by about 1e-15. The norms compute in fp32 here too,
because the techniques call the same norms; but see ``exact_modules``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere2 import modeling_cohere2
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from lab.bench.gradients import error as error
from lab.decoder import FAMILIES, PER_LAYER, Patch

VOCABULARY, HEAD_DIM = 101, 10


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


def exact_rotary(model: nn.Module) -> nn.Module:
    """Let the rotary embedding compute in fp64, without code of the lab.

    The rope type is the default, or dynamic NTK scaling in a model that has computed no longer row before.
    """
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    head_dim, of_all = rotary.config.head_dim, rotary.config.rope_parameters
    kind = rotary.config.model_type

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        parameters = of_all if layer_type is None else of_all[layer_type]
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        base, length = parameters["rope_theta"], int(position_ids.max()) + 1
        if parameters["rope_type"] == "dynamic":
            ratio = max(length / rotary.config.max_position_embeddings, 1)
            base *= (1 + parameters["factor"] * (ratio - 1)) ** (dim / (dim - 2))
        half = position_ids.double()[..., None] * torch.exp(-powers * math.log(base))
        if kind.startswith("cohere"):
            angles = half.repeat_interleave(2, -1)
        else:
            angles = half if kind == "gpt_oss" else torch.cat((half, half), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = Patch(forward, rotary.forward)
    return model


def config(
    family: str = "llama", heads: int = 24, kv_heads: int = 6, layers: int = 2, **more: Any
) -> PretrainedConfig:
    """A small config in which no two sizes are equal.

    With H query heads, the hidden size is 2*H, the head_dim 10 (so H*head_dim is another number), and the
    vocabulary has 101 tokens. A part of each head that is rotated is rounded to an even number of dimensions.
    """
    sizes = {
        "hidden_size": 2 * heads, "intermediate_size": 72, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    fields: dict[str, Any] = {**sizes, **copy.deepcopy(FAMILIES[family].fields), **more}
    # An even number of dimensions can be rotated.
    rope, dim = fields["rope_parameters"], fields["head_dim"]
    if "partial_rotary_factor" in rope:
        rotated = 2 * max(round(rope["partial_rotary_factor"] * dim / 2), 1)
        fields["rope_parameters"] = {**rope, "partial_rotary_factor": rotated / dim}
    for name in filter(fields.get, PER_LAYER):
        fields[name] = (fields[name] * layers)[:layers]
    return CONFIG_MAPPING[family](**fields)


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@exact_modules()
def truth(cfg: LlamaConfig, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain model in one process; the labels are ``ids`` rolled by one."""
    model = exact_rotary(build(cfg))
    loss = loss_of(model(input_ids=ids, use_cache=False).logits, ids.roll(-1, 1)) / ids.numel()
    loss.backward()
    return loss.detach(), gradients(model)


def textbook_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output [b, H, S, D] and LSE [b, H, S] of attention in fp64; q [b, H, S, D], k and v [b, K, keys, D]."""
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1) @ v.double().repeat_interleave(group, 1), scores.logsumexp(-1)


def subgroup(size: int) -> dist.ProcessGroup:
    """This rank's group of consecutive ranks; every rank must call it."""
    groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)
    ]
    return groups[dist.get_rank() // size]
