"""Text becomes batches of tokens."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig

import lab
from lab.commands.cli import main
from lab.errors import DataError
from lab.step import data


def test_the_standard_library_is_there_and_is_python():
    text = data.read_text()
    assert len(text) > 2**20
    assert "def " in text


def test_bytes_are_tokens():
    assert data.encode("Aé").tolist() == [65, 0xC3, 0xA9]


def test_the_mark_at_the_beginning_of_a_file_is_no_text(tmp_path):
    (tmp_path / "text").write_text("two", encoding="utf-8-sig")
    assert data.read_text(tmp_path / "text") == "two"


def test_a_folder_is_read_in_order_and_what_is_not_text_is_left_out(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one ")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    assert data.read_text(tmp_path) == "one two"


def test_batches_are_consecutive_and_start_again():
    tokens = torch.arange(23)
    assert data.batch(tokens, rows=2, length=5, step=0).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert data.batch(tokens, rows=2, length=5, step=2).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert data.batch(tokens, rows=3, length=5, step=1)[0].tolist() == [15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no text at .*: give a text file or a folder"),
        (b"", "holds no text"),
        (b"  \n", "holds no text"),
        (b"\xff\xfe\x01", "is not text: give a file in UTF-8"),
        (b"a\0b", "is not text: give a file in UTF-8"),
    ],
)
def test_a_text_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        data.read_text(path)


def test_what_is_no_file_of_text_is_refused(tmp_path, monkeypatch):
    """A pipe, a device, what Linux shows under /proc, a name that is too long, and a file beyond memory."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(DataError, match=r"no text at .*: give a text file or a folder"):
            data.read_text(path)
    for path in ("/proc/self/environ", "/proc/self/attr"):
        with pytest.raises(DataError, match="holds no text"):
            data.read_text(path)
    for path in ("x" * 5000, "/proc/self/mem"):
        with pytest.raises(DataError, match=r"cannot be read \(File name too long\): give|holds no text"):
            data.read_text(path)
    (tmp_path / "a.txt").write_text("text")
    for error, reason in (
        (MemoryError(), "it is larger than memory"),
        (OSError(5, "I/O error"), "I/O error"),
    ):
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=error))
        for path in (tmp_path, tmp_path / "a.txt"):
            with pytest.raises(
                DataError, match=rf"cannot be read \({reason}\): give a text file or a folder"
            ):
                data.read_text(path)


def test_an_empty_folder(tmp_path):
    with pytest.raises(DataError, match="holds no text: give a text file or a folder"):
        data.read_text(tmp_path)


def test_a_text_shorter_than_one_row_is_repeated():
    tokens = torch.tensor([7, 8, 9])
    assert data.batch(tokens, rows=2, length=4, step=3).tolist() == [[7, 8, 9, 7]] * 2
    assert data.batch(tokens, rows=1, length=8, step=0).tolist() == [[7, 8, 9, 7, 8, 9, 7, 8]]
    five_million = data.batch(data.encode(data.read_text()), rows=1, length=5 * 2**20, step=0)
    assert five_million.shape == (1, 5 * 2**20)


def test_a_text_without_a_token():
    with pytest.raises(DataError, match="the text has no tokens: give a longer text"):
        data.batch(torch.tensor([], dtype=torch.int64), rows=1, length=4, step=0)


@pytest.mark.parametrize("family", [None, "gemma3_text", "qwen3", "llama"])
def test_a_folder_without_a_tokenizer(tmp_path, family):
    """Of a config alone, transformers may make a tokenizer that knows special tokens and no others."""
    if family is not None:
        AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer in .*: give a directory that holds one"):
        data.encode("text", tokenizer=tmp_path)


def test_tokens_that_the_vocabulary_does_not_hold():
    with pytest.raises(DataError, match="the text has token 122, the model's vocabulary ends at 99"):
        data.encode("z", vocab_size=100)


def test_a_tokenizer_from_a_directory(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"long": 0, "context": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    assert data.encode("long long context x", tokenizer=tmp_path).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("known", [False, True])
def test_the_code_of_a_tokenizer_is_not_run_and_nothing_is_asked(tmp_path, monkeypatch, known):
    """Whether or not transformers has a tokenizer of the same class."""
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\nclass LlamaTokenizer: pass"
    (tmp_path / "own.py").write_text(code)
    name = "LlamaTokenizer" if known else "Own"
    settings = {"tokenizer_class": name, "auto_map": {"AutoTokenizer": [f"own.{name}", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", Mock(return_value="y"))
    said = "no tokenizer in" if known else r"is code of its own .* lab\.step\.write_tokens$"
    with pytest.raises(DataError, match=said):
        data.encode("text", tokenizer=tmp_path)
    assert not (tmp_path / "ran").exists()
    input.assert_not_called()


@pytest.mark.parametrize("path", ["", 5, []])
def test_a_text_that_is_no_path_is_refused(path):
    with pytest.raises(DataError) as error:
        lab.rehearse(text=path, tokens=40, ranks=1, machine="cpu")
    assert str(error.value) == f"text={path!r}: give the path of a text file or of a folder of text files"


def test_an_empty_text_option_is_refused():
    words = ["rehearse", "tiny", "--tokens", "40", "--ranks", "1", "--machine", "cpu", "--text"]
    run = CliRunner().invoke(main, [*words, ""])
    assert run.exit_code == 2
    assert run.stderr == "lab: Invalid value for '--text': '' is not a path: give one such as runs/first.\n"
