"""Odd command lines: each answers with one line and exit code 2, before anything is started."""

import json
import shlex
from pathlib import Path

import pytest

from lab_tests.support.commands import refusal

HUGE = "9" * 400
BEYOND = str(2**63)
PRODUCT = str(2**63 - 1)
"""A count by itself, and no longer one when it is multiplied."""
MANY = 1_000_000
ARABIC, FULL_WIDTH = "\u0661\u0662", "\uff11\uff12"
SIZES = [
    HUGE, f"{HUGE}M", BEYOND, f"{BEYOND}K", "1e400", "nan", "inf", "-5", "0", "1.5", "", ARABIC, FULL_WIDTH,
    "1_000",
]  # fmt: skip
COUNTS = [HUGE, BEYOND, "-1", "0", "1.5", "nan", "", ARABIC, FULL_WIDTH, "0x10"]
BYTES = [HUGE, f"{HUGE}GiB", "nanGiB", "infGiB", "-1GiB", "0", "", "80 GB GB", f"{ARABIC}GiB"]
NUMBERS = ["nan", "inf", "-1", "0", HUGE, "", ARABIC, "one"]
LONG = "a" * 300
DEEP = "a/" * 3000

MODELS = ["", ".", "/dev/null", LONG, DEEP, "\0", "a\nb"]

PLAN = "plan tiny --ranks 4 --tokens 1K"
RUN = "run tiny --ranks 2 --tokens 64 --steps 1"
TRAIN = "train tiny --ranks 2 --tokens 64 --steps 1 --checkpoint new"
REHEARSE = "rehearse tiny --ranks 4 --tokens 64 --machine cpu"


def with_value(words: str, option: str, values: list[str]) -> list[str]:
    """The command line with each of the values; click takes the last one of an option that is given twice."""
    return [f"{words} {option}={shlex.quote(value)}" for value in values]


