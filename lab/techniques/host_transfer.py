"""Copies between device and host memory. No other file of the lab makes such copies.

Every copy is one of four operators: ``lab::to_host``, ``lab::to_host_whole``, ``lab::write_host`` and
``lab::from_host``. On CPU, device and host are the same memory, but the copies are still made. A meter counts
the results of the first two, and of ``lab::empty_host``, as host memory, so it measures the same bytes on a
CPU rank, in a plan on fake tensors, and on a GPU. Those of ``lab::empty_mapped`` it counts apart, as bytes on
a disk.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lab.techniques.host_file import HostFile
from lab.techniques.host_memory import local_ranks, pinnable
from lab.techniques.limits import HOST_PAGE
from lab.torch_private import FakeTensor


def piece_sizes(nbytes: int) -> list[int]:
    """Return the sizes, in bytes, of the pieces that hold a tensor of ``nbytes`` bytes, the largest first.

    Torch's allocator of pinned memory rounds each block up to a power of two. The pieces are different powers
    of two and whole pages, so none of them is rounded up. Their sum is ``nbytes`` rounded up to whole pages.
    """
    whole = -(-nbytes // HOST_PAGE) * HOST_PAGE
    return [1 << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]


@torch.library.custom_op("lab::to_host", mutates_args=())
def to_host(x: Tensor, pins: Sequence[bool]) -> list[Tensor]:
    """Copy the bytes of ``x`` to new host memory, in pieces.

    The bytes keep the order that they have in the memory of ``x``, so no copy transposes ``x``. From CUDA,
    the copies run in the current stream. The host waits for a copy to a piece that is not pinned.

    Args:
        x: A tensor on the device, of any strides.
        pins: For each size of ``piece_sizes(x.nbytes)``, whether that piece is pinned.

    Returns:
        The pieces, flat uint8 tensors on the host.
    """
    flat, pieces = _flat(x if _is_packed(x) else _empty_packed(x, x.device).copy_(x)), []
    for size, pin in zip(piece_sizes(x.nbytes), pins, strict=True):
        piece = torch.empty(size, dtype=torch.uint8, pin_memory=pin and x.is_cuda)
        part, flat = flat[:size], flat[size:]
        _copy(piece[: part.numel()], part)
        pieces.append(piece)
    return pieces


@to_host.register_fake
def _(x: Tensor, pins: Sequence[bool]) -> list[Tensor]:  # noqa: ARG001 (the names are the operator's)
    # The pieces are CPU tensors on every device.
    return [torch.empty(size, dtype=torch.uint8) for size in piece_sizes(x.nbytes)]


@torch.library.custom_op("lab::empty_host", mutates_args=())
def empty_host(sizes: Sequence[int], pins: Sequence[bool]) -> list[Tensor]:
    """Allocate host memory: a flat uint8 tensor of each of ``sizes`` bytes, pinned where ``pins`` is true.

    Nothing but the tiles of streamed layers is allocated by this operator, which a plan relies on.
    """
    return [
        torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size, pin in zip(sizes, pins, strict=True)
    ]


@empty_host.register_fake
def _(sizes: Sequence[int], pins: Sequence[bool]) -> list[Tensor]:  # noqa: ARG001
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


@torch.library.custom_op("lab::write_host", mutates_args=("pieces",))
def write_host(x: Tensor, pieces: Sequence[Tensor], offset: int) -> None:
    """Copy the bytes of a contiguous tensor into host memory.

    From CUDA, the copies run in the current stream. The host waits for a copy to a piece that is not pinned.

    Args:
        x: A contiguous tensor on the device.
        pieces: Flat uint8 tensors on the host, which follow each other.
        offset: The first byte in the pieces that is written.
    """
    flat = _flat(x)
    for part, piece in _overlaps(flat, pieces, offset):
        _copy(piece, part)


@write_host.register_fake
def _(x: Tensor, pieces: Sequence[Tensor], offset: int) -> None:  # noqa: ARG001
    return None


@torch.library.custom_op("lab::to_host_whole", mutates_args=())
def to_host_whole(x: Tensor, pin: bool) -> Tensor:
    """Copy ``x`` to one tensor in new host memory.

    From CUDA, the copy runs in the current stream. The host waits for a copy to memory that is not pinned.

    Args:
        x: A tensor on the device.
        pin: Whether the host memory is pinned. Torch's allocator rounds it up to a power of two.

    Returns:
        A contiguous tensor on the host, of the shape and dtype of ``x``.
    """
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=pin and x.is_cuda)
    _copy(host, x)
    return host


@to_host_whole.register_fake
def _(x: Tensor, pin: bool) -> Tensor:  # noqa: ARG001
    return torch.empty(x.shape, dtype=x.dtype)


@torch.library.custom_op("lab::from_host", mutates_args=("out",))
def from_host(pieces: Sequence[Tensor], out: Tensor, offset: int = 0) -> None:
    """Copy the pieces of a tensor, as ``to_host`` or ``write_host`` filled them, into ``out``.

    To CUDA, the copies run in the current stream. The host waits for a copy from a piece that is not pinned.

    Args:
        pieces: Flat uint8 tensors on the host, which follow each other.
        out: A tensor on the device without gaps in memory, with the order of dimensions of the copied tensor.
        offset: The first byte in the pieces that is read.
    """
    for part, piece in _overlaps(_flat(out), pieces, offset):
        _copy(part, piece)


@from_host.register_fake
def _(pieces: Sequence[Tensor], out: Tensor, offset: int = 0) -> None:  # noqa: ARG001
    return None


def _overlaps(flat: Tensor, pieces: Sequence[Tensor], offset: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of ``flat`` [n], which begins at ``offset``, and of the pieces that have its bytes."""
    first = -offset
    for piece in pieces:
        begin, end = max(first, 0), min(first + piece.numel(), flat.numel())
        if begin < end:
            yield flat[begin:end], piece[begin - first : end - first]
        first += piece.numel()


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy between device and host. The host waits, unless the memory on the host is pinned.

    CUDA does not promise that a copy of other memory has ended when the call returns.
    """
    pinned = to.is_pinned() or source.is_pinned()
    to.copy_(source, non_blocking=pinned)
    if not pinned and (to.is_cuda or source.is_cuda):
        PINNED_MEMORY.pageable += source.nbytes


def _packed_strides(x: Tensor) -> list[int]:
    """Return the strides of a tensor like ``x`` without gaps, whose dimensions have the same memory order."""
    strides, step = [0] * x.dim(), 1
    for dim in sorted(range(x.dim()), key=lambda dim: (x.stride(dim), -dim)):
        strides[dim] = step
        step *= x.shape[dim]
    return strides


def _is_packed(x: Tensor) -> bool:
    """Return whether ``x`` has no gaps in memory; the stride of a dimension of size 1 does not matter."""
    strides = zip(x.shape, x.stride(), _packed_strides(x), strict=True)
    return all(stride == packed for size, stride, packed in strides if size > 1)


def _empty_packed(x: Tensor, device: torch.device) -> Tensor:
    """Allocate a tensor like ``x`` on ``device``, without gaps in memory."""
    return torch.empty_strided(x.shape, _packed_strides(x), dtype=x.dtype, device=device)


def _flat(x: Tensor) -> Tensor:
    """View a tensor without gaps as its bytes, in memory order: [x.nbytes]."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


