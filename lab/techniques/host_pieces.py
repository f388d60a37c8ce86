"""The pieces in which a tensor lies in pinned host memory."""

HOST_PAGE = 4096  # bytes, the least that is pinned


def piece_sizes(nbytes: int) -> list[int]:
    """The sizes of the pieces in which ``nbytes`` bytes lie on the host, the largest first.

    All are different powers of two and whole pages, so that torch's allocator of pinned memory, which rounds
    a block up to a power of two, rounds none up. Together they are less than a page more than ``nbytes``.
    """
    whole = -(-nbytes // HOST_PAGE) * HOST_PAGE
    return [1 << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]
