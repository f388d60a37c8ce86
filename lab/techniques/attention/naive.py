"""Attention as in a textbook, with the whole matrix of scores in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal softmax(q k^T / sqrt(D)) v, with the whole matrix of scores in memory.

    It holds b*H*S*S elements for the scores and as many for the probabilities, and as many again for each of
    their gradients. This memory is quadratic in S. Flash attention (arXiv 2205.14135, section 3.1) keeps
    b*H*S elements instead. The time of both is quadratic in S.

    Args:
        q: [b, H, S, D], with b rows, H heads, S tokens and head_dim D.
        k: [b, H, S, D].
        v: [b, H, S, D].

    Returns:
        [b, H, S, D].
    """
    tokens = q.shape[-2]
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