COMMANDS = [
    "export ~nobody-has-this-name/x new",
    *with_value(TRAIN, "--checkpoint", ["", "~nobody-has-this-name/x", "\0"]),
    *with_value(TRAIN, "--text", ["", "~nobody-has-this-name/x", "\0"]),
    "cluster show slurm --set 'account=a\nb'",
    *with_value("cluster show slurm --set", "nodes", ["two", "", "0", "-1", "\u00b2"]),
    *with_value(PLAN, "--tokens", SIZES),
    *with_value(PLAN, "--ranks", [*COUNTS, str(MANY)]),
    *with_value(PLAN, "--rows", [*COUNTS, PRODUCT, str(2**39)]),
    *with_value(PLAN, "--tokens", [PRODUCT, str(2**30 + 1), f"{2**20}M"]),
    *with_value("plan tiny --ranks 1 --rows 8", "--tokens", ["1024M", "512M"]),
    *with_value(PLAN, "--ranks-per-node", COUNTS),
    *with_value(PLAN, "--device-memory", BYTES),
    *with_value(PLAN, "--host-memory", BYTES),
    *with_value(PLAN, "--device", ["", "k80", LONG]),
    *with_value(PLAN, "--dtype", ["", "fp8", "bf16", LONG]),
    *with_value(PLAN, "--recipe", ["", "plane", LONG, "'plain '"]),
    *with_value(PLAN, "--set", [
        "", "=", "=3", "mlp_tile", "mlp_tile=", "mlp_tile==3", f"mlp_tile={HUGE}", f"mlp_tile={BEYOND}",
        "mlp_tile=nan", f"ulysses={HUGE}", f"ring={BEYOND}", "head_chunk=-4", f"{LONG}=1", "fsdp=yes",
        "offload=None",
    ]),
    *(f"plan {shlex.quote(model)} --tokens 1K --ranks 4" for model in MODELS),
    f"ladder tiny --ranks {MANY} --tokens 1K",
    f"max-context tiny --ranks {MANY} --device-memory 1GiB",
    f"max-context tiny --ranks 4 --device-memory {HUGE}GiB",
    f"fit tiny --ranks {MANY} --tokens 1K --device-memory 1GiB",
    f"fit tiny --ranks 4 --tokens {HUGE} --device-memory 1GiB",
    "ladder tiny --ranks 4 --tokens 1K --figure x.xyz",
    "ladder tiny --ranks 4 --tokens 1K --figure folder",
    "ladder tiny --ranks 4 --tokens 1K --figure file/x.png",
    f"rehearse tiny --ranks {MANY} --tokens 64 --machine cpu",
    *with_value(REHEARSE, "--layers", [HUGE, "0", "5", "-1", ARABIC]),
    *with_value(REHEARSE, "--steps", [HUGE, BEYOND, "-1", ARABIC]),
    *with_value(REHEARSE, "--device-memory", ["nan", "0", HUGE]),
    *with_value(RUN, "--tokens", [HUGE, "0", "1", "nan"]),
    *with_value(RUN, "--ranks", [*COUNTS, str(MANY)]),
    *with_value(RUN, "--steps", COUNTS),
    *with_value(RUN, "--device-memory", ["nan", "0"]),
    *with_value(RUN, "--seed", [HUGE, BEYOND, "-1", "1.5"]),
    *with_value(RUN, "--tokens", [str(2**40)]),
    *(f"{words} --accumulate {PRODUCT}" for words in (RUN, TRAIN)),
    f"fit tiny --ranks 4 --tokens {2**40} --device-memory 1GiB",
    *with_value(REHEARSE, "--rows", [PRODUCT]),
    *with_value(RUN, "--text", ["/nowhere", "empty", LONG, "a" * 5000, "/proc/self/attr", "/dev/null"]),
    *with_value(RUN, "--tokenizer", ["/nowhere", "folder", "broken_tokenizer"]),
    *with_value(RUN, "--profile", ["", "nowhere"]),
    *with_value(TRAIN, "--timeout", [*NUMBERS, "1e-9"]),
    *with_value(TRAIN, "--start-timeout", [*NUMBERS, "1e-9"]),
    *with_value(TRAIN, "--every", COUNTS),
    *with_value(TRAIN, "--keep", COUNTS),
    *with_value(TRAIN, "--seed", [HUGE, BEYOND, "-1"]),
    *with_value(TRAIN, "--lr", ["nan", "inf", "-1", HUGE]),
    *with_value(TRAIN, "--clip-norm", ["nan", "-1", "0", HUGE]),
    *with_value(TRAIN, "--checkpoint", ["file", "file/below", LONG]),
    "export nowhere out",
    "export folder file",
    *with_value("export folder new", "--max-file", BYTES),
    *(f"execute {name}" for name in ["not_json.ipynb", "future.ipynb", "syntax.ipynb", "folder", LONG]),
    *with_value("execute 00_memory_wall", "--out", ["file", "file/below", LONG]),
    "execute 00_memory_wall -p nothing 3",
    "execute 00_memory_wall -p tokens '3('",
    *with_value("bench gpu --out new", "--minutes", ["nan", "inf", "-1", "0", HUGE]),
    *with_value("open", "--port", ["0", "65536", HUGE, ARABIC + "x"]),
    f"{PLAN} --set mlp_tile={HUGE * 13}",
    "cluster show local --set name=x",
    *with_value("cluster show local", "--ranks", ["99999999999999999999", ARABIC, "0"]),
]  # fmt: skip


def notebook(source: str, **document: object) -> str:
    cell = {
        "cell_type": "code", "id": "a", "execution_count": None, "metadata": {"tags": ["parameters"]},
        "outputs": [], "source": source,
    }  # fmt: skip
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell], **document})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command lines name."""
    place = tmp_path_factory.mktemp("odd")
    (place / "folder").mkdir()
    (place / "file").write_text("x")
    (place / "empty").touch()
    (place / "broken_tokenizer").mkdir()
    (place / "broken_tokenizer" / "tokenizer.json").write_text("{}")
    (place / "broken_tokenizer" / "tokenizer_config.json").write_text("{}")
    (place / "not_json.ipynb").write_text("hello")
    (place / "future.ipynb").write_text(notebook("a = 1", nbformat=9))
    (place / "syntax.ipynb").write_text(notebook("a = = 3"))
    return place


def short(words: str) -> str:
    return words.replace(HUGE, "HUGE").replace(LONG, "LONG").replace(DEEP, "DEEP")


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: ascii(short(words)))
def test_an_odd_command_line_answers_with_one_line(
    words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    assert len(refusal(words)) < 700
    assert sorted(place.iterdir()) == before
