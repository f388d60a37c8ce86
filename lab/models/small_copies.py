"""Smaller copies of a model: its first layers alone, or all its proportions with each width divided."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import gcd

from transformers import PretrainedConfig, PreTrainedModel

from lab.decoder import head_dim_of
from lab.errors import ModelError
from lab.models import ModelLike, config_of
from lab.techniques.rope import check_rope
from lab.units import check_counts

BYTES = 256
"""The smallest vocabulary: without a tokenizer a text's bytes are its tokens."""


def shrunken(model: ModelLike, *, head_dim: int = 8, layers: int = 4) -> PretrainedConfig:
    """The config of a small copy of ``model``, to be used wherever a model is: ``lab.run(shrunken(...))``.

    Kept as they are: the H query and K key/value heads, so that every Ulysses degree, head chunk and refusal
    is the model's own; the family, tied heads, biases, norms of heads, the rope type.

    Divided by one whole number: D, E and the MLP's width, in exact proportion. The number is the largest that
    divides all three (E/H too, where that is whole) and leaves D even and no smaller than ``head_dim``. V is
    divided by it too, rounded down and never below 256: V/E is exact where the number divides V.

    Cut: the L layers to the first ``layers``, for they are alike. So the embedding and the head, which every
    model has once, weigh more in the copy than in the model.

    Raises:
        ModelError: no such model, a size that is not 1 or more, or widths that have no divisor in common.
        RecipeError: a model that the techniques refuse. A copy of fewer layers may lack what is refused.
    """
    check_counts({"head_dim": head_dim, "layers": layers}, ModelError)
    small = copy.deepcopy(config_of(model))
    check_rope(small)
    own, E, H = head_dim_of(small), small.hidden_size, small.num_attention_heads
    # Some families take a hidden state only where it can be cut into as many parts as there are heads.
    common = gcd(own, E // H if E % H == 0 else E, small.intermediate_size)
    by = max((n for n in range(1, common + 1) if common % n == 0 and _fits(own // n, head_dim)), default=1)
    if by == 1 and own >= 2 * head_dim:
        raise ModelError(
            f"head_dim {own}, hidden_size {E} and intermediate_size {small.intermediate_size} have no "
            f"divisor that leaves heads of {head_dim} or more: give a smaller head_dim"
        )
    small.hidden_size //= by
    small.intermediate_size //= by
    small.vocab_size = max(small.vocab_size // by, min(small.vocab_size, BYTES))
    if getattr(small, "head_dim", None) is not None:
        small.head_dim = own // by
    _cut(small, layers)
    # An embedding makes room for the padding token, wherever it is.
    if (getattr(small, "pad_token_id", None) or 0) >= small.vocab_size:
        small.pad_token_id = None
    return small


def first_layers(model: ModelLike, layers: int | None, *, config: PretrainedConfig) -> ModelLike:
    """The model with its first ``layers`` layers alone; with None it is itself.

    ``config`` is the model's, which the caller has: of a callable, to look it up makes a model. Weights of a
    directory are left behind, for they are of the whole.

    Raises:
        ModelError: not a whole number between 1 and its layers.
    """
    has = config.num_hidden_layers
    if layers is None or layers == has:
        return model
    if type(layers) is not int or not 1 <= layers < has:
        raise ModelError(f"layers={layers!r}: the model has {has}; it takes a whole number from 1 to {has}")
    if callable(model) and not isinstance(model, PretrainedConfig):
        return partial(_called_and_cut, model, layers)
    small = copy.deepcopy(config)
    _cut(small, layers)
    return small


def _called_and_cut(model: Callable[[], PreTrainedModel], layers: int) -> PreTrainedModel:
    made = model()
    del made.model.layers[layers:]
    _cut(made.config, layers)
    return made


def _cut(config: PretrainedConfig, layers: int) -> None:
    config.num_hidden_layers = min(config.num_hidden_layers, layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]


def _fits(dim: int, least: int) -> bool:
    """Rotary positions turn a head's halves against each other."""
    return dim >= least and dim % 2 == 0
