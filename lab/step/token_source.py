"""The tokens of a text, of which a rank reads parts: they are in memory, or in a file that is mapped into it.

A token file has no header: it holds the tokens of one text, one after the other, as little-endian integers.
Its name says their size: ``*.uint16.bin`` or ``*.uint32.bin``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.folders import write_whole
from lab.errors import DataError
from lab.step import data
from lab.units import abbreviate, parse_path

SUFFIXES = {".uint16.bin": "<u2", ".uint32.bin": "<u4"}
"""The end of a token file's name, and numpy's name of the dtype of its integers."""

BLOCK, BLOCKS = 2**16, 256
"""The number of tokens in a block, and the largest number of blocks that ``TokenSource.digest`` reads."""


@dataclass(frozen=True, eq=False)
class TokenSource:
    """The tokens of a text.

    Attributes:
        tokens: The tokens [n], integers. Those of a file are read from the disk when they are asked for.
        vocab_size: The number of tokens in the model's vocabulary.
        path: The file; None for tokens in memory.
    """

    tokens: npt.NDArray[Any]
    vocab_size: int
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, places: Tensor) -> Tensor:
        """Return the tokens at some places, int64. The first token follows the last one.

        Args:
            places: Places in the text, counted from 0, int64 of any shape.

        Raises:
            DataError: A token is not in the vocabulary; the message says its place. The size of the file has
                changed.
        """
        if self.path is not None and (size := self.path.stat().st_size) != self.tokens.nbytes:
            raise DataError(
                f"{self.path} has {size} bytes, and had {self.tokens.nbytes} when it was opened: do not "
                "change a token file that is in use"
            )
        within = places % len(self)
        found = torch.from_numpy(self.tokens[within.numpy()].astype(np.int64))
        beyond = found >= self.vocab_size
        if bool(beyond.any()):
            raise DataError(
                f"{self.path or 'the text'} has token {int(found[beyond][0])} at place "
                f"{int(within[beyond][0])}, the model's vocabulary ends at {self.vocab_size - 1}: encode the "
                "text with the model's tokenizer, and name a file by the size of its integers"
            )
        return found

    def digest(self) -> str:
        """Return a hash of the number of tokens and of the tokens, to tell one text from another.

        Of more than 2^24 tokens it covers 256 blocks of 2^16, at equal distances, the first and the last
        tokens among them. A change between the blocks is not noticed.
        """
        whole = hashlib.sha256(str(len(self)).encode())
        for block in self._blocks():
            whole.update(block.astype("<u4").data)
        return whole.hexdigest()[:16]

    def _blocks(self) -> Iterator[npt.NDArray[Any]]:
        last = len(self) - BLOCK
        few = len(self) <= BLOCK * BLOCKS
        starts = range(0, len(self), BLOCK) if few else (last * i // (BLOCKS - 1) for i in range(BLOCKS))
        for start in starts:
            yield self.tokens[start : start + BLOCK]


def is_token_file(text: object) -> bool:
    """Return whether the name of a path is that of a token file."""
    return isinstance(text, str | Path) and _dtype(text) is not None


def open_source(
    text: str | Path | None, *, tokenizer: str | Path | None = None, vocab_size: int
) -> TokenSource:
    """Open the tokens of a text: map a token file, or read and encode a text.

    Args:
        text: A token file; or a file or a folder of text; None for the Python standard library's sources.
        tokenizer: A local directory; None for bytes as tokens. A token file needs none.
        vocab_size: The number of tokens in the model's vocabulary. The tokens of a file are compared with it
            when they are read.

    Raises:
        DataError: See ``read_text`` and ``encode``; a token file that is missing, empty, cut within a token,
            or unreadable.
    """
    dtype = _dtype(text) if isinstance(text, str | Path) else None
    if dtype is None:
        tokens = data.encode(data.read_text(text), tokenizer=tokenizer, vocab_size=vocab_size)
        return TokenSource(tokens.numpy(), vocab_size)
    path = parse_path(text, DataError).absolute()  # type: ignore[arg-type]
    if not path.is_file():
        raise DataError(f"no token file at {str(text)!r}: lab.step.write_tokens makes one")
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise DataError(
            f"{str(text)!r} has {size} bytes: a file of {dtype.name} has a multiple of {dtype.itemsize}, and "
            "not 0; make it again with lab.step.write_tokens"
        )
    try:
        mapped = np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"{str(text)!r} cannot be read: {error.strerror}") from error
    return TokenSource(np.asarray(mapped), vocab_size, path)


def write_tokens(tokens: Tensor, path: str | Path) -> None:
    """Write a token file. It gets its name when all tokens are written.

    Args:
        tokens: The tokens, int64 [n], as ``lab.step.data.encode`` returns them.
        path: The file. Its name ends with ``.uint16.bin`` or ``.uint32.bin``.

    Raises:
        DataError: A name with another end; no tokens; a token that is too large for these integers, or
            negative; a file that cannot be written.
    """
    dtype = _dtype(path)
    if dtype is None:
        raise DataError(
            f"{abbreviate(repr(str(path)))} is no name of a token file: let it end with "
            f"{' or '.join(SUFFIXES)}"
        )
    if tokens.dim() != 1 or tokens.dtype != torch.int64 or not len(tokens):
        raise DataError(
            f"tokens of shape {list(tokens.shape)} in {tokens.dtype}: give one row of 1 token or more, in "
            "torch.int64"
        )
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token <= np.iinfo(dtype).max:
            raise DataError(
                f"token {token} in a file of {dtype.name}, which holds 0 to {np.iinfo(dtype).max}: "
                ".uint32.bin holds the tokens of every vocabulary"
            )
    try:
        write_whole(parse_path(path, DataError), tokens.numpy().astype(dtype).data)
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def _dtype(path: str | Path) -> np.dtype[Any] | None:
    return next((np.dtype(name) for end, name in SUFFIXES.items() if str(path).endswith(end)), None)
