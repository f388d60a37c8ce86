"""The dtype in which sums are accumulated."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or ``dtype`` itself where it is accumulation_dtype.

    A sum over tiles or stages in bf16 is rounded after each of them, and the errors add up. In this dtype it
    is rounded once, at its end.
    """
    return torch.promote_types(dtype, torch.float32)
