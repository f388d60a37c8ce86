"""Rows of a text or of a token file, as a dataset of Trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lab.errors import DataError
from lab.step.token_source import open_source
from lab.units import parse_tokens


class TokenRows(Dataset[dict[str, Tensor]]):
    """A text as rows of S tokens, one after the other, with the tokens themselves as labels.

    A token file is mapped into memory, and a row is read when it is asked for. Tokens after the last whole
    row are left out. This is a dataset for ``Trainer``; ``SFTTrainer`` takes a ``datasets.Dataset`` alone.

    Args:
        text: A file of tokens (``*.uint16.bin`` or ``*.uint32.bin``, see ``lab.step.write_tokens``), or a
            file or a folder of text.
        tokens: S, a number or a text such as "128K".
        vocab_size: The number of tokens in the model's vocabulary.
        tokenizer: The local directory of a tokenizer, for a text; None for bytes as tokens.

    Raises:
        DataError: See ``open_source``; a text of fewer than S tokens. When a row is read: a token that is not
            in the vocabulary.
    """

    def __init__(
        self, text: str | Path, *, tokens: int | str, vocab_size: int, tokenizer: str | Path | None = None
    ) -> None:
        self._source = open_source(text, tokenizer=tokenizer, vocab_size=vocab_size)
        self._tokens = parse_tokens(tokens)
        if len(self) < 1:
            raise DataError(
                f"{str(text)!r} has {len(self._source)} tokens, fewer than a row of {self._tokens}: give a "
                "longer text, or fewer tokens"
            )

    def __len__(self) -> int:
        return len(self._source) // self._tokens

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        read = self._source.read(torch.arange(row * self._tokens, (row + 1) * self._tokens))
        return {"input_ids": read, "labels": read.clone()}
