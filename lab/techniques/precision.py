"""In what sums are kept."""

import torch


def wider(dtype: torch.dtype) -> torch.dtype:
    """fp32, or the dtype itself where it is wider.

    A sum of tiles or stages that is kept in bf16 is rounded at each of them, and drifts; kept wide, it is
    rounded once, at its end.
    """
    return torch.promote_types(dtype, torch.float32)
