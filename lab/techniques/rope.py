"""Rotary positions that are exact beyond a million tokens: inverse frequencies and angles in fp64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from lab.decoder import Patch, Rotation, decoder_of, head_dim_of
from lab.errors import RecipeError
from lab.torch_private import FakeTensor

Frequencies: TypeAlias = tuple[list[float], float]
"""Inverse frequencies in radians per position, and the factor by which cosines and sines are multiplied."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The values of ``rope_type`` in a config for which this file computes frequencies."""


def apply_rope(model: nn.Module) -> None:
    """Make the model's rotary embedding compute cosines and sines in fp64, for this rank's positions only.

    The embedding takes x (for its dtype) and ``position_ids`` [b, s] or [1, s], and returns cosines and sines
    [b, s, R] or [1, s, R] in the dtype of x; R/2 in place of R in a family with ``half_tables``. It takes the
    type of a layer too, if the layers of each type have frequencies of their own. At position 5,242,880,
    angles are up to 5e6 radians. Computed in fp32, they have cosines with errors up to 0.256 (published). The
    module's own buffer of inverse frequencies is fp32 and causes errors of 0.217 even if the angles are fp64,
    so it is not used.

    Letters: b rows, S tokens, s tokens of one rank, R rotated dimensions of a head, w bytes per element.

    Saves:
        The tables of the whole context: 2*s*R*w bytes instead of 2*S*R*w, for each type of layers that has
        frequencies of its own.
    Costs:
        12*s*R bytes while the tables are computed, before the first layer.
    Source:
        RoFormer (arXiv 2104.09864), section 3.4.2; YaRN (arXiv 2309.00071), sections 3.2 to 3.4.
    Composes with:
        Everything. It runs once per step, and uses the positions that the caller passes.

    Raises:
        ModelError: See ``decoder_of``.
        RecipeError: The rope type is not one of ``ROPE_TYPES``, or the module's frequencies are not those of
            its config.
    """
    decoder = decoder_of(model)
    rotary: Any = decoder.rotary
    halves = 1 if decoder.layers[0].rotation == "half_tables" else 2
    frequencies = check_rope(rotary.config)
    for layer_type, of_type in frequencies.items():
        _check_frequencies(rotary, layer_type, *of_type)
    rotary.forward = Patch(partial(_tables_of_type, frequencies, halves), rotary.forward)


