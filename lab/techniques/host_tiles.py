"""Tensors in host memory that are written and read one tile at a time, while the device computes.

Letters: s tokens of one rank, t tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod

import torch
from torch import Tensor

from lab.techniques.host_file import HostFile
from lab.techniques.host_transfer import HostCopier
from lab.techniques.slices import counted_slices, repeated, repetitions, slices

WRITTEN = 2
"""The ``different`` tiles of a loop that writes tiles, see ``slices``: from the third tile on, the two copies
that may be under way are of whole tiles."""


class TileCopiers:
    """The copiers of a model's tiles: one to the host and one back, so that both directions run at once.

    Args:
        file: The file in which the tiles lie; None for host memory.
    """

    def __init__(self, file: HostFile | None = None) -> None:
        self.to_host, self.to_device = HostCopier(file=file), HostCopier()


class HostTiles:
    """A tensor in host memory, in tiles along the dimension of its tokens. All memory is allocated at once.

    The tiles lie one after the other, each contiguous. The memory consists of pieces, see ``piece_sizes``:
    the bytes of the tensor are rounded up to whole pages of 4096 bytes.

    Args:
        copiers: Make the copies.
        shape: The shape of the tensor.
        like: A tensor of the same dtype, on the device.
        dim: The dimension of the tokens.
        tile: t. If it does not divide the tokens, the last tile is shorter.
    """

    def __init__(
        self, copiers: TileCopiers, shape: tuple[int, ...], like: Tensor, *, dim: int, tile: int
    ) -> None:
        self.copiers, self.shape, self.dtype, self.device = copiers, tuple(shape), like.dtype, like.device
        self.dim, self.tile = dim, tile
        self.tokens = shape[dim]
        self._token_bytes = self.numel(1) * like.itemsize
        self._pieces = copiers.to_host.allocate(self.tokens * self._token_bytes, self.device)

    def tile_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a tile of ``length`` tokens."""
        return *self.shape[: self.dim], length, *self.shape[self.dim + 1 :]

    def numel(self, length: int) -> int:
        """Return the number of elements of a tile of ``length`` tokens."""
        return prod(self.tile_shape(length))

    def write(self, start: int, x: Tensor) -> None:
        """Start the copy of the tile that begins at token ``start``.

        A tile that is not contiguous is copied on the device first. The computing stream waits for all but
        the two newest copies; ``wait_until_written`` waits for these.
        """
        self.copiers.to_host.write(x.contiguous(), self._pieces, start * self._token_bytes)

    def write_all(self, x: Tensor) -> None:
        """Start the copies of all tiles of a tensor of this shape."""
        for start, length in slices(self.tokens, self.tile, different=WRITTEN):
            self.write(start, x.narrow(self.dim, start, length))

    def wait_until_written(self) -> None:
        """Make the computing stream wait for all copies to the host, so that their sources may be reused."""
        self.copiers.to_host.wait_until_sent()

    def fetch(self, start: int, out: Tensor) -> torch.cuda.Event | None:
        """Start the copy of the tile that begins at token ``start`` into ``out``, which has its shape.

        Returns:
            On CUDA an event that marks the end of the copy, else None.
        """
        return self.copiers.to_device.fetch(self._pieces, out, start * self._token_bytes)[1]


def read_tiles(*tensors: HostTiles, different: int = 1) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield the start and the length of each tile, and the tile of each of the tensors on the device.

    While the caller computes with a tile, the next one is copied. There are two buffers for each tensor; a
    tile is in its buffer until the caller asks for the tile after it.

    Args:
        *tensors: Tensors with as many tokens, in tiles of one length.
        different: See ``slices``; ``WRITTEN`` if the caller writes tiles.
    """
    tokens, tile, device = tensors[0].tokens, tensors[0].tile, tensors[0].device
    memory = [
        [torch.empty(t.numel(min(tile, tokens)), dtype=t.dtype, device=device) for t in tensors]
        for _ in range(2 if tokens > tile else 1)
    ]

    @cache
    def views(which: int, length: int) -> list[Tensor]:
        return [
            flat[: t.numel(length)].view(t.tile_shape(length))
            for t, flat in zip(tensors, memory[which], strict=True)
        ]

    # A tile that is read ahead is counted as often as the loop counts it, and not the one before it.
    outer, ahead = repetitions(), [*counted_slices(tokens, tile, different=different)]

    def buffers(number: int, length: int) -> list[Tensor]:
        return views(number % 2, length)

    def fetch(number: int) -> list[torch.cuda.Event | None]:
        start, length, times = ahead[number]
        with repeated(outer * times):
            return [t.fetch(start, out) for t, out in zip(tensors, buffers(number, length), strict=True)]

    arrivals = fetch(0)
    # Counted, and not computed from ``start``: a shortened loop is then the same for odd and even numbers.
    for number, (start, length) in enumerate(slices(tokens, tile, different=different)):
        for arrival in arrivals:
            if arrival is not None:
                torch.cuda.current_stream(device).wait_event(arrival)
        if number + 1 < len(ahead):
            arrivals = fetch(number + 1)
        yield start, length, buffers(number, length)
