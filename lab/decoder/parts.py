"""A frozen view of the parts of a decoder, to which techniques are applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from lab.decoder.attributes import check_attributes
from lab.decoder.config import (
    check_config,
    field_of,
    logits_multiplier_of,
    number_of,
    shape_of,
)
from lab.decoder.families import Family, Rotation
from lab.decoder.modules import check_modules, class_of, effective_weight
from lab.errors import ModelError
from lab.shape import HeadNorms, Shape


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer, [b, s, E] -> [b, s, E], and its parts.

    ``head`` and ``tail`` compute each token alone, so they may also be called with a tile of a sequence.
    Between them is attention, with its rotary positions.

    Attributes:
        module: The layer.
        attention: The attention.
        mlp: The MLP.
        norms: The norms before and after the attention, and before and after the MLP, [b, s, E] ->
            [b, s, E]; None if there is no such norm.
        residual_multiplier: Multiplies what attention and MLP return, before it is added.
        window: The number of keys that a query sees, itself included; None if it sees all before it.
        rotation: The pairs of dimensions of q and k that are rotated by their positions.
        norm_kind: Which norms q and k have before they are rotated; see ``Family.head_norms``.
        clip: The largest absolute value of q, k and v, to which larger ones are clipped after their
            projections; None if they are not clipped.
        fused: The rows of q, of k and of v in the weight of ``qkv_proj``; None if each has a projection.
        returns_weights: Whether the MLP returns a pair, of its output and the weights of its router.
        parallel: Whether the MLP takes the output of the first norm, as the attention does.
    """

    module: nn.Module
    attention: nn.Module
    mlp: nn.Module
    norms: tuple[nn.Module | None, ...]
    residual_multiplier: float = 1.0
    window: int | None = None
    rotation: Rotation = "halves"
    norm_kind: HeadNorms = "none"
    clip: float | None = None
    fused: tuple[int, int, int] | None = None
    returns_weights: bool = False
    parallel: bool = False

    @property
    def sinks(self) -> nn.Parameter | None:
        """The sinks of the query heads, [H]; None if attention has none."""
        return getattr(self.attention, "sinks", None)

    @property
    def experts(self) -> nn.Module | None:
        """The experts of the MLP, whose weights are [N, ...]; None if the MLP is dense."""
        return getattr(self.mlp, "experts", None)

    @property
    def head_norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The norms of q and of k, before they are rotated; None if there is none."""
        return getattr(self.attention, "q_norm", None), getattr(self.attention, "k_norm", None)

    @property
    def inputs(self) -> list[nn.Module]:
        """The projections of q, k and v, or the one that computes all of them."""
        a: Any = self.attention
        return [a.q_proj, a.k_proj, a.v_proj] if self.fused is None else [a.qkv_proj]

    @property
    def head_modules(self) -> list[nn.Module]:
        """The modules that ``head`` calls."""
        return [m for m in (self.norms[0], *self.inputs, *self.head_norms) if m is not None]

    def input_weights(self, technique: str) -> list[tuple[Tensor, Tensor | None]]:
        """Return the weight and the bias of q, of k and of v; see ``effective_weight``."""
        weights = [effective_weight(projection, technique) for projection in self.inputs]
        if self.fused is None:
            return weights
        ((weight, bias),) = weights
        biases = (None,) * 3 if bias is None else bias.split(self.fused)
        return list(zip(weight.split(self.fused), biases, strict=True))

    def head(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [b, s, H*D], k and v [b, s, K*D] of the input [b, s, E], before rotary positions."""
        a: Any = self.attention
        hidden = self.normalize(0, x)
        projected = [projection(hidden) for projection in self.inputs]
        q, k, v = projected if self.fused is None else projected[0].split(self.fused, -1)
        if self.clip is not None:
            q, k, v = (heads.clamp(-self.clip, self.clip) for heads in (q, k, v))
        q_norm, k_norm = self.head_norms
        if q_norm is None or k_norm is None:
            return q, k, v
        if self.norm_kind == "all":
            return q_norm(q), k_norm(k), v
        q, k = (heads.unflatten(-1, (-1, a.head_dim)) for heads in (q, k))
        return q_norm(q).flatten(-2), k_norm(k).flatten(-2), v

    def tail(self, x: Tensor, heads: Tensor) -> Tensor:
        """Return the output [b, s, E] of the input [b, s, E] and the outputs of all heads [b, s, H*D]."""
        a: Any = self.attention
        hidden = x + self._scaled(self.normalize(1, a.o_proj(heads)))
        result = self.mlp(self.normalize(0, x) if self.parallel else self.normalize(2, hidden))
        return hidden + self._scaled(self.normalize(3, result[0] if self.returns_weights else result))

    def normalize(self, which: int, x: Tensor) -> Tensor:
        """Return the output of one of ``norms``; ``x`` itself if there is no such norm."""
        norm = self.norms[which]
        return x if norm is None else norm(x)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_multiplier == 1 else x * self.residual_multiplier


