"""The dtype in which sums are accumulated."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the wider of fp32 and ``dtype``.

    A sum over tiles or stages in bf16 would be rounded after each term, and the errors would add up. A sum
    in the accumulation dtype is rounded to bf16 once, at its end.
    """
    return torch.promote_types(dtype, torch.float32)
