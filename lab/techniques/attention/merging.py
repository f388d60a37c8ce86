"""Attention to several sets of keys, merged into attention to all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to other keys into ``out`` and ``lse``, in place.

    Each output is weighted by its share of the sum of both softmax denominators.

    Args:
        out: The output of attention to some keys, [b, h, S, D], in the dtype of sums.
        lse: The log-sum-exp of its scores, [b, h, S].
        part: The output of attention to other keys, [b, h, S, D].
        part_lse: The log-sum-exp of the scores of these, [b, h, S].
    """
    share = torch.sigmoid(lse - part_lse)[..., None]
    out.mul_(share).addcmul_(part, 1 - share)
    lse.copy_(torch.logaddexp(lse, part_lse))