class HostTensor:
    """A tensor that is stored in host memory until it is needed again.

    Args:
        copier: Makes the copies to the host and back.
        x: The tensor. Its copy to the host starts now.
        stays: Keep the tensor on the device, and make no copy.
    """

    def __init__(self, copier: HostCopier, x: Tensor, *, stays: bool = False) -> None:
        self._arrival: torch.cuda.Event | None = None
        self._copier, self._stays, self._to = copier, stays, x.device
        # Without detach, the tensor would keep the graph that computed it alive.
        self._device: Tensor | None = x.detach() if stays else None
        self._shape, self._strides, self._dtype = x.shape, _packed_strides(x), x.dtype
        self._host: list[Tensor] | None = None if stays else copier.send(x.detach())

    def prefetch(self) -> None:
        """Start the copy back to the device, unless it was started before. Do not wait for it."""
        if self._device is None:
            assert self._host is not None
            out = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._to)
            self._device, self._arrival = self._copier.fetch(self._host, out)

    def get(self) -> Tensor:
        """Return the tensor on the device. The current stream waits for the copy."""
        self.prefetch()
        if self._arrival is not None:
            torch.cuda.current_stream(self._to).wait_event(self._arrival)
        x = self._device
        assert x is not None
        if not self._stays:
            # The caller owns the tensor now. A second backward over a retained graph copies it again.
            self._device = self._arrival = None
        return x

    def __del__(self) -> None:
        # Backward needs no input of a frozen layer, and does not wait for its copy. After this, the memory of
        # the copy is reused.
        if self._arrival is not None:
            self._arrival.wait()