def _tables_of_type(
    frequencies: Mapping[str | None, Frequencies],
    halves: int,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> tuple[Tensor, Tensor]:
    inverse, factor = frequencies[layer_type]
    return rotary_tables(x, position_ids, frequencies=inverse, factor=factor, halves=halves)


def _check_frequencies(rotary: Any, layer_type: str | None, frequencies: list[float], factor: float) -> None:
    """Refuse a rotary embedding whose frequencies are not those of its config.

    Raises:
        RecipeError: The config or the module was changed after the module was made.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    own: Tensor = getattr(rotary, f"{prefix}inv_freq")
    if own.is_meta or isinstance(own, FakeTensor):
        return
    expected = torch.tensor(frequencies, dtype=own.dtype, device=own.device)
    same = own.shape == expected.shape and torch.allclose(
        own, expected, rtol=1e-2 if own.itemsize < 4 else 1e-4
    )
    if not same or not math.isclose(getattr(rotary, f"{prefix}attention_scaling"), factor, rel_tol=1e-6):
        raise RecipeError(
            "the rotary embedding has other frequencies than config.rope_parameters gives: set the config "
            "before the model is made"
        )


def check_rope(config: PretrainedConfig) -> dict[str | None, Frequencies]:
    """Check the rotary settings of a config, and return its ``inverse_frequencies``.

    Returns:
        They are by the type of the layer, if ``rope_parameters`` has parameters for each type in
        ``layer_types``. Otherwise they are those of all layers, under None.

    Raises:
        RecipeError: See ``inverse_frequencies``; or a type of layers has no parameters.
    """
    parameters, types = config.rope_parameters, sorted(set(getattr(config, "layer_types", None) or ()))
    by_type: dict[str | None, Any] = {None: parameters}
    # transformers has parameters by the type of the layer in families that rotate the types differently.
    if isinstance(parameters, Mapping) and any(isinstance(p, Mapping) for p in parameters.values()):
        missing = [kind for kind in types if not isinstance(parameters.get(kind), Mapping)]
        if missing or not types:
            raise RecipeError(
                f"rope_parameters for {', '.join(map(str, parameters))}, and none for layers of the type "
                f"{', '.join(missing) or 'of this model'}: give those that the model was trained with"
            )
        by_type = {kind: parameters[kind] for kind in types}
    return {
        kind: inverse_frequencies(of_type, head_dim_of(config), max_positions=config.max_position_embeddings)
        for kind, of_type in by_type.items()
    }


def inverse_frequencies(
    parameters: Mapping[str, Any], head_dim: int, *, max_positions: int | None = None
) -> tuple[list[float], float]:
    """Compute the inverse frequencies of a config's rotary settings.

    Args:
        parameters: ``config.rope_parameters``.
        head_dim: D.
        max_positions: ``config.max_position_embeddings``. YaRN computes its factor from it, if the parameters
            have none.

    Returns:
        The R/2 inverse frequencies, where R is D times ``partial_rotary_factor``, and the factor by which
        cosines and sines are multiplied. They are Python floats, which are fp64 and belong to no device and
        to no fake mode.

    Raises:
        RecipeError: The rope type is not one of ``ROPE_TYPES``; or a parameter is missing or unusable.
    """
    rope_type = parameters.get("rope_type", "default")
    try:
        frequencies, factor = _frequencies(rope_type, parameters, head_dim, max_positions)
        # A negative base has complex powers, and comparing them raises TypeError.
        if not all(0 < number < math.inf for number in (factor, *frequencies)):
            raise ValueError("a frequency is not above 0, or not finite")
        return frequencies, factor
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(
            f"rope_parameters with which no angle can be computed ({type(error).__name__}: {error}): "
            f"{dict(parameters)}; give those that the model was trained with"
        ) from error


def _frequencies(
    rope_type: str, parameters: Mapping[str, Any], head_dim: int, max_positions: int | None
) -> tuple[list[float], float]:
    if rope_type not in ROPE_TYPES or "rope_theta" not in parameters:
        raise RecipeError(f"rope_type={rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
    part = parameters.get("partial_rotary_factor", 1.0)
    rotated = int(head_dim * part)
    if not 0 < part <= 1 or rotated % 2 or not rotated:
        raise RecipeError(
            f"partial_rotary_factor={part} of a head_dim of {head_dim}: an even number of dimensions, from 2 "
            "to all, can be rotated"
        )
    if part != 1 and rope_type == "yarn":
        raise RecipeError(f"rope_type='yarn' with partial_rotary_factor={part}: only 1.0 is supported")
    plain = [parameters["rope_theta"] ** (-2 * i / rotated) for i in range(rotated // 2)]
    if rope_type == "linear":
        return [f / parameters["factor"] for f in plain], 1.0
    if rope_type == "llama3":
        return [_llama3_frequency(f, parameters) for f in plain], 1.0
    if rope_type == "yarn":
        return _yarn_frequencies(plain, parameters, head_dim, max_positions)
    return plain, 1.0


def _llama3_frequency(frequency: float, p: Mapping[str, Any]) -> float:
    """Return the frequency of Llama 3: low ones are divided by ``factor``, high ones do not change.

    A frequency between the two limits becomes a weighted mean of both.
    """
    turns = p["original_max_position_embeddings"] * frequency / (2 * math.pi)
    weight = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    weight = min(max(weight, 0.0), 1.0)
    return float(frequency * (weight + (1 - weight) / p["factor"]))


def _yarn_frequencies(
    plain: list[float], p: Mapping[str, Any], head_dim: int, max_positions: int | None
) -> tuple[list[float], float]:
    """Return YaRN's frequencies (section 3.2) and its factor of cosines and sines (section 3.4).

    The first pairs of dimensions keep their frequencies, those of the last pairs are divided by ``factor``,
    and the part that is divided grows linearly in between.
    """
    trained_tokens = p["original_max_position_embeddings"]
    factor = p.get("factor") or (max_positions or trained_tokens) / trained_tokens

    def pair(turns: float) -> float:
        """Return the index, a real number, of the pair with so many turns in the context of the training."""
        return head_dim * math.log(trained_tokens / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    first, last = pair(p.get("beta_fast") or 32), pair(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    frequencies = []
    for i, frequency in enumerate(plain):
        weight = min(max((i - first) / (last - first), 0.0), 1.0)
        frequencies.append(frequency * ((1 - weight) + weight / factor))

    def temperature(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scaling = p.get("attention_factor")
    if scaling is None:
        mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
        scaling = temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature()
    return frequencies, float(scaling)


@torch.no_grad()
def rotary_tables(
    x: Tensor, position_ids: Tensor, *, frequencies: list[float], factor: float = 1.0, halves: int = 2
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of all positions, in fp64, and round them once.

    Args:
        x: A tensor of the dtype of the results.
        position_ids: [b, s].
        frequencies: The R/2 inverse frequencies, in radians per position.
        factor: Multiplies the cosines and sines.
        halves: How often the R/2 numbers of each token are repeated: 2 or 1.

    Returns:
        Cosines and sines, each [b, s, R] in the dtype of ``x``. Both halves of R are equal. With one half,
        [b, s, R/2].
    """
    inverse = torch.tensor(frequencies, dtype=torch.float64, device=position_ids.device)
    angles = position_ids[..., None] * inverse
    shape = (*position_ids.shape, halves, len(frequencies))
    cos, sin = (x.new_empty(shape, device=position_ids.device) for _ in range(2))
    cos.copy_((angles.cos() * factor)[..., None, :])
    sin.copy_(angles.sin_().mul_(factor)[..., None, :])
    return cos.flatten(-2), sin.flatten(-2)


def rotate_(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotation: Rotation = "halves",
    transposed: bool = False,
    scratch: Tensor | None = None,
) -> Tensor:
    """Rotate the first R dimensions of every head of ``x`` in place.

    A pair (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin). Dimensions i and i + R/2 form a pair, as in
    ``rotate_half`` of most families of transformers; interleaved, dimensions 2i and 2i+1.

    Args:
        x: [..., b, s, h, D], with h heads.
        cos: Cosines, [b, s, R] or [1, s, R]. Both halves of R are equal. With the rotation "half_tables" they
            have one half.
        sin: Sines, like ``cos``.
        rotation: The pairs; "none" leaves ``x`` as it is.
        transposed: Multiply by the transposed matrix, as a gradient needs. If the tables have YaRN's factor,
            this is not the inverse rotation.
        scratch: Temporary memory of at least x.numel() / 2 elements: a flat tensor of the dtype of ``x``. By
            default it is allocated.

    Returns:
        ``x``.
    """
    if rotation == "none":
        return x
    half = cos.shape[-1] if rotation == "half_tables" else cos.shape[-1] // 2
    rotated = x[..., : 2 * half]
    pairs = rotated.unflatten(-1, (half, 2) if rotation == "interleaved" else (2, half))
    first, second = pairs.unbind(-1 if rotation == "interleaved" else -2)
    cos, sin = cos[..., None, :half], sin[..., None, :half]
    sign = -1 if transposed else 1
    if scratch is None:
        scratch = x.new_empty(x.numel() // 2)
    crossed = torch.mul(first, sin, out=scratch[: first.numel()].view(first.shape))
    first.mul_(cos).addcmul_(second, sin, value=-sign)
    second.mul_(cos).add_(crossed, alpha=sign)
    return x
