"""Rotary positions that are exact beyond a million tokens: inverse frequencies and angles in fp64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from lab.decoder import Patch, Rotation, decoder_of, head_dim_of
from lab.errors import RecipeError
from lab.techniques.ring import token_multiple
from lab.torch_private import FakeTensor


class Frequencies(NamedTuple):
    """The angles of a config's rotary settings.

    Attributes:
        inverse: The R/2 inverse frequencies, in radians per position.
        factor: Multiplies the cosines and sines.
        limit: The most tokens of a sequence with these frequencies; None if there is no limit.
        beyond: The inverse frequencies of longer sequences.
    """

    inverse: list[float]
    factor: float = 1.0
    limit: int | None = None
    beyond: list[float] | None = None

    def of(self, tokens: int) -> list[float]:
        """Return the inverse frequencies of a sequence of so many tokens."""
        if self.limit is None or self.beyond is None or tokens <= self.limit:
            return self.inverse
        return self.beyond


ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
"""The values of ``rope_type`` in a config for which this file computes frequencies."""


def apply_rope(model: nn.Module, *, ulysses: int = 1, ring: int = 1) -> None:
    """Make the model's rotary embedding compute cosines and sines in fp64, for this rank's positions only.

    The embedding takes x (for its dtype) and ``position_ids`` [b, s] or [1, s], and returns cosines and sines
    [b, s, R] or [1, s, R] in the dtype of x; R/2 in place of R in a family with ``half_tables``. It takes the
    type of a layer too, if the layers of each type have frequencies of their own. The frequencies of LongRoPE
    depend on the length of the whole sequence, which is sharded by the degrees ``ulysses`` and ``ring``. At
    position 5,242,880, angles are up to 5e6 radians. Computed in fp32, they have cosines with errors up to
    0.256 (published). The module's own buffer of inverse frequencies is fp32 and causes errors of 0.217 even
    if the angles are fp64, so it is not used.

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
        RecipeError: The rope type is not one of ``ROPE_TYPES``; the module's frequencies are not those of its
            config; or the rows are padded to a length that may have other frequencies than theirs.
    """
    decoder, ranks = decoder_of(model), ulysses * ring
    rotary: Any = decoder.rotary
    # All layers that rotate do it alike.
    rotations: list[Rotation] = [*(one.rotation for one in decoder.layers if one.rotation != "none"), "none"]
    frequencies = check_rope(rotary.config)
    for layer_type, of_type in frequencies.items():
        _check_frequencies(rotary, layer_type, of_type)
        multiple = token_multiple(ulysses, ring)
        if of_type.limit is not None and of_type.limit % multiple:
            raise RecipeError(
                f"ulysses={ulysses}, ring={ring} with rope_type='longrope': rows are padded to a multiple of "
                f"{multiple} tokens, which may be on the other side of "
                f"original_max_position_embeddings={of_type.limit}; choose degrees whose multiple divides it"
            )

    def tables(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        of_type = frequencies[layer_type]
        inverse = of_type.of(position_ids.shape[-1] * ranks)
        return rotary_tables(
            x, position_ids, frequencies=inverse, factor=of_type.factor, rotation=rotations[0]
        )

    rotary.forward = Patch(tables, rotary.forward)


def _check_frequencies(rotary: Any, layer_type: str | None, frequencies: Frequencies) -> None:
    """Refuse a rotary embedding whose frequencies are not those of its config.

    Raises:
        RecipeError: The config or the module was changed after the module was made.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    # transformers writes those of the last sequence into inv_freq.
    own: Tensor = getattr(rotary, f"{prefix}original_inv_freq")
    if own.is_meta or isinstance(own, FakeTensor):
        return
    expected = torch.tensor(frequencies.inverse, dtype=own.dtype, device=own.device)
    same = own.shape == expected.shape and torch.allclose(
        own, expected, rtol=1e-2 if own.itemsize < 4 else 1e-4
    )
    scaling: float = getattr(rotary, f"{prefix}attention_scaling")
    if not same or not math.isclose(scaling, frequencies.factor, rel_tol=1e-6):
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
) -> Frequencies:
    """Compute the inverse frequencies of a config's rotary settings.

    Args:
        parameters: ``config.rope_parameters``.
        head_dim: D.
        max_positions: ``config.max_position_embeddings``. YaRN and LongRoPE compute their factor from it, if
            the parameters have none.

    Returns:
        The frequencies, of D times ``partial_rotary_factor`` dimensions. They are Python floats, which are
        fp64 and belong to no device and to no fake mode.

    Raises:
        RecipeError: The rope type is not one of ``ROPE_TYPES``; or a parameter is missing or unusable.
    """
    rope_type = parameters.get("rope_type", "default")
    try:
        found = _frequencies(rope_type, parameters, head_dim, max_positions)
        # A negative base has complex powers, and comparing them raises TypeError.
        if not all(0 < number < math.inf for number in (found.factor, *found.inverse, *(found.beyond or ()))):
            raise ValueError("a frequency is not above 0, or not finite")
        return found
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(
            f"rope_parameters with which no angle can be computed ({type(error).__name__}: {error}): "
            f"{dict(parameters)}; give those that the model was trained with"
        ) from error


