"""The inverse frequencies of rotary positions, of each rope type that the lab computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from lab.decoder import head_dim_of
from lab.errors import RecipeError


class Frequencies(NamedTuple):
    """The angles of a config's rotary settings.

    Attributes:
        inverse: The R/2 inverse frequencies, in radians per position.
        factor: Multiplies the cosines and sines.
        rope_type: The ``rope_type`` of the config.
        limit: The most tokens of a sequence with these frequencies; None if there is no limit.
        beyond: Computes the inverse frequencies of a longer sequence from the number of its tokens.
    """

    inverse: list[float]
    factor: float = 1.0
    rope_type: str = "default"
    limit: int | None = None
    beyond: Callable[[int], list[float]] | None = None

    def of(self, tokens: int) -> list[float]:
        """Return the inverse frequencies of a sequence of so many tokens."""
        if self.limit is None or self.beyond is None or tokens <= self.limit:
            return self.inverse
        return self.beyond(tokens)


ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
"""The values of ``rope_type`` in a config for which this file computes frequencies."""


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
            the parameters have none. With dynamic NTK scaling, longer sequences have other frequencies.

    Returns:
        The frequencies, of D times ``partial_rotary_factor`` dimensions. They are Python floats, which are
        fp64 and belong to no device and to no fake mode.

    Raises:
        RecipeError: The rope type is not one of ``ROPE_TYPES``; or a parameter is missing or unusable.
    """
    rope_type = parameters.get("rope_type", "default")
    try:
        found = _frequencies(rope_type, parameters, head_dim, max_positions)._replace(rope_type=rope_type)
        # A negative base has complex powers, and comparing them raises TypeError.
        longer = () if found.limit is None else found.of(found.limit + 1)
        if not all(0 < number < math.inf for number in (found.factor, *found.inverse, *longer)):
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
    if rope_type == "dynamic":
        return _dynamic_frequencies(plain, parameters, max_positions)
    return Frequencies(plain)


def _llama3_frequency(frequency: float, p: Mapping[str, Any]) -> float:
    """Return the frequency of Llama 3: low ones are divided by ``factor``, high ones do not change.

    A frequency between the two limits becomes a weighted mean of both.
    """
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    if not low < high:
        raise ValueError(f"high_freq_factor={high} is not above low_freq_factor={low}")
    turns = p["original_max_position_embeddings"] * frequency / (2 * math.pi)
    weight = (turns - low) / (high - low)
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
    factor = p.get("factor")
    if factor is None:
        factor = (max_positions or trained_tokens) / trained_tokens

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
    return Frequencies(short, float(scaling), limit=int(limit), beyond=lambda _: long)


def _dynamic_frequencies(plain: list[float], p: Mapping[str, Any], max_positions: int | None) -> Frequencies:
    """Return the frequencies of dynamic NTK scaling (arXiv 2309.00071, section 3.3).

    Sequences that are longer than those of the training have a larger base, which grows with their length S.
    The highest frequency stays, and the lowest is divided by 1 + ``factor`` * (S / ``max_positions`` - 1),
    where the paper has S / ``max_positions``.
    """
    factor, rotated = p["factor"], 2 * len(plain)
    if type(max_positions) is not int or max_positions < 1 or not factor > 0:
        raise ValueError(f"factor={factor} and max_position_embeddings={max_positions} are not above 0")
    power = rotated / (rotated - 2)

    def longer(tokens: int) -> list[float]:
        base = p["rope_theta"] * (factor * tokens / max_positions - (factor - 1)) ** power
        return [base ** (-2 * i / rotated) for i in range(rotated // 2)]

    return Frequencies(plain, limit=max_positions, beyond=longer)
