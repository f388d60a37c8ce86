"""Norms over all heads of q or of k together, for stages that compute a few heads at a time.

Such a norm divides the heads of a token by one root mean square. The number is computed once for each token,
from all heads, before the stages begin. OLMo 2 (arXiv 2501.00656), section 3.2, has such norms. Norms of each
head with scales of its own have the same backward, after the stages.

Letters: b rows, s tokens of one rank, E hidden size, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lab.techniques.parameter_aliases import parameter_aliases
from lab.techniques.slices import slices


def token_scales(
    norm: nn.Module,
    tiles: Iterator[tuple[int, Tensor]],
    weight: Tensor,
    bias: Tensor | None,
    *,
    shape: tuple[int, int],
    part: int,
) -> Tensor:
    """Return the factor by which a norm multiplies the heads of each token, [b, s, 1] in fp32.

    Args:
        norm: The norm, an RMSNorm of transformers.
        tiles: The first token of each tile, and the input of the projection for the tile, [b, t, E].
        weight: The weight of the projection, [H*D, E] or [K*D, E].
        bias: Its bias, or None.
        shape: b and s, of all tiles together.
        part: How many tokens are projected at once.
    """
    epsilon: Any = norm.variance_epsilon
    # Not joined of the tiles: a plan runs only a few of these.
    scales = weight.new_empty(*shape, 1, dtype=torch.float32)
    for first, x in tiles:
        for start, length in slices(x.shape[1], part):
            wide = linear(x.narrow(1, start, length), weight, bias).to(torch.float32)
            of_part = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
            scales.narrow(1, first + start, length).copy_(of_part)
            del wide, of_part
    return scales


def normalize_(heads: Tensor, scale: Tensor, weight: Tensor) -> None:
    """Normalize the heads of a stage in place, as the norm does all of them.

    Args:
        heads: [C, b, t, n, D].
        scale: The ``token_scales`` of these tokens, [b, t, 1].
        weight: The norm's weight for these heads, [C, 1, 1, n, D].
    """
    heads.copy_(weight * (heads.to(torch.float32) * scale[..., None]))


def backward_(
    norm: nn.Module,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    sums: list[Tensor],
    part: int,
) -> None:
    """Replace the gradient of a norm's output by that of its input, a part of the tokens after the other.

    Args:
        norm: The norm, with a weight [H*D] of all heads together, or [H, D] of each head; or K in place of H.
        x: The input of the projection, [b, s, E].
        weight: The weight of the projection, [H*D, E] or [K*D, E].
        bias: Its bias, or None.
        grad: The gradient, [b, s, H*D] or [b, s, K*D].
        sums: The gradients of the norm's parameters are added to these.
        part: How many tokens are computed at once.
    """
    sizes: Any = norm.weight.shape
    for start, length in slices(x.shape[1], part):
        of_part = grad.narrow(1, start, length).unflatten(-1, sizes)
        raw = linear(x.narrow(1, start, length), weight, bias).unflatten(-1, sizes)
        with torch.enable_grad(), parameter_aliases(norm) as aliases:
            leaf = raw.requires_grad_()
            grads = torch.autograd.grad(norm(leaf), (leaf, *aliases), of_part)
        of_part.copy_(grads[0])
        for total, added in zip(sums, grads[1:], strict=True):
            total.add_(added)
