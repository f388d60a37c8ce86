"""The sizes of the pieces into which a tensor is divided in pinned host memory."""

HOST_PAGE = 4096
"""The size of a memory page in bytes, which is the least that can be pinned."""


def piece_sizes(nbytes: int) -> list[int]:
    """Return the sizes, in bytes, of the pieces that hold a tensor of ``nbytes`` bytes, the largest first.

    Torch's allocator of pinned memory rounds each block up to a power of two. The pieces are different powers
    of two and whole pages, so none of them is rounded up. Their sum is ``nbytes`` rounded up to whole pages.
    """
    whole = -(-nbytes // HOST_PAGE) * HOST_PAGE
    return [1 << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]
