"""Rotary positions that are exact beyond a million tokens: inverse frequencies and angles in fp64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from lab.decoder import Patch, decoder_of, head_dim_of
from lab.errors import RecipeError
from lab.torch_private import FakeTensor

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The values of ``rope_type`` in a config for which this file computes frequencies."""


def apply_rope(model: nn.Module) -> None:
    """Make the model's rotary embedding compute cosines and sines in fp64, for this rank's positions only.

    The embedding takes x (for its dtype) and ``position_ids`` [b, s] or [1, s], and returns cosines and sines
    [b, s, D] or [1, s, D] in the dtype of x. At position 5,242,880, angles are up to 5e6 radians. Computed in
    fp32, they have cosines with errors up to 0.256 (published). The module's own buffer of inverse
    frequencies is fp32 and causes errors of 0.217 even if the angles are fp64, so it is not used.

    Letters: b rows, S tokens, s tokens of one rank, D head_dim, w bytes per element.

    Saves:
        The tables of the whole context: 2*s*D*w bytes instead of 2*S*D*w.
    Costs:
        12*s*D bytes while the tables are computed, before the first layer.
    Source:
        RoFormer (arXiv 2104.09864), section 3.4.2; YaRN (arXiv 2309.00071), sections 3.2 to 3.4.
    Composes with:
        Everything. It runs once per step, and uses the positions that the caller passes.

    Raises:
        ModelError: See ``decoder_of``.
        RecipeError: The rope type is not one of ``ROPE_TYPES``, or rotates only a part of each head; or the
            module's frequencies are not those of its config.
    """
    rotary: Any = decoder_of(model).rotary
    frequencies, factor = check_rope(rotary.config)
    _check_frequencies(rotary, frequencies, factor)
    rotary.forward = Patch(partial(rotary_tables, frequencies=frequencies, factor=factor), rotary.forward)


def _check_frequencies(rotary: Any, frequencies: list[float], factor: float) -> None:
    """Refuse a rotary embedding whose frequencies are not those of its config.

    Raises:
        RecipeError: The config or the module was changed after the module was made.
    """
    own: Tensor = rotary.inv_freq
    if own.is_meta or isinstance(own, FakeTensor):
        return
    expected = torch.tensor(frequencies, dtype=own.dtype, device=own.device)
    same = own.shape == expected.shape and torch.allclose(
        own, expected, rtol=1e-2 if own.itemsize < 4 else 1e-4
    )
    if not same or not math.isclose(rotary.attention_scaling, factor, rel_tol=1e-6):
        raise RecipeError(
            "the rotary embedding has other frequencies than config.rope_parameters gives: set the config "
            "before the model is made"
        )


def check_rope(config: PretrainedConfig) -> tuple[list[float], float]:
    """Check the rotary settings of a config, and return its ``inverse_frequencies``.

    Raises:
        RecipeError: See ``inverse_frequencies``.
    """
    return inverse_frequencies(
        config.rope_parameters, head_dim_of(config), max_positions=config.max_position_embeddings
    )


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
        The D/2 inverse frequencies in radians per position, and the factor by which cosines and sines are
        multiplied. They are Python floats, which are fp64 and belong to no device and to no fake mode.

    Raises:
        RecipeError: The rope type is not one of ``ROPE_TYPES``, or rotates only a part of each head; or a
            parameter is missing or unusable.
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
        raise RecipeError(
            f"rope_type={rope_type!r} is not one of {', '.join(ROPE_TYPES)}, the same in every layer"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise RecipeError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']}: whole heads are rotated; 1.0 works"
        )
    plain = [parameters["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)]
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
    x: Tensor, position_ids: Tensor, *, frequencies: list[float], factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of all positions, in fp64, and round them once.

    Args:
        x: A tensor of the dtype of the results.
        position_ids: [b, s].
        frequencies: The D/2 inverse frequencies, in radians per position.
        factor: Multiplies the cosines and sines.

    Returns:
        Cosines and sines, each [b, s, D] in the dtype of ``x``. Both halves of D are equal.
    """
    inverse = torch.tensor(frequencies, dtype=torch.float64, device=position_ids.device)
    angles = position_ids[..., None] * inverse
    shape = (*position_ids.shape, 2, len(frequencies))
    cos, sin = (x.new_empty(shape, device=position_ids.device) for _ in range(2))
    cos.copy_((angles.cos() * factor)[..., None, :])
    sin.copy_(angles.sin_().mul_(factor)[..., None, :])
    return cos.flatten(-2), sin.flatten(-2)


def rotate_(
    x: Tensor, cos: Tensor, sin: Tensor, *, transposed: bool = False, scratch: Tensor | None = None
) -> Tensor:
    """Rotate every head of ``x`` in place.

    Dimensions i and i + D/2 form a pair, as in ``rotate_half`` of transformers:
    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

    Args:
        x: [..., b, s, h, D], with h heads.
        cos: Cosines, [b, s, D] or [1, s, D].
        sin: Sines, [b, s, D] or [1, s, D].
        transposed: Multiply by the transposed matrix, as a gradient needs. If the tables have YaRN's factor,
            this is not the inverse rotation.
        scratch: Temporary memory of at least x.numel() / 2 elements: a flat tensor of the dtype of ``x``. By
            default it is allocated.

    Returns:
        ``x``.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., None, :half], sin[..., None, :half]
    sign = -1 if transposed else 1
    if scratch is None:
        scratch = x.new_empty(x.numel() // 2)
    crossed = torch.mul(first, sin, out=scratch[: first.numel()].view(first.shape))
    first.mul_(cos).addcmul_(second, sin, value=-sign)
    second.mul_(cos).add_(crossed, alpha=sign)
    return x