class HostCopier:
    """Copies between device and host; on CUDA, on a stream of its own.

    The computing stream waits for a copy before the device buffer of that copy is freed. The allocator may
    therefore reuse the buffer at once, and ``Tensor.record_stream`` is not needed.

    Args:
        pinned: The number of bytes that this process may pin in all. By default, the number of bytes that
            ``pinnable`` returns for the ranks of this host.
        file: Where ``allocate`` takes its memory; None for host memory. No other method uses it.
    """

    def __init__(self, pinned: int | None = None, file: HostFile | None = None) -> None:
        self._file = file
        self._limit = pinnable(local_ranks(), PINNED_MEMORY.nbytes) if pinned is None else pinned
        self._sending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def send(self, x: Tensor) -> list[Tensor]:
        """Start the copy of ``x`` to the host, and return its pieces. ``wait_until_sent`` drops ``x``."""
        with torch.no_grad(), self._on_copy_stream(x):
            host = PINNED_MEMORY.to_host(x, self._limit)
            self._sending.append((x, self._mark(x)))
        return host

    def allocate(self, nbytes: int, device: torch.device) -> list[Tensor]:
        """Return pieces of host memory, or of the file, for copies of ``nbytes`` bytes."""
        if self._file is not None:
            return self._file.allocate(nbytes)
        return PINNED_MEMORY.allocate(piece_sizes(nbytes), self._limit, device)

    def write(self, x: Tensor, pieces: list[Tensor], offset: int) -> None:
        """Start the copy of a contiguous tensor into ``pieces``, from byte ``offset`` on.

        The copies of the two newest tensors may be under way; the computing stream waits for those before.
        """
        with torch.no_grad(), self._on_copy_stream(x):
            torch.ops.lab.write_host(x, pieces, offset)
            self._sending.append((x, self._mark(x)))
        self.wait_until_sent(newest=2)

    def wait_until_sent(self, newest: int = 0) -> None:
        """Make the computing stream wait for copies to the host, and drop the copied tensors.

        Args:
            newest: The number of copies, the newest ones, that are not waited for.
        """
        while len(self._sending) > newest:
            _, sent = self._sending.popleft()
            if sent is not None and self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_event(sent)

    def fetch(
        self, host: list[Tensor], out: Tensor, offset: int = 0
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start the copy of the pieces ``host``, from byte ``offset`` on, into ``out``.

        Returns:
            ``out``, and on CUDA an event that marks the end of the copy, else None.
        """
        with torch.no_grad(), self._on_copy_stream(out):
            torch.ops.lab.from_host(host, out, offset)
            return out, self._mark(out)

    @contextmanager
    def _on_copy_stream(self, x: Tensor) -> Iterator[None]:
        if not x.is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        # Earlier work in the computing stream may still write x, or still read the memory that x reuses.
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self, x: Tensor) -> torch.cuda.Event | None:
        return self._stream.record_event() if x.is_cuda and self._stream is not None else None


class PinnedMemory:
    """Counts the memory that torch's caching host allocator has pinned, and keeps it below a limit.

    The allocator never unpins a block. When a tensor is freed, its block is reused for the next tensor of the
    same size. Equal steps therefore pin memory in the first step only. A piece that would exceed the limit is
    copied to pageable memory, and the host waits for that copy.

    Attributes:
        nbytes: The number of bytes that are pinned.
        pageable: The number of bytes, over all copies, from or to host memory that was not pinned.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.pageable = 0
        self._free: Counter[int] = Counter()

    def to_host(self, x: Tensor, limit: int) -> list[Tensor]:
        """Copy ``x`` to host memory.

        Args:
            x: A tensor on the device.
            limit: The number of bytes that may be pinned in all; pieces that exceed it are not pinned.

        Returns:
            The pieces, see the operator ``to_host``.
        """
        pins = self._choose(piece_sizes(x.nbytes), limit)
        pieces: list[Tensor] = torch.ops.lab.to_host(x, pins)
        self._count(pieces, pins)
        return pieces

    def allocate(self, sizes: list[int], limit: int, device: torch.device) -> list[Tensor]:
        """Return host memory for copies from and to ``device``.

        Args:
            sizes: The bytes of each piece.
            limit: The number of bytes that may be pinned in all; pieces that exceed it are not pinned.
            device: Memory for a CPU is not pinned.
        """
        pins = self._choose(sizes, limit) if device.type == "cuda" else [False] * len(sizes)
        pieces: list[Tensor] = torch.ops.lab.empty_host(sizes, pins)
        self._count(pieces, pins)
        return pieces

    def _choose(self, sizes: list[int], limit: int) -> list[bool]:
        """Return for each size whether the piece is pinned: it reuses a free one, or is below the limit."""
        free, new, pins = self._free.copy(), 0, []
        for size in sizes:
            reused = free[size] > 0
            pins.append(reused or self.nbytes + new + size <= limit)
            free[size] -= reused
            new += size if pins[-1] and not reused else 0
        return pins

    def _count(self, pieces: list[Tensor], pins: list[bool]) -> None:
        """Count the pieces that were pinned, and note when each is free again."""
        for piece, pin in zip(pieces, pins, strict=True):
            if pin and not isinstance(piece, FakeTensor):  # A plan pins nothing.
                self.nbytes += 0 if self._free[piece.nbytes] > 0 else piece.nbytes
                self._free[piece.nbytes] -= self._free[piece.nbytes] > 0
                weakref.finalize(piece, self._free.update, (piece.nbytes,))

    def reserve(self, sizes: Iterable[int], limit: int) -> bool:
        """Count the memory of tensors that others pin whole, if all of it may be pinned.

        Args:
            sizes: The bytes of each tensor, which the allocator rounds up to a power of two.
            limit: The number of bytes that may be pinned in all.

        Returns:
            Whether they may be pinned.
        """
        wanted = sum(1 << (size - 1).bit_length() for size in sizes)
        if self.nbytes + wanted > limit:
            return False
        self.nbytes += wanted
        return True


PINNED_MEMORY = PinnedMemory()
"""The pinned memory of this process. All models share it, as they share torch's allocator."""
