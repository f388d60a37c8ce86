"""Rotary positions that are exact beyond a million tokens: inverse frequencies and angles in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.decoder import Patch, Rotation, decoder_of
from lab.errors import RecipeError
from lab.techniques.frequencies import Frequencies, check_rope
from lab.techniques.ulysses_degrees import token_multiple
from lab.torch_private import FakeTensor


def apply_rope(model: nn.Module, *, ulysses: int = 1, ring: int = 1) -> None:
    """Make the model's rotary embedding compute cosines and sines in fp64, for this rank's positions only.

    The embedding takes x (for its dtype) and ``position_ids`` [b, s] or [1, s], and returns cosines and sines
    [b, s, R] or [1, s, R] in the dtype of x; R/2 in place of R in a family with ``half_tables``. It takes the
    type of a layer too, if the layers of each type have frequencies of their own. The frequencies of LongRoPE
    and of dynamic NTK scaling depend on the length of the whole sequence, which is sharded by the degrees
    ``ulysses`` and ``ring``; see ``RotaryForward``.

    At position 5,242,880, angles are up to 5e6 radians. Computed in fp32, they have cosines with errors up to
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
            config; or it has computed those of a long sequence, of dynamic NTK scaling, before.
    """
    decoder = decoder_of(model)
    rotary: Any = decoder.rotary
    # All layers that rotate do it alike.
    rotations: list[Rotation] = [*(one.rotation for one in decoder.layers if one.rotation != "none"), "none"]
    frequencies = check_rope(rotary.config)
    for layer_type, of_type in frequencies.items():
        _check_frequencies(rotary, layer_type, of_type)
    rotary.forward = RotaryForward(
        rotary.forward, frequencies, rotation=rotations[0], ulysses=ulysses, ring=ring
    )


class RotaryForward(Patch):
    """The forward of a rotary embedding; see ``apply_rope``.

    Frequencies may depend on S, the tokens of a row. A rank has the positions of its own tokens alone, and
    these may include padding that the lab added. So the caller of the model says S, by ``rows_of``.

    transformers gives a row with dynamic NTK scaling the frequencies of the longest row since the last one of
    fewer than ``max_position_embeddings`` tokens. So rows of that many tokens or more must have one length,
    and then their frequencies do not depend on the rows before them.

    Attributes:
        frequencies: The frequencies of each type of layers, as ``check_rope`` returns them.
        tokens: S in the present call of the model; None if its caller does not say.
        least: Rows of so many tokens or more must have one length; None if rows of all lengths may differ.
        length: The one length; None before the first such row.
    """

    def __init__(
        self,
        replaced: Callable[..., Any],
        frequencies: dict[str | None, Frequencies],
        *,
        rotation: Rotation,
        ulysses: int,
        ring: int,
    ) -> None:
        super().__init__(self._tables, replaced)
        self.frequencies = frequencies
        self.tokens: int | None = None
        limits = [one.limit for one in frequencies.values() if one.rope_type == "dynamic"]
        self.least: int | None = limits[0] if limits else None
        self.length: int | None = None
        self._rotation: Rotation = rotation
        self._ranks, self._multiple = ulysses * ring, token_multiple(ulysses, ring)

    @property
    def type_by_length(self) -> str | None:
        """The rope type whose frequencies depend on S; None if those of no layer do."""
        types = (one.rope_type for one in self.frequencies.values() if one.limit is not None)
        return next(types, None)

    @contextmanager
    def rows_of(self, tokens: int | None) -> Iterator[None]:
        """Say S for the calls of the model in this block."""
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None

    def check_length(self, tokens: int) -> None:
        """Refuse rows of ``tokens`` tokens if transformers' frequencies would depend on the rows before them.

        Raises:
            RecipeError: They do.
        """
        if self.least is None or tokens < self.least:
            return
        if self.length is None:
            self.length = tokens
        if tokens != self.length:
            raise RecipeError(
                f"rows of {tokens} tokens and rows of {self.length} with rope_type='dynamic': in "
                f"transformers, a row of max_position_embeddings={self.least} tokens or more has the "
                "frequencies of the longest row before it; pad or cut all rows to one length, or to fewer "
                f"than {self.least} tokens; for another length, build the model again"
            )

    def _tables(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        of_type, padded = self.frequencies[layer_type], position_ids.shape[-1] * self._ranks
        tokens = self.tokens
        if tokens is None:
            tokens, least = padded, padded - self._multiple + 1
            if of_type.of(least) != of_type.of(padded):
                raise RecipeError(
                    f"rows of {least} to {padded} tokens, depending on how many are padding, with "
                    f"rope_type={of_type.rope_type!r}: the frequencies depend on the number without padding; "
                    "call lab.loss(model, lab.shard_batch(...)), or give the batch's padding"
                )
        self.check_length(tokens)
        return rotary_tables(
            x,
            position_ids,
            frequencies=of_type.of(tokens),
            factor=of_type.factor,
            rotation=self._rotation,
        )


def rotary_forward(model: nn.Module) -> RotaryForward:
    """Return the forward of the rotary embedding of a model to which ``apply_rope`` was applied."""
    inner: Any = model.model
    forward: RotaryForward = inner.rotary_emb.forward
    return forward


def check_lengths(model: nn.Module, tokens: int, group: dist.ProcessGroup) -> None:
    """Check the lengths of the rows of all ranks, which call this together; see ``RotaryForward``.

    Ranks that share no sequence may have rows of different lengths. All ranks check the same lengths, so that
    all of them raise the error.

    Costs: one exchange of a number, if there are lengths that are refused.

    Args:
        model: A model to which ``apply_rope`` was applied.
        tokens: S, the tokens of this rank's rows, without the padding that the lab adds.
        group: All ranks.

    Raises:
        RecipeError: See ``RotaryForward.check_length``.
    """
    rotary = rotary_forward(model)
    if rotary.least is None:
        return
    lengths = [tokens] * dist.get_world_size(group)
    dist.all_gather_object(lengths, tokens, group=group)
    for length in lengths:
        rotary.check_length(length)


def _check_frequencies(rotary: Any, layer_type: str | None, frequencies: Frequencies) -> None:
    """Refuse a rotary embedding whose frequencies are not those of its config.

    Raises:
        RecipeError: The config or the module was changed after the module was made; or the module has
            computed the frequencies of a long sequence, of dynamic NTK scaling.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    same_limit = True
    if frequencies.rope_type == "dynamic":
        same_limit = rotary.original_max_seq_len == frequencies.limit
        longest = int(getattr(rotary, f"{prefix}max_seq_len_cached", rotary.max_seq_len_cached))
        if same_limit and longest != frequencies.limit:
            raise RecipeError(
                f"a model with rope_type='dynamic' that has computed a row of {longest} tokens, where "
                f"max_position_embeddings={frequencies.limit}: in transformers, the rows after it would have "
                "its frequencies; build the model again, and apply the recipe before any forward"
            )
    # transformers writes those of the last sequence into inv_freq.
    own: Tensor = getattr(rotary, f"{prefix}original_inv_freq")
    same = own.is_meta or isinstance(own, FakeTensor)
    if not same:
        expected = torch.tensor(frequencies.inverse, dtype=own.dtype, device=own.device)
        # Those of the last row are other ones, by design, if they depend on its length.
        used = own if frequencies.limit is not None else getattr(rotary, f"{prefix}inv_freq")
        same = all(
            one.shape == expected.shape
            and torch.allclose(one, expected, rtol=1e-2 if one.itemsize < 4 else 1e-4)
            for one in (own, used)
        )
        scaling: float = getattr(rotary, f"{prefix}attention_scaling")
        same = same and math.isclose(scaling, frequencies.factor, rel_tol=1e-6)
    if not (same and same_limit):
        raise RecipeError(
            "the rotary embedding has other frequencies than config.rope_parameters gives: set the config "
            "before the model is made"
        )


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
