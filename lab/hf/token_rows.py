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
    """Rows of S tokens, one after the other, with the tokens themselves as labels.

    A token file is mapped into memory, and a row is read when it is asked for. What is left at the end of the
    text is no row. SFTTrainer takes ``datasets.Dataset`` alone, and tokenizes texts itself.

    Args:
        text: A file of tokens (``*.uint16.bin`` or ``*.uint32.bin``, see ``lab.step.write_tokens``), or a
            file or a folder of text.
        tokens: S, a number or a text such as "128K".
        vocab_size: V, the tokens of the model's vocabulary.
        tokenizer: A local directory, for a text; None for bytes as tokens.

    Raises:
        DataError: See ``open_source``; a text of fewer than S tokens; a token beyond the vocabulary, when its
            row is read.
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
