"""Rows of a token file for Trainer."""

import re

import pytest
import torch
from transformers import default_data_collator

from lab.errors import DataError
from lab.hf import TokenRows
from lab.step import write_tokens

TOKENS = torch.arange(7, 7 + 23) * 3 % 61


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.uint16.bin"
    write_tokens(TOKENS, path)
    return path


def test_rows_follow_each_other(file):
    rows = TokenRows(file, tokens=5, vocab_size=61)
    assert len(rows) == 4
    batch = default_data_collator([rows[1], rows[3]])
    assert batch["input_ids"].tolist() == [TOKENS[5:10].tolist(), TOKENS[15:20].tolist()]
    assert batch["labels"].tolist() == batch["input_ids"].tolist()
    assert [len(row["input_ids"]) for row in rows] == [5] * 4


def test_a_text_has_rows_of_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefg")
    [first, second] = TokenRows(path, tokens=3, vocab_size=256)
    assert bytes(second["input_ids"].tolist()) == b"def"
    assert first["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 24, "vocab_size": 61}, "has 23 tokens, fewer than a row of 24"),
        ({"tokens": 5, "vocab_size": 60}, "has token 60 at place"),
    ],
)
def test_what_is_no_row_is_refused(file, arguments, message):
    with pytest.raises(DataError, match=re.escape(message)):
        [*TokenRows(file, **arguments)]
