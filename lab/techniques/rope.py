"""Rotary positions that stay exact past a million tokens: inverse frequencies and angles in fp64."""

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


def apply_rope(model: nn.Module) -> None:
    """Let a model's rotary embedding compute in fp64, from rope_theta, for the given positions only.

    x (for its dtype), position_ids [b, s] -> cos, sin [b, s, D] in x's dtype; the b of ``position_ids`` may
    be 1. At position 5,242,880 an angle is up to 5e6 radians: in fp32 its error is a quarter of a turn's
    cosine (0.256 published), and even fp64 angles from the module's fp32 buffer of inverse frequencies are
    off by 0.217, so the buffer is not used.

    Saves: nothing is kept for the whole context: 2*s*D*w bytes of tables, not 2*S*D*w.
    Costs: 12*s*D bytes while the tables are made, before the first layer.
    Source: RoFormer (arXiv 2104.09864), section 3.4.2; YaRN (arXiv 2309.00071), sections 3.2 to 3.4.
    Composes with everything: it runs once a step, and positions are what the caller says they are.

    Raises:
        ModelError: see ``decoder_of``.
        RecipeError: a rope type without a form for all positions, or one that rotates a part of each head.
    """
    rotary: Any = decoder_of(model).rotary
    frequencies, factor = check_rope(rotary.config)
    _check_unchanged(rotary, frequencies, factor)
    rotary.forward = Patch(partial(tables, frequencies=frequencies, factor=factor), rotary.forward)


def _check_unchanged(rotary: Any, frequencies: list[float], factor: float) -> None:
    """Refuse a rotary embedding that computes with other frequencies than its config says.

    Raises:
        RecipeError: the config or the module was changed after it was made.
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
    """``inverse_frequencies`` of a model's config.

    Raises:
        RecipeError: see ``apply_rope``.
    """
    return inverse_frequencies(
        config.rope_parameters, head_dim_of(config), max_positions=config.max_position_embeddings
    )


def inverse_frequencies(
    parameters: Mapping[str, Any], head_dim: int, *, max_positions: int | None = None
) -> tuple[list[float], float]:
    """The D/2 inverse frequencies of ``config.rope_parameters``, and what cos and sin are multiplied with.

    Python floats are fp64, and a list of them belongs to no device and to no fake mode. ``max_positions`` is
    the config's ``max_position_embeddings``, from which yarn without a factor takes one.

    Raises:
        RecipeError: see ``apply_rope``.
    """
    kind = parameters.get("rope_type", "default")
    try:
        return _frequencies(kind, parameters, head_dim, max_positions)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(
            f"rope_parameters with which no angle can be computed ({type(error).__name__}: {error}): "
            f"{dict(parameters)}; give those that the model was trained with"
        ) from error


def _frequencies(
    kind: str, parameters: Mapping[str, Any], head_dim: int, max_positions: int | None
) -> tuple[list[float], float]:
    if kind not in ROPE_TYPES or "rope_theta" not in parameters:
        raise RecipeError(
            f"rope_type={kind!r} is not one of {', '.join(ROPE_TYPES)}, the same in every layer"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise RecipeError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']}: whole heads are rotated; 1.0 works"
        )
    plain = [parameters["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "linear":
        return [f / parameters["factor"] for f in plain], 1.0
    if kind == "llama3":
        return [_llama3(f, parameters) for f in plain], 1.0
    if kind == "yarn":
        return _yarn(plain, parameters, head_dim, max_positions)
    return plain, 1.0


def _llama3(frequency: float, p: Mapping[str, Any]) -> float:
    """Long waves are slowed by ``factor``, short ones kept, those between are a blend of both."""
    turns = p["original_max_position_embeddings"] * frequency / (2 * math.pi)
    kept = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    kept = min(max(kept, 0.0), 1.0)
    return float(frequency * (kept + (1 - kept) / p["factor"]))


def _yarn(
    plain: list[float], p: Mapping[str, Any], head_dim: int, max_positions: int | None
) -> tuple[list[float], float]:
    """A ramp over the pairs of dimensions from kept to slowed by ``factor`` (YaRN, section 3.2)."""
    trained = p["original_max_position_embeddings"]
    factor = p.get("factor") or (max_positions or trained) / trained

    def pair(turns: float) -> float:
        """The pair of dimensions that turns this often within the trained context, as a real number."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    first, last = pair(p.get("beta_fast") or 32), pair(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    frequencies = []
    for i, frequency in enumerate(plain):
        slowed = min(max((i - first) / (last - first), 0.0), 1.0)
        frequencies.append(frequency * ((1 - slowed) + slowed / factor))

    def temperature(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scaling = p.get("attention_factor")
    if scaling is None:
        mscale, every = p.get("mscale"), p.get("mscale_all_dim")
        scaling = temperature(mscale) / temperature(every) if mscale and every else temperature()
    return frequencies, float(scaling)


@torch.no_grad()
def tables(
    x: Tensor, position_ids: Tensor, *, frequencies: list[float], factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``position_ids`` [b, s]: twice [b, s, D] in the dtype of ``x``.

    Both halves of D are alike. Angles, cos and sin are fp64, and rounded once, at the end.
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
    """Rotate every head of ``x`` [..., b, s, h, D] in place by ``cos, sin`` [b or 1, s, D]; returns ``x``.

    Dimension i turns with i + D/2, as transformers' ``rotate_half`` has it: (x1, x2) -> (x1 cos - x2 sin,
    x2 cos + x1 sin). ``transposed`` applies the transpose, which is what a gradient needs (with yarn's factor
    in the tables it is not the inverse).

    Takes x.numel() / 2 elements while it runs, in ``scratch`` if that is given: a flat tensor of x's dtype.
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
