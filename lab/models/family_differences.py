"""What a model does differently from Llama, which techniques that concerns, and what it costs.

The numbers are counts of weights and of operations, and the bytes that a module of the model saves for its
backward, measured on the module. What else a step holds is said in words.

Letters: L layers, E hidden size, H query heads, K key/value heads, D head_dim, I inner width of the MLP.
Bytes are those of bf16, in which the ladder computes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from lab.decoder import FAMILIES, Decoder, decoder_of, keep_layers
from lab.models.load import ModelLike, build_on_meta, config_of, shape_of
from lab.shape import Shape
from lab.techniques.frequencies import check_rope
from lab.techniques.ulysses_degrees import degrees
from lab.torch_private import storage_id
from lab.units import Mi, format_bytes, format_tokens, parse_tokens

_DTYPE = torch.bfloat16

_Row: TypeAlias = tuple[str, str, str]
"""The fields of a ``Difference``."""


@dataclass(frozen=True)
class Difference:
    """A way in which a model differs from Llama.

    Attributes:
        what: What the model does.
        techniques: The techniques that compute it in another way than Llama, or that have other bytes.
        cost: What it costs, or saves, compared with a Llama of the same sizes.
    """

    what: str
    techniques: str
    cost: str


def differences(model: ModelLike, *, tokens: int | str = Mi) -> tuple[Difference, ...]:
    """Return the ways in which a model differs from Llama.

    Llama has RMSNorm before the attention and before the MLP, with scales in the input's dtype. It has a
    projection for each of q, k and v, a gated MLP with SiLU, and no biases. All dimensions of all heads are
    rotated, in halves and by the same frequencies in all layers. Each query sees all tokens before it. The
    heads together are as wide as the hidden state, and the head has a matrix of its own.

    Args:
        model: Any model that ``build`` takes.
        tokens: The context for which the work of a window is computed.

    Raises:
        LabError: See ``config_of`` and ``shape_of``; or ``tokens`` is no number of tokens.
    """
    config = config_of(model)
    shape, context = shape_of(config), parse_tokens(tokens)
    first = copy.deepcopy(config)
    keep_layers(first, 1)
    one = decoder_of(build_on_meta(first, dtype="bfloat16").model)
    rows = (
        *_norms(shape, one),
        *_attention(shape, one),
        *_rotation(config, shape),
        *_windows(shape, context),
        *_mlp(config, shape, one),
        *_multipliers(config, shape, one),
    )
    return tuple(Difference(*row) for row in rows)


def _bytes_of(elements: int) -> str:
    return format_bytes(_DTYPE.itemsize * elements)


def _kept(module: nn.Module, *sizes: int) -> int:
    """Return the bytes of a token, [1, 1, *sizes], that a module on the meta device saves for backward."""

    def kept(tokens: int) -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def save(x: Tensor) -> Tensor:
            storages[storage_id(x.untyped_storage())] = x.untyped_storage()
            return x

        with saved_tensors_hooks(save, lambda x: x):
            module(torch.empty(1, tokens, *sizes, dtype=_DTYPE, device="meta", requires_grad=True))
        return sum(storage.nbytes() for storage in storages.values())

    # The same parameters are saved for any number of tokens.
    return kept(2) - kept(1)


def _norms(shape: Shape, one: Decoder) -> Iterator[_Row]:
    E, layer, vectors = shape.E, one.layers[0], shape.norm_vectors
    with torch.device("meta"):
        keeps, llamas = _kept(one.norm, E), _kept(LlamaRMSNorm(E).to(_DTYPE), E)
    if layer.parallel:
        yield (
            "the attention and the MLP take the output of one norm, and both are added to its input",
            "UPipe, streamed layers",
            f"{shape.L * E * vectors:,} weights fewer; in the attention's backward, the gradient that the "
            "MLP made is another tensor than the residual's; a streamed layer computes the norm in its head "
            "and in its tail",
        )
    if layer.norms[1] is not None:
        what, weights = "norms after the attention and after the MLP, and none before them", ""
        if shape.norms > 2:
            what = f"norms before and after the attention and the MLP, {shape.norms} per layer"
            weights = f"{shape.L * (shape.norms - 2) * E * vectors:,} weights more; "
        yield (
            what,
            "tiled norms, UPipe, streamed layers",
            f"{weights}in backward, the gradient of what the attention and the MLP return is another tensor "
            "than the residual's",
        )
    kept = f"without tiles, a norm keeps {format_bytes(keeps)} per token, and Llama's {format_bytes(llamas)}"
    scales = shape.weights - replace(shape, norm_vectors=1).weights
    if scales:
        kept = f"{abs(scales):,} weights {'more' if scales > 0 else 'fewer'}; {kept}"
    if "LayerNorm" in type(one.norm).__name__:
        what = {
            0: "LayerNorm in fp32, without a scale and a bias",
            1: "norms that subtract the mean, with a scale alone, in operators of fp32",
            2: "LayerNorm, with a scale and a bias",
        }[vectors]
        yield what, "tiled norms", kept
    elif keeps != llamas:
        yield "norms that multiply by their scales in fp32", "tiled norms", kept


def _attention(shape: Shape, one: Decoder) -> Iterator[_Row]:
    E, H, K, D, layer = shape.E, shape.H, shape.K, shape.D, one.layers[0]
    q_norm, k_norm = layer.head_norms
    if q_norm is not None and k_norm is not None:
        joined = shape.head_norms == "all"
        kept = sum(_kept(norm, *((n * D,) if joined else (n, D))) for norm, n in ((q_norm, H), (k_norm, K)))
        weights = shape.weights - replace(shape, head_norms="none").weights
        again = 2 * E * (H + K) * D * shape.L * (3 if joined else 1)
        what = "a norm of each head of q and of k" + ", with scales of its own" * (shape.head_norms == "own")
        yield (
            "one norm over all heads of q, and one over all heads of k" if joined else what,
            "UPipe, streamed layers",
            f"UPipe projects q and k once more in {'forward and twice more in ' * joined}backward: "
            f"{again:.3g} operations per token in all layers; without UPipe, these norms of a layer keep "
            f"{format_bytes(kept)} per token; {weights:,} weights more",
        )
    if H * D != E:
        yield (
            f"{H} heads of {D}, which are {H * D} numbers where the hidden state has {E}",
            "Ulysses, UPipe, offload of attention",
            f"q, and the output of attention, have {_bytes_of(H * D)} per token, where the hidden state has "
            f"{_bytes_of(E)}",
        )
    if shape.fused_attention:
        yield (
            "one projection for q, k and v",
            "UPipe, LoRA",
            "UPipe takes the rows of its heads from the one weight; without Ulysses and UPipe, v keeps q and "
            "k as projected; an adapter of qkv_proj is one for all three",
        )
    if shape.attention_biases:
        what = f"{shape.attention_biases:,} biases in the attention of a layer"
        yield (
            what,
            "UPipe",
            f"{shape.L * shape.attention_biases:,} weights more, of which a stage adds a part",
        )
    if layer.clip is not None:
        yield (
            f"q, k and v are clipped at {layer.clip:g}",
            "UPipe, streamed layers",
            f"UPipe projects them once more in backward: {2 * E * (H + 2 * K) * D * shape.L:.3g} operations "
            "per token in all layers; without UPipe, a layer keeps copies of what is clipped",
        )
    if shape.sinks:
        yield (
            "a sink for each query head: a learned logit, which takes its share of the softmax",
            "kernels of attention, UPipe, streamed layers",
            f"{shape.L * H:,} weights more; their gradients are computed before a kernel's backward",
        )
    attention: Any = layer.attention
    scale, usual = attention.scaling, D**-0.5
    if not isclose(scale, usual):
        what = f"scores of attention multiplied by {scale:.4g}, and not by 1/sqrt({D}) = {usual:.4g}"
        yield what, "kernels of attention", "nothing: every kernel takes the number"


def _rotation(config: PretrainedConfig, shape: Shape) -> Iterator[_Row]:
    family, tables, positions = FAMILIES[config.model_type], check_rope(config), "exact positions"
    rotated = sorted({2 * len(of_type.inverse) for of_type in tables.values()})
    scaled = sorted({of_type.rope_type for of_type in tables.values()} - {"default"})
    if scaled:
        least = config.max_position_embeddings
        same = f"; rows of {least:,} tokens or more must have one length" if "dynamic" in scaled else ""
        what = f"rotary frequencies of the type {' and '.join(scaled)}"
        yield what, positions, f"no bytes: they are computed once, in fp64{same}"
    if len(tables) > 1:
        what = f"rotary frequencies for each type of layers, of {len(tables)} types"
        yield what, positions, "a token has cosines and sines for each type"
    if rotated != [shape.D]:
        what = f"the first {' or '.join(map(str, rotated))} of {shape.D} dimensions of a head are rotated"
        yield what, f"{positions}, UPipe, streamed layers", "a token has cosines and sines of these alone"
    if family.rotation == "half_tables":
        what = "the cosines and sines of one half of a head, which both halves take"
        yield what, positions, "a token has half as many cosines and sines"
    if family.rotation.startswith("interleaved"):
        what = "the dimensions 2i and 2i+1 of a head are rotated together, and not its halves"
        yield what, "UPipe, streamed layers", "no bytes; its time is not measured"
    in_place = "UPipe and streamed layers rotate in place"
    # Cohere alone has such tables.
    if family.rotation == "interleaved_tables":
        cost = "without UPipe, copies of q and k in fp32 while they are rotated"
        yield "q and k are rotated in fp32", "plain attention, Ulysses", f"{cost}; {in_place}"
    if family.partial or family.rotation == "half_tables":
        what = "each head of q and k is joined of what is rotated and what is not, which is a copy"
        cost = "without Ulysses and UPipe, attention keeps a copy of its output"
        yield what, "plain attention", f"{cost}; {in_place}"
    still = shape.rotates.count(False)
    if still:
        what = f"{still} of {shape.L} layers without rotary positions"
        yield what, "UPipe, streamed layers", "no bytes; the rotations of these layers are left out"


def _windows(shape: Shape, tokens: int) -> Iterator[_Row]:
    seen = [min(window or tokens, tokens) for window in shape.windows]
    # The first queries see all before them, and the others as many keys as a window.
    pairs = [most * (most + 1) // 2 + (tokens - most) * most for most in seen]
    whole = tokens * (tokens + 1) // 2
    windows = [n for n, window in enumerate(shape.windows) if window is not None]
    if windows:
        first = windows[0]
        yield (
            f"a window of {shape.windows[first]:,} keys in {len(windows)} of {shape.L} layers",
            "kernels of attention, ring",
            f"at {format_tokens(tokens)} tokens a query of these layers sees {pairs[first] / tokens:,.0f} "
            f"keys on average, where it would see {tokens // 2:,}: attention computes "
            f"{sum(pairs) / (shape.L * whole):.2%} of the pairs of a query and a key; a ring that "
            f"sends is refused, so without ring_exchange='gather' at most {max(degrees(shape.H, shape.K))} "
            "ranks share a sequence",
        )


def _mlp(config: PretrainedConfig, shape: Shape, one: Decoder) -> Iterator[_Row]:
    dense, sparse, matrix = not all(shape.sparse), sum(shape.sparse), shape.E * shape.I
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if shape.matrices == 2:
        with torch.device("meta"):
            llama = LlamaConfig(hidden_size=shape.E, intermediate_size=shape.I, num_attention_heads=1)
            mlps = one.layers[0].mlp, LlamaMLP(llama).to(_DTYPE)
        keeps, llamas = (format_bytes(_kept(mlp, shape.E)) for mlp in mlps)
        yield (
            f"MLPs without a gate: two matrices, and {activation} between them",
            "tiled MLPs, LoRA",
            f"{shape.L * matrix:,} weights fewer; without tiles and checkpoints, an MLP keeps {keeps} per "
            f"token, and Llama's {llamas}",
        )
    elif activation != "silu":
        yield f"{activation} in place of SiLU", "tiled MLPs, compiled tiles", "its time is not measured"
    if shape.fused_mlp and dense:
        yield (
            "one projection for the gate and up",
            "tiled MLPs, LoRA",
            f"the largest gradient of an MLP's weight has {_bytes_of(2 * matrix)}, where Llama's has "
            f"{_bytes_of(matrix)}; an adapter of gate_up_proj is one for both",
        )
    if shape.mlp_biases and dense:
        what = f"{shape.mlp_biases:,} biases in the MLP of a layer"
        yield (
            what,
            "tiled MLPs",
            f"{shape.L * shape.mlp_biases:,} weights more, with gradients summed over tiles",
        )
    if shape.experts:
        layer, chosen = shape.layer_weights(sparse=True), shape.experts_per_token
        active = layer - (shape.experts - chosen) * shape.expert_weights
        where = "each layer" if sparse == shape.L else f"{sparse} of {shape.L} layers"
        yield (
            f"{shape.experts} experts in {where}, of which {chosen} compute a token",
            "FSDP2, tiled MLPs, LoRA",
            f"a token is computed with {shape.active_weights:,} of {shape.weights:,} weights; FSDP2 gathers "
            f"all experts of a layer, {_bytes_of(layer)} with its attention, where a token needs "
            f"{_bytes_of(active)}; experts get no adapters",
        )
    if shape.clamped_experts:
        biases = shape.expert_weights - 3 * shape.E * shape.expert_width + 1
        yield (
            "experts and routers with biases; the gate and up of an expert are clamped",
            "tiled MLPs",
            f"{sparse * shape.experts * biases:,} weights more; without tiles and checkpoints, an expert "
            "keeps more tensors than others",
        )


def _multipliers(config: PretrainedConfig, shape: Shape, one: Decoder) -> Iterator[_Row]:
    c: Any = config
    family, embedding = FAMILIES[c.model_type], one.model.get_input_embeddings()
    if family.knows("residual_multiplier"):
        yield (
            f"what the attention and the MLP return is multiplied by {c.residual_multiplier:g}",
            "UPipe, streamed layers, tiled MLPs",
            "in backward, the gradient of what they return is another tensor than the residual's",
        )
    if one.logits_multiplier != 1:
        divided = family.knows("logits_scaling")
        does, by = ("divided", c.logits_scaling) if divided else ("multiplied", one.logits_multiplier)
        what = f"logits {does} by {by:g}"
        yield what, "tiled loss", "the logits of a tile are in memory twice"
    if one.logits_cap is not None:
        what = f"logits capped at {one.logits_cap:g} by a tanh"
        yield what, "tiled loss, Liger's loss", "the plain loss keeps the tanh; tiles have that of a part"
    factor = getattr(embedding, "scalar_embed_scale", getattr(c, "embedding_multiplier", 1.0))
    if factor != 1:
        what = f"the output of the embedding is multiplied by {factor:g}"
        yield what, "none: the embedding's own module does it", "one product; its time is not measured"
    if shape.tied:
        yield (
            "the head has the embedding's matrix",
            "FSDP2, tiled loss",
            f"{shape.V * shape.E:,} weights fewer; at the end of backward the gradients of both are added",
        )