@dataclass(frozen=True, eq=False)
class Decoder:
    """The parts of a model to which techniques are applied.

    Attributes:
        model: The model.
        shape: The sizes of the model.
        layers: The layers, in order.
        norm: The norm before the head.
        head: The head, [..., E] -> [..., V].
        rotary: The rotary embedding; takes x, position_ids [b, s], and where the layers of each type have
            frequencies of their own, a type of layer; returns cos and sin.
        logits_multiplier: The number that multiplies the output of the head.
        logits_cap: The cap of the logits, which become cap * tanh(logits / cap); None if they have none.
    """

    model: PreTrainedModel
    shape: Shape
    layers: tuple[Layer, ...]
    norm: nn.Module
    head: nn.Module
    rotary: nn.Module
    logits_multiplier: float
    logits_cap: float | None

    @property
    def attentions(self) -> list[nn.Module]:
        """The attention modules of all layers, in order."""
        return [layer.attention for layer in self.layers]

    @property
    def norms(self) -> list[nn.Module]:
        """The norms over the hidden size: those of each layer, and the norm before the head."""
        of_layers = [norm for layer in self.layers for norm in layer.norms if norm is not None]
        return [*of_layers, self.norm]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., E], before they are capped."""
        logits: Tensor = self.head(hidden)
        return logits if self.logits_multiplier == 1 else logits * self.logits_multiplier


def decoder_of(model: nn.Module) -> Decoder:
    """Return the parts of a transformers model of one of ``FAMILIES``, with or without techniques.

    Raises:
        ModelError: See ``check_config``, ``check_modules`` and ``check_attributes``; or the model is not its
            family's causal language model.
    """
    if type(model).__module__.startswith("peft."):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ModelError("prompt and prefix tuning are not supported: use LoRA")
        raise ModelError(
            f"a {type(model).__name__} of PEFT around a model: give the model inside it, which has the "
            "adapters, by model.get_base_model()"
        )
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"a {type(model).__name__} is not a transformers model: give the model itself, before it is "
            "compiled or wrapped"
        )
    family, config = check_config(model.config), model.config
    expected: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if class_of(model) is not expected:
        raise ModelError(
            f"a {type(model).__name__}: of the {family.name} family the lab takes {expected.__name__}"
        )
    check_modules(model)
    check_attributes(model)
    return Decoder(
        model=model,
        shape=shape_of(config),
        layers=tuple(_layer(layer, family, config) for layer in model.model.layers),
        norm=model.model.norm,
        head=model.lm_head,
        rotary=model.model.rotary_emb,
        logits_multiplier=logits_multiplier_of(config),
        logits_cap=number_of(config, "final_logit_softcapping"),
    )


def _layer(module: Any, family: Family, config: PretrainedConfig) -> Layer:
    shape, attention = shape_of(config), module.self_attn
    queries, keys = shape.H * shape.D, shape.K * shape.D
    return Layer(
        module=module,
        attention=attention,
        mlp=module.mlp,
        norms=tuple(None if name is None else getattr(module, name) for name in family.norms),
        residual_multiplier=getattr(module, "residual_multiplier", 1.0),
        window=shape.windows[attention.layer_idx],
        rotation=family.rotation if shape.rotates[attention.layer_idx] else "none",
        norm_kind=shape.head_norms,
        clip=number_of(config, "clip_qkv"),
        fused=(queries, keys, keys) if family.fused_attention else None,
        returns_weights=family.clamped_experts,
        parallel=family.parallel,
    )


def kinds_of(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """Return the kind of each layer of a supported model.

    Layers of one kind whose parameters have the same shapes differ in the values of their weights alone.
    """
    config = model.config
    types = field_of(config, "layer_types") or [None] * config.num_hidden_layers
    layers = decoder_of(model).layers
    return [(layer.window, layer.rotation, kind) for layer, kind in zip(layers, types, strict=True)]
