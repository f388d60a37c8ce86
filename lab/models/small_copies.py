"""Smaller copies of a model: its first layers alone, or every width divided by one number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import gcd

from transformers import PretrainedConfig, PreTrainedModel

from lab.decoder import FAMILIES, head_dim_of, keep_layers
from lab.errors import ModelError
from lab.models import ModelLike, config_of
from lab.techniques.frequencies import check_rope
from lab.units import check_counts

BYTES = 256
"""The smallest vocabulary: without a tokenizer, the bytes of a text are its tokens."""


def small_copy(model: ModelLike, *, head_dim: int = 8, layers: int = 4) -> PretrainedConfig:
    """Return the config of a small copy of a model; use it as any model: ``lab.run(small_copy(...))``.

    Unchanged: the H query and K key/value heads, so that the copy allows the same Ulysses degrees and head
    chunks as the model; the family, tied heads, biases, norms of heads, the rope type, and the numbers of
    experts.

    Divided by one whole number: the head_dim D, the hidden size E and the widths of the MLP and of an expert,
    so that their ratios are exact. The number is the largest that divides all of them (and E/H, where that is
    whole, unless the family needs no such E and this leaves only 1) and leaves D even and at least
    ``head_dim``. The vocabulary V is divided by it too, rounded down, but not to less than 256. A window is
    not divided.

    Cut: the layers, to the first ``layers``. So the embedding and the head, which a model has once, are a
    larger part of the copy than of the model. If layers differ, a kind of layer may be missing in the copy:
    the first four layers of ``gemma3-27b`` all have a window.

    Raises:
        ModelError: The model is unknown; a size is not 1 or more; or the widths have no common divisor.
        RecipeError: The rope type of the model has no exact angles.
    """
    check_counts({"head_dim": head_dim, "layers": layers}, ModelError)
    small = copy.deepcopy(config_of(model))
    check_rope(small)
    own, E, H = head_dim_of(small), small.hidden_size, small.num_attention_heads
    # Some families need a hidden size that the number of heads divides: their config classes check it.
    free = own == getattr(small, "head_dim", None)
    free &= type(small).validate_architecture is PretrainedConfig.validate_architecture
    fields = dict.fromkeys(("intermediate_size", FAMILIES[small.model_type].expert_width))
    widths: dict[str, int] = {name: getattr(small, name) for name in fields if name is not None}
    by = _divisor(own, (E // H if E % H == 0 else E, *widths.values()), head_dim)
    if by == 1 and free:
        by = _divisor(own, (E, *widths.values()), head_dim)
    if by == 1 and own >= 2 * head_dim:
        *first, last = {"head_dim": own, "hidden_size": E, **widths}.items()
        raise ModelError(
            f"{', '.join(f'{name} {size}' for name, size in first)} and {last[0]} {last[1]} have no divisor "
            f"that leaves heads of {head_dim} or more: give a smaller head_dim"
        )
    small.hidden_size //= by
    for name, width in widths.items():
        setattr(small, name, width // by)
    small.vocab_size = max(small.vocab_size // by, min(small.vocab_size, BYTES))
    if getattr(small, "head_dim", None) is not None:
        small.head_dim = own // by
    # LongRoPE has a number for each frequency, of which the copy has fewer.
    for name in ("short_factor", "long_factor"):
        if name in small.rope_parameters:
            small.rope_parameters[name] = small.rope_parameters[name][::by]
    keep_layers(small, layers)
    # An embedding needs a row for the padding token.
    if (getattr(small, "pad_token_id", None) or 0) >= small.vocab_size:
        small.pad_token_id = None
    return small


def first_layers(model: ModelLike, layers: int | None, *, config: PretrainedConfig) -> ModelLike:
    """Return the model with its first ``layers`` layers alone. The weights of a directory are not used.

    Args:
        model: The model.
        layers: How many layers; None stands for all, and returns the model itself.
        config: The config of the model. It is an argument because the config of a callable costs a model.

    Raises:
        ModelError: ``layers`` is not a whole number between 1 and the model's layers.
    """
    whole = config.num_hidden_layers
    if layers is None or layers == whole:
        return model
    if type(layers) is not int or not 1 <= layers < whole:
        raise ModelError(f"layers={layers!r}: the model has {whole}; give a whole number from 1 to {whole}")
    if callable(model) and not isinstance(model, PretrainedConfig):
        return partial(_call_and_cut, model, layers)
    small = copy.deepcopy(config)
    keep_layers(small, layers)
    return small


def _call_and_cut(model: Callable[[], PreTrainedModel], layers: int) -> PreTrainedModel:
    result = model()
    del result.model.layers[layers:]
    keep_layers(result.config, layers)
    return result


def _divisor(own: int, others: tuple[int, ...], head_dim: int) -> int:
    """Return the largest divisor of all that leaves an even head_dim of at least ``head_dim``; or 1.

    Rotary embeddings need an even head_dim.
    """
    common = gcd(own, *others)
    divisors = (n for n in range(common, 1, -1) if common % n == 0)
    return next((n for n in divisors if own // n >= head_dim and own // n % 2 == 0), 1)
