"""Real text -> tokens -> batches, the same on every rank and in every run."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lab.errors import DataError
from lab.units import abbreviate, parse_path


def read_text(path: str | Path | None = None) -> str:
    """All text of a file, or of every readable text file under a folder in sorted order.

    Without a path: the top-level modules of the Python standard library, some 5 MB that are on every
    machine this runs on.

    A file of no bytes is not opened: those that Linux shows under ``/proc`` may never end.

    Raises:
        DataError: the path is empty, is missing, holds nothing, cannot be read, or is not text.
    """
    if path is None:
        return _standard_library()
    if not isinstance(path, str | Path) or not str(path):
        raise DataError(f"text={path!r}: give the path of a text file or of a folder of text files")
    root = parse_path(path, DataError)
    try:
        if not (root.is_file() or root.is_dir()):
            raise DataError(f"no text at {str(path)!r}: give a text file or a folder of text files")
        files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.is_file())
        texts = [_decoded(file) for file in files]
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "it is larger than memory"
        raise DataError(
            f"{abbreviate(repr(str(path)))} cannot be read ({reason}): give a text file or a folder of text "
            "files"
        ) from error
    if texts == [None] and root.is_file():
        raise DataError(
            f"{str(path)!r} is not text: give a file in UTF-8, or a folder of such files; the name of a "
            "file of tokens ends with .uint16.bin or .uint32.bin"
        )
    text = "".join(text for text in texts if text is not None)
    if not text.strip():
        raise DataError(f"{str(path)!r} holds no text: give a text file or a folder of text files")
    return text


def encode(text: str, *, tokenizer: str | Path | None = None, vocab_size: int = 256) -> Tensor:
    """Tokens of a text, int64 [n]: its UTF-8 bytes, or what a tokenizer in a local directory makes of it.

    Raises:
        DataError: the directory holds no tokenizer, or its tokens do not fit a vocabulary of this size.
    """
    if tokenizer is None:
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    else:
        from transformers import AutoTokenizer

        try:
            # The setting must be given: by default, transformers asks, and runs the code of a folder on "y".
            tokenize = AutoTokenizer.from_pretrained(
                str(tokenizer), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a file that is not as expected ends in errors of many classes
            if "trust_remote_code" in str(error):
                raise DataError(
                    f"the tokenizer in {str(tokenizer)!r} is code of its own (auto_map), which the lab does "
                    "not run: give a tokenizer of transformers, or encode the text yourself and write a file "
                    "of tokens with lab.step.write_tokens"
                ) from error
            raise _no_tokenizer(tokenizer) from error
        # Without the files of a tokenizer, some classes of transformers make one of special tokens alone.
        if not {*tokenize.get_vocab().values()} - {*tokenize.all_special_ids}:
            raise _no_tokenizer(tokenizer)
        tokens = torch.tensor(tokenize(text)["input_ids"])
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise DataError(
            f"the text has token {int(tokens.max())}, the model's vocabulary ends at {vocab_size - 1}: "
            "take the tokenizer that belongs to the model"
        )
    return tokens


def _no_tokenizer(directory: str | Path) -> DataError:
    return DataError(f"no tokenizer in {str(directory)!r}: give a directory that holds one")


def batch(tokens: Tensor, *, rows: int, length: int, step: int) -> Tensor:
    """The token ids of one training step, int64 [rows, length]: consecutive windows, over and over.

    A text that is shorter than one row is repeated until it fills one: all rows of all steps are then equal.

    Raises:
        DataError: the text has no tokens.
    """
    if not len(tokens):
        raise DataError("the text has no tokens: give a longer text, or another tokenizer")
    picked = windows(len(tokens), rows=rows, length=length, step=step)
    places = torch.stack([torch.arange(window.start, window.stop) for window in picked])
    return tokens[places % len(tokens)]


def windows(tokens: int, *, rows: int, length: int, step: int) -> list[range]:
    """The places of each row of one training step in a text of some tokens, as ``batch`` takes them.

    Places behind the last token mean those from the first one on. The step of N times the rows is N steps.
    """
    whole = max(tokens // length, 1)
    picked = [(step * rows + row) % whole for row in range(rows)]
    return [range(number * length, (number + 1) * length) for number in picked]


@cache
def _standard_library() -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    return "".join(t for f in sorted(folder.glob("*.py")) if (t := _decoded(f)) is not None)


def _decoded(file: Path) -> str | None:
    if not file.stat().st_size:
        return ""
    try:
        text = file.read_text(encoding="utf-8-sig")  # Editors on Windows begin files with a mark.
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
