"""Small configs of all families, losses and gradients of the model of ``lab.bench.reference``, and errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig, PretrainedConfig

from lab.bench.reference import build, error, exact_modules, gradients, loss_of
from lab.decoder import FAMILIES, PER_LAYER, Patch

VOCABULARY, HEAD_DIM = 101, 10


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
def truth(
    cfg: LlamaConfig, ids: Tensor, dtype: torch.dtype = torch.float64, rounded: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain model in one process; the labels are ``ids`` rolled by one.

    ``rounded``: the weights are those of a model of this dtype, whatever the arithmetic.
    """
    model = exact_rotary(build(cfg, rounded or dtype).to(dtype))
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


def sharded_gradients(
    model: nn.Module, ids: Tensor, positions: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a model of which each rank of ``group`` holds the tokens at ``positions`` [s]."""
    logits = model(
        input_ids=ids[:, positions], position_ids=positions[None].expand(len(ids), -1), use_cache=False
    ).logits
    loss = loss_of(logits, ids.roll(-1, 1)[:, positions]) / ids.numel()
    loss.backward()
    total, grads = loss.detach().clone(), gradients(model)
    dist.all_reduce(total, group=group)
    for name, grad in grads.items():
        # bf16 is summed in fp32: what is measured is the technique, not the sum over ranks
        grads[name] = grad.to(torch.promote_types(grad.dtype, torch.float32))
        dist.all_reduce(grads[name], group=group)
    return total, grads


def worst_errors(
    cfg: LlamaConfig,
    ids: Tensor,
    model: nn.Module,
    positions: Tensor,
    group: dist.ProcessGroup,
    right: tuple[Tensor, dict[str, Tensor]] | None = None,
) -> tuple[float, float]:
    """Relative error of the loss and of the worst gradient, in fp64 unless ``right`` is given."""
    loss, grads = sharded_gradients(model, ids, positions, group)
    right_loss, right_grads = right or truth(cfg, ids)
    return abs(float(loss / right_loss) - 1), error(grads, right_grads)


def subgroup(size: int) -> dist.ProcessGroup:
    """This rank's group of consecutive ranks; every rank must call it."""
    groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)
    ]
    return groups[dist.get_rank() // size]
