"""Sizes at which attention and host memory are divided or refused. This module does not import torch."""

from lab.units import Ki

HOST_PAGE = 4096
"""The size of a memory page in bytes, which is the least that can be pinned."""

QUERY_BLOCK = 256
"""The number of queries of a head whose scores are in memory at a time, in attention by matrix products."""

WINDOW_PIECE = 64 * Ki
"""The most tokens in one call of a windowed kernel, unless one window is longer: enough for a GPU."""

SINK_PIECE = 8 * Ki
"""The number of tokens whose products are in memory at once, while the gradients of sinks are computed."""

MAX_HEAD_DIM = 256
"""The largest D that flash kernels on CUDA support."""

TORCH_QUERY_LIMIT = 2**31
"""The number of elements of queries (tokens x heads x D) from which a call of torch's CUDA kernel is refused.

The backward of FlashAttention-2 computes an offset from this number: ``row_offset_dq_accum`` in
``flash_bwd_kernel.h``. The offset has 32 bits in releases whose source has the factor ``128``, and 64 bits in
releases that have ``128ll``. No release of torch has been measured beyond the limit.
"""


def max_head_dim(kernel: str) -> int:
    """Return the largest D that a flash kernel on CUDA takes.

    Later betas of FlashAttention-4 take 256 too, but on Blackwell nothing between 128 and 256.
    """
    return 128 if kernel in ("cudnn", "flash-attn-4") else MAX_HEAD_DIM


def flash_takes(width: int, head_dim: int, kernel: str = "torch") -> bool:
    """Return whether a flash kernel on CUDA takes elements of ``width`` bytes, bf16 or fp16, and this D.

    Args:
        width: The bytes of an element.
        head_dim: D.
        kernel: The name of the kernel.
    """
    return width == 2 and head_dim <= max_head_dim(kernel)


def query_limit_refusal(tokens: int, heads: int, head_dim: int) -> str | None:
    """Return why torch's CUDA kernel is not called with so many queries; None if it is called.

    Args:
        tokens: S, the query tokens of one call.
        heads: h, the query heads of one call.
        head_dim: D. The kernel rounds it up to a multiple of 32.
    """
    elements = tokens * heads * (-(-head_dim // 32) * 32)
    if elements < TORCH_QUERY_LIMIT:
        return None
    return (
        f"{heads} heads of {tokens} tokens in one call of torch's attention kernel on CUDA: its backward may "
        f"count in 32 bits, and {elements} elements are too many for that; set a smaller head_chunk or a "
        "larger ulysses, or kernel='cudnn' where lab doctor shows it"
    )
