"""Where flash kernels on CUDA stop, and the blocks of the matrix products beyond, without torch."""

MAX_HEAD_DIM = 256
"""The largest D that flash kernels on CUDA support."""

BLOCK = 256
"""The number of queries of a head whose scores are in memory at a time, in attention by matrix products."""


def flash_takes(width: int, head_dim: int) -> bool:
    """Return whether a flash kernel on CUDA takes elements of ``width`` bytes, bf16 or fp16, and this D."""
    return width == 2 and head_dim <= MAX_HEAD_DIM
