"""Attention as the textbook writes it: what every other technique here replaces."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(D)) v, with the whole matrix of scores in memory.

    ``q, k, v`` [b, H, S, D] -> [b, H, S, D]. Holds b*H*S*S numbers for the scores and as many for the
    probabilities, and as many again for each of their gradients: quadratic in S, where flash attention
    (arXiv 2205.14135, section 3.1) keeps b*H*S. Its time is quadratic too, and so is flash attention's.
    """
    tokens = q.shape[-2]
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
