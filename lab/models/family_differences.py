"""What a model does differently from Llama, which techniques that concerns, and what it costs.

The numbers are computed from the model's own sizes, by the terms of the closed form
(``lab.planning.closed_form``). What neither a plan nor a test measures is said in words.

Letters: L layers, E hidden size, H query heads, K key/value heads, D head_dim, I inner width of the MLP, V
vocabulary size. Bytes are those of bf16, in which the ladder computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isclose, sqrt
from typing import Any

from transformers import PretrainedConfig

from lab.decoder import FAMILIES
from lab.models.load import ModelLike, config_of, shape_of
from lab.shape import Shape
from lab.techniques.frequencies import check_rope
from lab.techniques.loss_blocks import BLOCKS
from lab.techniques.ulysses_degrees import degrees
from lab.techniques.window_pieces import SINK_PIECE
from lab.units import Ki, Mi, format_bytes, format_tokens, parse_tokens

_WIDTH = 2
"""Bytes of an element in bf16."""

_WIDE = 4
"""Bytes of an element in fp32."""

_LOSS_TILE = 16 * Ki
"""The tokens of a tile of the loss in the ladder, of a long context."""


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
    return (
        *_norms(shape),
        *_head_norms(shape),
        *_attention_projections(shape),
        *_clips(config, shape),
        *_rotation(config, shape),
        *_windows(shape, context),
        *_sinks(shape),
        *_mlp(config, shape),
        *_experts(shape),
        *_multipliers(config, shape),
        *_embedding(shape),
    )


def attended_pairs(window: int | None, tokens: int) -> int:
    """Return the pairs of a query and a key that it sees, of all queries of a causal sequence.

    Args:
        window: The number of keys that a query sees, itself included; None if it sees all before it.
        tokens: The number of queries.
    """
    most = tokens if window is None else min(window, tokens)
    return most * (most + 1) // 2 + (tokens - most) * most


def _bytes_of(elements: int) -> str:
    return format_bytes(_WIDTH * elements)


def _norm_keeps(shape: Shape) -> int:
    """Return the bytes of a token that a norm keeps for backward, if it has no tiles."""
    if shape.layer_norms:
        return _WIDTH * shape.E + 8
    if shape.bare_norms:
        return _WIDE * shape.E + 8
    return (4 + 4 * shape.centered_norms + (4 if shape.wide_scales else _WIDTH)) * shape.E + 4


def _norms(shape: Shape) -> Iterator[Difference]:
    keeps = format_bytes(_norm_keeps(shape))
    plain = replace(shape, layer_norms=False, bare_norms=False, centered_norms=False, wide_scales=False)
    llamas = format_bytes(_norm_keeps(plain))
    if shape.parallel:
        yield Difference(
            "the attention and the MLP take the output of one norm, and both are added to its input",
            "UPipe, streamed layers",
            f"{shape.L * shape.E:,} weights fewer; in the attention's backward, the gradient that the MLP "
            f"made is a tensor beside the residual's, {_bytes_of(shape.E)} per token; a streamed layer "
            "computes the norm in its head and in its tail",
        )
    if shape.norms_after:
        also = f"norms before and after the attention and the MLP, {shape.norms} per layer"
        more = shape.norms - 2
        kept = f"; without tiles and checkpoints, the {more} more keep {keeps} per token each"
        yield Difference(
            also if more else "norms after the attention and after the MLP, and none before them",
            "tiled norms, UPipe, streamed layers",
            "in backward, the gradient of what the attention and the MLP return is a tensor beside the "
            f"residual's, {_bytes_of(shape.E)} per token{kept if more else ''}",
        )
    if shape.layer_norms:
        biases = shape.weights - replace(shape, layer_norms=False).weights
        yield Difference(
            "LayerNorm, with a scale and a bias",
            "tiled norms",
            f"{biases:,} weights more; without tiles, a norm keeps {keeps} per token, where RMSNorm keeps "
            f"{llamas}",
        )
    elif shape.bare_norms:
        scales = replace(shape, bare_norms=False).weights - shape.weights
        yield Difference(
            "LayerNorm in fp32, without a scale and a bias",
            "tiled norms",
            f"{scales:,} weights fewer; without tiles, a norm keeps {keeps} per token, where Llama's keeps "
            f"{llamas}",
        )
    elif shape.centered_norms:
        yield Difference(
            "norms that subtract the mean, with a scale alone, in operators of fp32",
            "tiled norms",
            f"without tiles, a norm keeps {keeps} per token, where Llama's keeps {llamas}",
        )
    elif shape.wide_scales:
        yield Difference(
            "norms that multiply by their scales in fp32",
            "tiled norms",
            f"without tiles, a norm keeps {keeps} per token, where Llama's keeps {llamas}",
        )


def _head_norms(shape: Shape) -> Iterator[Difference]:
    if shape.head_norms == "none":
        return
    heads = shape.H + shape.K
    of_head = 4 + 4 * shape.centered_norms + (4 if shape.wide_scales else _WIDTH)
    kept = heads * (of_head * shape.D + 4)
    one = 2 * shape.E * heads * shape.D * shape.L
    weights = shape.weights - replace(shape, head_norms="none").weights
    if shape.head_norms in ("each", "own"):
        own = ", with scales of its own" if shape.head_norms == "own" else ""
        what = f"a norm of each head of q and of k{own}"
        upipe = f"UPipe projects q and k once more in backward: {one:.3g} operations per token in all layers"
    else:
        what = "one norm over all heads of q, and one over all heads of k"
        upipe = (
            "a stage of UPipe has a few heads, so it projects q and k once more in forward and twice more in "
            f"backward: {3 * one:.3g} operations per token in all layers; nothing is gathered, for a rank "
            "has all heads of its own tokens"
        )
    yield Difference(
        what,
        "UPipe, streamed layers",
        f"{upipe}; without UPipe, a layer keeps {format_bytes(kept)} more per token; {weights:,} weights "
        "more",
    )


def _attention_projections(shape: Shape) -> Iterator[Difference]:
    width = shape.H * shape.D
    if width != shape.E:
        yield Difference(
            f"{shape.H} heads of {shape.D}, which are {width} numbers where the hidden state has {shape.E}",
            "Ulysses, UPipe, offload of attention",
            f"q, and the output of attention, have {_bytes_of(width)} per token, where the hidden state has "
            f"{_bytes_of(shape.E)}",
        )
    if shape.fused_attention:
        yield Difference(
            "one projection for q, k and v",
            "UPipe, LoRA",
            "UPipe takes the rows of its heads from the one weight; without Ulysses and UPipe, v keeps q and "
            f"k as projected, {_bytes_of((shape.H + shape.K) * shape.D)} per token; an adapter of qkv_proj "
            "is one for all three",
        )
    if shape.attention_biases:
        yield Difference(
            f"{shape.attention_biases:,} biases in the attention of a layer",
            "UPipe",
            f"{shape.L * shape.attention_biases:,} weights more; UPipe adds those of the heads of a stage",
        )


def _clips(config: PretrainedConfig, shape: Shape) -> Iterator[Difference]:
    if not shape.clipped:
        return
    elements = (shape.H + 2 * shape.K) * shape.D
    again = 2 * shape.E * elements * shape.L
    yield Difference(
        f"q, k and v are clipped at {getattr(config, str(FAMILIES[config.model_type].clip)):g}",
        "UPipe, streamed layers",
        f"UPipe projects them once more in backward: {again:.3g} operations per token in all layers; without "
        f"UPipe, a layer keeps copies of what is clipped, {_bytes_of(elements)} per token",
    )


def _rotation(config: PretrainedConfig, shape: Shape) -> Iterator[Difference]:
    family, tables = FAMILIES[config.model_type], check_rope(config)
    rotated = sorted({2 * len(of_type.inverse) for of_type in tables.values()})
    scaled = sorted({of_type.rope_type for of_type in tables.values()} - {"default"})
    if scaled:
        least = config.max_position_embeddings
        same = f"; rows of {least:,} tokens or more must have one length" if "dynamic" in scaled else ""
        yield Difference(
            f"rotary frequencies of the type {' and '.join(scaled)}",
            "exact positions",
            f"no bytes: they are computed once, in fp64{same}",
        )
    if len(tables) > 1:
        yield Difference(
            f"rotary frequencies for each type of layers, of {len(tables)} types",
            "exact positions",
            f"the cosines and sines of a token have {_bytes_of(2 * shape.rotated)}, where Llama's have "
            f"{_bytes_of(2 * shape.D)}",
        )
    if rotated != [shape.D]:
        yield Difference(
            f"the first {' or '.join(map(str, rotated))} of {shape.D} dimensions of a head are rotated",
            "exact positions, UPipe, streamed layers",
            f"the cosines and sines of a token have {_bytes_of(2 * shape.rotated)}, where Llama's have "
            f"{_bytes_of(2 * shape.D)}",
        )
    if family.half_tables:
        yield Difference(
            "the cosines and sines of one half of a head, which both halves take",
            "exact positions",
            f"the cosines and sines of a token have {_bytes_of(2 * shape.rotated)}, where Llama's have "
            f"{_bytes_of(2 * shape.D)}",
        )
    if family.interleaved:
        yield Difference(
            "the dimensions 2i and 2i+1 of a head are rotated together, and not its halves",
            "UPipe, streamed layers",
            "no bytes; its time is not measured",
        )
    if shape.wide_rotation:
        q, k = (_WIDE * heads * shape.D for heads in (shape.H, shape.K))
        yield Difference(
            "q and k are rotated in fp32",
            "plain attention, Ulysses",
            f"without UPipe, {format_bytes(q + k + max(3 * q, q + 3 * k))} per token in addition to q, k "
            "and v while they are rotated; UPipe and streamed layers rotate in place",
        )
    if shape.joined_heads:
        yield Difference(
            "each head of q and k is joined of what is rotated and what is not, which is a copy",
            "plain attention",
            f"without Ulysses and UPipe, attention keeps {_bytes_of(shape.H * shape.D)} more per token, a "
            "copy of its output; UPipe and streamed layers rotate in place",
        )
    still = shape.rotates.count(False)
    if still:
        yield Difference(
            f"{still} of {shape.L} layers without rotary positions",
            "UPipe, streamed layers",
            "no bytes; the rotations of these layers are left out",
        )


def _windows(shape: Shape, tokens: int) -> Iterator[Difference]:
    windows = [window for window in shape.windows if window is not None]
    if not windows:
        return
    seen = attended_pairs(windows[0], tokens) / tokens
    share = sum(attended_pairs(window, tokens) for window in shape.windows) / (
        shape.L * attended_pairs(None, tokens)
    )
    yield Difference(
        f"a window of {windows[0]:,} keys in {len(windows)} of {shape.L} layers",
        "kernels of attention, ring",
        f"at {format_tokens(tokens)} tokens a query of these layers sees {seen:,.0f} keys on average, where "
        f"it would see {tokens // 2:,}: attention computes {share:.2%} of the pairs of a query and a key; a "
        f"ring is refused, so at most {max(degrees(shape.H, shape.K))} ranks share a sequence",
    )


def _sinks(shape: Shape) -> Iterator[Difference]:
    if not shape.sinks:
        return
    yield Difference(
        "a sink for each query head: a learned logit, which takes its share of the softmax",
        "kernels of attention, UPipe, streamed layers",
        f"{shape.L * shape.sinks:,} weights more; their gradients are computed before the backward of a "
        f"kernel, with {format_bytes(_WIDE * SINK_PIECE * shape.D)} for each head of a row and "
        f"{2 * _WIDE} bytes for each of its queries",
    )


def _mlp(config: PretrainedConfig, shape: Shape) -> Iterator[Difference]:
    dense = not all(shape.sparse)
    inner = _bytes_of(shape.I)
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if shape.matrices == 2:
        fewer = shape.L * shape.E * shape.I
        squared = "; of ReLU squared, backward has five of these tensors, where others have three"
        yield Difference(
            f"MLPs without a gate: two matrices, and {activation} between them",
            "tiled MLPs, LoRA",
            f"{fewer:,} weights fewer; without tiles and checkpoints, an MLP keeps 2 tensors of {inner} per "
            f"token, where a gated one keeps 4{squared if shape.relu_squared else ''}",
        )
    elif activation != "silu":
        yield Difference(
            f"{activation} in place of SiLU",
            "tiled MLPs, compiled tiles",
            "the closed form counts as many bytes; its time is not measured",
        )
    if shape.fused_mlp and dense:
        matrix = shape.E * shape.I
        yield Difference(
            "one projection for the gate and up",
            "tiled MLPs, LoRA",
            f"the largest gradient of an MLP's weight has {_bytes_of(2 * matrix)}, where Llama's has "
            f"{_bytes_of(matrix)}; an adapter of gate_up_proj is one for both",
        )
    if shape.mlp_biases and dense:
        yield Difference(
            f"{shape.mlp_biases:,} biases in the MLP of a layer",
            "tiled MLPs",
            f"{shape.L * shape.mlp_biases:,} weights more, whose gradients are summed over tiles",
        )


def _experts(shape: Shape) -> Iterator[Difference]:
    if not shape.experts:
        return
    sparse, chosen = sum(shape.sparse), shape.experts_per_token
    where = "each layer" if sparse == shape.L else f"{sparse} of {shape.L} layers"
    layer = shape.layer_weights(sparse=True)
    active = layer - (shape.experts - chosen) * shape.expert_weights
    tensors = 8 if shape.clamped_experts else 5
    kept = chosen * (_WIDTH * (shape.E + tensors * shape.expert_width) + 44) + 4 * shape.experts
    yield Difference(
        f"{shape.experts} experts in {where}, of which {chosen} compute a token",
        "FSDP2, tiled MLPs, LoRA",
        f"a token is computed with {shape.active_weights:,} of {shape.weights:,} weights; FSDP2 gathers all "
        f"experts of a layer, {_bytes_of(layer)} with its attention, where a token needs "
        f"{_bytes_of(active)}; without tiles and checkpoints, a layer's experts keep {format_bytes(kept)} "
        "per token; experts get no adapters",
    )
    if shape.clamped_experts:
        biases = shape.expert_weights - 3 * shape.E * shape.expert_width + 1
        yield Difference(
            "experts and routers with biases; the gate and up of an expert are clamped",
            "tiled MLPs",
            f"{sparse * shape.experts * biases:,} weights more; without tiles and checkpoints, an expert "
            f"keeps 8 tensors of {_bytes_of(shape.expert_width)} per token, where others keep 5",
        )


def _multipliers(config: PretrainedConfig, shape: Shape) -> Iterator[Difference]:
    c: Any = config
    if shape.scaled_residual:
        yield Difference(
            f"what the attention and the MLP return is multiplied by {c.residual_multiplier:g}",
            "UPipe, streamed layers, tiled MLPs",
            "in backward, the gradient of what they return is a tensor beside the residual's, "
            f"{_bytes_of(shape.E)} per token",
        )
    if shape.scaled_logits:
        family = FAMILIES[c.model_type]
        does, name = "divided", family.logits_divisor
        if name is None:
            does, name = "multiplied", family.logits_multiplier
        yield Difference(
            f"logits {does} by {getattr(c, str(name)):g}",
            "tiled loss",
            f"the logits of a tile of {format_tokens(_LOSS_TILE)} tokens are there twice: "
            f"{_bytes_of(_LOSS_TILE * shape.V)} more",
        )
    if shape.capped_logits:
        cap = getattr(c, str(FAMILIES[c.model_type].logits_cap))
        block = -(-_LOSS_TILE // BLOCKS)
        yield Difference(
            f"logits capped at {cap:g} by a tanh",
            "tiled loss, Liger's loss",
            f"the plain loss keeps their tanh, {_bytes_of(shape.V)} per token; a tile of "
            f"{format_tokens(_LOSS_TILE)} tokens has that of {format_tokens(block)} of them, "
            f"{format_bytes(_WIDE * block * shape.V)} more",
        )
    embedding = sqrt(shape.E) if shape.scaled_embedding else getattr(c, "embedding_multiplier", 1.0)
    if embedding != 1:
        yield Difference(
            f"the output of the embedding is multiplied by {embedding:g}",
            "none: the embedding's own module does it",
            "one product per step; its time is not measured",
        )
    usual = scale = shape.D**-0.5
    if hasattr(c, "attention_multiplier"):
        scale = c.attention_multiplier
    elif hasattr(c, "query_pre_attn_scalar"):
        scale = c.query_pre_attn_scalar**-0.5
    if not isclose(scale, usual):
        yield Difference(
            f"scores of attention multiplied by {scale:.4g}, and not by 1/sqrt({shape.D}) = {usual:.4g}",
            "kernels of attention",
            "nothing: every kernel takes the number",
        )


def _embedding(shape: Shape) -> Iterator[Difference]:
    if shape.tied:
        table = shape.V * shape.E
        yield Difference(
            "the head has the embedding's matrix",
            "FSDP2, tiled loss",
            f"{table:,} weights fewer; at the end of backward {_bytes_of(table)} more, where the gradients "
            "of both are added",
        )
