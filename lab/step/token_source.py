"""Tokens that a rank reads in parts: those of a text in memory, or of a file that is mapped into memory.

A token file has no header: it is the tokens of one text, one after the other, as little-endian integers. Its
name says their size: ``*.uint16.bin`` or ``*.uint32.bin``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lab.errors import DataError
from lab.step import data
from lab.units import abbreviate, parse_path

SUFFIXES = {".uint16.bin": "<u2", ".uint32.bin": "<u4"}
"""The end of the name of a token file, and numpy's name of its integers."""

BLOCK, BLOCKS = 2**16, 256
"""The tokens of a block, and the blocks of a long source, that its digest is made of."""


@dataclass(frozen=True, eq=False)
class TokenSource:
    """The tokens of a text.

    Attributes:
        tokens: The tokens [n], integers. Those of a file are read from the disk when they are asked for.
        vocab_size: The tokens of the model's vocabulary.
        path: The file; None for tokens in memory.
    """

    tokens: npt.NDArray[Any]
    vocab_size: int
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, places: Tensor) -> Tensor:
        """Return the tokens at some places, int64; behind the last token the first follows again.

        Args:
            places: Places in the text, counted from 0, int64 of any shape.

        Raises:
            DataError: A token is beyond the vocabulary; the message names its place. The file is not as long
                as it was.
        """
        if self.path is not None and (size := self.path.stat().st_size) != self.tokens.nbytes:
            raise DataError(f"{self.path} has {size} bytes and had {self.tokens.nbytes}: leave it as it is")
        within = places % len(self)
        found = torch.from_numpy(self.tokens[within.numpy()].astype(np.int64))
        beyond = found >= self.vocab_size
        if bool(beyond.any()):
            raise DataError(
                f"{self.path or 'the text'} has token {int(found[beyond][0])} at place "
                f"{int(within[beyond][0])}, the model's vocabulary ends at {self.vocab_size - 1}: take the "
                "tokenizer that belongs to the model, and the file's own size of integers"
            )
        return found

    def digest(self) -> str:
        """What tells one text from another: a hash of the number of tokens, and of the tokens.

        Of more than 2^24 tokens, 256 blocks of 2^16 are read, at equal distances, the first and the last
        tokens among them: a change between them is not seen.
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
    """Whether a path is, by its name, that of a token file."""
    return isinstance(text, str | Path) and _dtype(text) is not None


def open_source(
    text: str | Path | None, *, tokenizer: str | Path | None = None, vocab_size: int
) -> TokenSource:
    """Open the tokens of a text: map a token file, or read and encode a text.

    Args:
        text: A token file; or a file or a folder of text; None for the Python standard library's sources.
        tokenizer: A local directory; None for bytes as tokens. A token file needs none.
        vocab_size: The tokens of the model's vocabulary. Those of a file are checked when they are read.

    Raises:
        DataError: See ``read_text`` and ``encode``; a token file that is missing, empty, cut, or unreadable.
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
    """Write a token file, which has its name only when it is whole.

    Args:
        tokens: The tokens, int64 [n], as ``lab.step.data.encode`` returns them.
        path: The file. Its name ends with ``.uint16.bin`` or ``.uint32.bin``.

    Raises:
        DataError: Another name; no tokens; a token that these integers do not hold; a file that cannot be
            written.
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
    target = parse_path(path, DataError).absolute()
    part = target.with_name(f"{target.name}-{uuid4()}.part")
    try:
        tokens.numpy().astype(dtype).tofile(part)
        part.rename(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def _dtype(path: str | Path) -> np.dtype[Any] | None:
    return next((np.dtype(name) for end, name in SUFFIXES.items() if str(path).endswith(end)), None)
