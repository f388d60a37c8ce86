"""The host memory of streamed layers in a file: each rank maps one file without a name into its memory.

The kernel writes changed pages to the disk and reads them again as it needs memory, so the file may be larger
than the host's memory. Three things to know:

- When more pages have changed than ``vm.dirty_ratio`` (a share of the available memory) allows, the kernel
  stops the process that writes until the disk has caught up. A step then waits for the disk.
- The page cache of a mapped file counts in the memory of the process's control group. The kernel reclaims
  it, pages that have changed after they were written; a container is not killed for it.
- A disk that fails ends the process with SIGBUS, as every mapped file does.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from lab.errors import HostFileError
from lab.techniques.agreement import refuse_together
from lab.techniques.host_memory import local_ranks
from lab.techniques.limits import HOST_PAGE
from lab.units import format_bytes

MOUNTS = Path("/proc/self/mountinfo")
"""The file in which Linux lists the file systems."""

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
"""The file systems whose files lie in memory."""


@torch.library.custom_op("lab::empty_mapped", mutates_args=())
def empty_mapped(addresses: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Return a flat uint8 tensor of each size at each address, over memory that the caller keeps mapped."""
    return [
        torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        for address, size in zip(addresses, sizes, strict=True)
    ]


@dataclass(frozen=True)
class HostFolder:
    """A folder for the files of the ranks of a host.

    Attributes:
        path: The folder.
        nbytes: The bytes of each rank's file.
    """

    path: Path
    nbytes: int

    def check(self) -> None:
        """Check that the folder is on a disk with enough free bytes for all ranks of this host.

        Raises:
            HostFileError: It is not.
        """
        if not hasattr(os, "posix_fallocate"):
            raise HostFileError(f"{self._asked}: files are preallocated on Linux only; leave it out here")
        if not self.path.is_dir():
            raise HostFileError(f"{self._asked}: there is no such folder; give one on a disk")
        kind = file_system(self.path)
        if kind in IN_MEMORY:
            raise HostFileError(f"{self._asked}: the folder lies in memory ({kind}); give one on a disk")
        self._temporary_file().close()
        if free_bytes(self.path) < self.nbytes * local_ranks():
            raise self._too_small()

    def open(self) -> HostFile:
        """Make this rank's file, and map it.

        Raises:
            HostFileError: The disk does not take the bytes, or no file can be made.
        """
        with self._temporary_file() as file:
            try:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise self._too_small() from error
                raise HostFileError(f"{self._asked}: {error.strerror}; give another folder") from error
            return HostFile(mmap.mmap(file.fileno(), self.nbytes))

    def _temporary_file(self) -> IO[bytes]:
        """Make a file without a name.

        Where the file system has no such files, the file has a name for a moment, while it is empty.
        """
        try:
            return tempfile.TemporaryFile(dir=self.path)
        except OSError as error:
            raise HostFileError(
                f"{self._asked}: no file can be made there ({error.strerror}); give a folder on a disk to "
                "which this user may write"
            ) from error

    def _too_small(self) -> HostFileError:
        ranks = local_ranks()
        of = f", {format_bytes(self.nbytes)} for each of {ranks} ranks" if ranks > 1 else ""
        return HostFileError(
            f"{self._asked}: streamed layers need {format_bytes(self.nbytes * ranks)} there{of}, and "
            f"{format_bytes(free_bytes(self.path))} are free; fewer tokens, more hosts or a larger segment "
            "need less"
        )

    @property
    def _asked(self) -> str:
        return f"host_dir={str(self.path)!r}"


class HostFile:
    """A mapped file, of which tensors take whole pages. The pages of a tensor that dies are free again.

    The file has no name, so nobody can delete it under a running step, and it vanishes with the process,
    however that ends. The pages of a tensor may lie in several places of the file: if enough pages are free,
    the tensor has its memory.

    Copies between a GPU and this memory are slower than those of pinned memory: the driver copies the bytes
    through a buffer of its own, and the host waits for it.

    Args:
        mapping: The mapped file, a multiple of 4096 bytes.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping, self._used = mapping, 0
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        # First byte and size of each stretch of free pages, in order; no two of them touch.
        self._free: dict[int, int] = {0: len(mapping)}
        # A tensor may die in any thread, and while pages are taken.
        self._returned: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int) -> list[Tensor]:
        """Return pieces, flat uint8 tensors that follow each other, for ``nbytes`` bytes in whole pages.

        Raises:
            HostFileError: There are not enough free pages.
        """
        stretches = self._take(-(-nbytes // HOST_PAGE) * HOST_PAGE)
        starts, sizes = zip(*stretches, strict=True) if stretches else ((), ())
        pieces: list[Tensor] = torch.ops.lab.empty_mapped([self._address + s for s in starts], [*sizes])
        for piece, stretch in zip(pieces, stretches, strict=True):
            # The finalizer also keeps the mapping while the piece lives.
            weakref.finalize(piece.untyped_storage(), self._give_back, stretch)
        return pieces

    def close(self) -> None:
        """Give the disk its bytes back if no tensor lies in the file; else they go with the tensors."""
        self._merge_returned()
        if not self._used:
            self._free.clear()
            self._mapping.close()

    def _give_back(self, stretch: tuple[int, int]) -> None:
        self._returned.append(stretch)

    def _take(self, size: int) -> list[tuple[int, int]]:
        """Take free pages: of the smallest stretch that is enough, else of several, the largest first."""
        self._merge_returned()
        if size > (free := sum(self._free.values())):
            raise HostFileError(
                f"the file of streamed layers is full: {format_bytes(size)} wanted, {format_bytes(free)} of "
                f"{format_bytes(free + self._used)} free; a step alone was planned, so keep no tensors of "
                "another, or leave host_dir out"
            )
        taken = []
        enough = [length for length in self._free.values() if length >= size]
        wanted = min(enough, default=0)
        for start, length in sorted(self._free.items(), key=lambda item: -item[1]):
            if size and (not wanted or length == wanted):
                part = min(length, size)
                del self._free[start]
                if part < length:
                    self._free[start + part] = length - part
                taken.append((start, part))
                self._used += part
                size -= part
        return taken

    def _merge_returned(self) -> None:
        while self._returned:
            start, length = self._returned.popleft()
            self._used -= length
            self._free[start] = length
        merged: dict[int, int] = {}
        end = first = -1
        for start, length in sorted(self._free.items()):
            if start == end:
                merged[first] += length
            else:
                first = start
                merged[first] = length
            end = start + length
        self._free = merged


def open_host_file(folder: HostFolder, group: dist.ProcessGroup | None) -> HostFile:
    """Make and map this rank's file in a folder; every rank of ``group`` calls this.

    All ranks check the folder before the first of them takes bytes of the disk.

    Raises:
        LabError: One rank's folder, or its disk, does not do. All ranks raise it.
    """
    refuse_together(folder.check, group)
    return refuse_together(folder.open, group)


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may write to the file system of a folder."""
    numbers = os.statvfs(folder)
    return numbers.f_bavail * numbers.f_frsize


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as "ext4"; empty if the system does not say it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        # The fields after a lone hyphen begin with the type.
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return ""