def _frequencies(
    rope_type: str, parameters: Mapping[str, Any], head_dim: int, max_positions: int | None
) -> Frequencies:
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
        return Frequencies([f / parameters["factor"] for f in plain])
    if rope_type == "llama3":
        return Frequencies([_llama3_frequency(f, parameters) for f in plain])
    if rope_type == "yarn":
        return _yarn_frequencies(plain, parameters, head_dim, max_positions)
    if rope_type == "longrope":
        return _longrope_frequencies(plain, parameters, max_positions)
    return Frequencies(plain)


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
) -> Frequencies:
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
    return Frequencies(frequencies, float(scaling))


def _longrope_frequencies(plain: list[float], p: Mapping[str, Any], max_positions: int | None) -> Frequencies:
    """Return the frequencies of LongRoPE (arXiv 2402.13753), section 3.

    Each frequency is divided by a number of its own. Sequences of more tokens than the model was trained with
    at first have other numbers. The factor of cosines and sines is the same for both.
    """
    limit = p["original_max_position_embeddings"]
    factor, scaling = p.get("factor"), p.get("attention_factor")
    if factor is None:
        factor = (max_positions or limit) / limit
    if scaling is None:
        scaling = math.sqrt(1 + math.log(factor) / math.log(limit)) if factor > 1 else 1.0
    short, long = (
        [frequency / divisor for frequency, divisor in zip(plain, p[name], strict=True)]
        for name in ("short_factor", "long_factor")
    )
    return Frequencies(short, float(scaling), int(limit), long)


@torch.no_grad()
def rotary_tables(
    x: Tensor,
    position_ids: Tensor,
    *,
    frequencies: list[float],
    factor: float = 1.0,
    rotation: Rotation = "halves",
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of all positions, in fp64, and round them once.

    Args:
        x: A tensor of the dtype of the results.
        position_ids: [b, s].
        frequencies: The R/2 inverse frequencies, in radians per position.
        factor: Multiplies the cosines and sines.
        rotation: What the tables are for, which decides how they repeat the R/2 numbers of each token.

    Returns:
        Cosines and sines, each [b, s, R] in the dtype of ``x``. Both halves of R are equal; with
        "interleaved_tables", both dimensions of each pair. With "half_tables", [b, s, R/2].
    """
    inverse = torch.tensor(frequencies, dtype=torch.float64, device=position_ids.device)
    repeated = -1 if rotation == "interleaved_tables" else -2
    angles = (position_ids[..., None] * inverse).unsqueeze(repeated)
    shape = list(angles.shape)
    shape[repeated] = 1 if rotation == "half_tables" else 2
    cos, sin = (x.new_empty(shape, device=position_ids.device) for _ in range(2))
    cos.copy_(angles.cos() * factor)
    sin.copy_(angles.sin_().mul_(factor))
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
        cos: Cosines, [b, s, R] or [1, s, R], as ``rotary_tables`` makes them for this rotation.
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
    interleaved = rotation in ("interleaved", "interleaved_tables")
    pairs = rotated.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    one = slice(None, None, 2) if rotation == "interleaved_tables" else slice(half)
    cos, sin = cos[..., None, one], sin[..., None, one]
    sign = -1 if transposed else 1
    if scratch is None:
        scratch = x.new_empty(x.numel() // 2)
    crossed = torch.mul(first, sin, out=scratch[: first.numel()].view(first.shape))
    first.mul_(cos).addcmul_(second, sin, value=-sign)
    second.mul_(cos).add_(crossed, alpha=sign)
    return x
