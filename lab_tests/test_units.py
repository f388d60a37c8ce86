"""Numbers of tokens and bytes as text."""

import pytest

from lab.errors import LabError
from lab.units import (
    GiB,
    Mi,
    TiB,
    format_bytes,
    format_share,
    format_tokens,
    parse_bytes,
    parse_tokens,
    round_tokens,
)


def test_tokens_are_binary_as_in_the_papers():
    assert parse_tokens("5M") == 5 * Mi == 5_242_880
    assert parse_tokens("128k") == 131_072
    assert parse_tokens("0.5M") == 524_288
    assert parse_tokens(1000) == 1000
    assert parse_tokens(2**53 + 1) == 2**53 + 1
    assert parse_tokens("0.0009765625M") == 1024


def test_bytes():
    assert parse_bytes("80GiB") == 80 * GiB
    assert parse_bytes("2 TiB") == 2 * TiB
    assert parse_bytes("12345") == 12345
    assert parse_bytes("79.2GiB") == 85040352460
    assert parse_bytes("1.00 PiB") == 1024 * TiB


@pytest.mark.parametrize("text", ["", "many", "-1", "0", "1.5", "5G", "3X", "9" * 400 + "M", 0, -1])
def test_what_is_no_number_of_tokens_is_refused_with_examples(text):
    with pytest.raises(LabError, match=r"is not a number of tokens: write 8192, 128K or 5M"):
        parse_tokens(text)


@pytest.mark.parametrize("text", ["80GB", "-3GiB", "much", "0", "1.5", "0.0001KiB"])
def test_what_is_no_amount_of_memory_is_refused_with_examples(text):
    with pytest.raises(LabError, match=r"is not an amount of memory: write 80GiB, 512MiB"):
        parse_bytes(text)


def test_printing():
    assert format_tokens(5 * Mi) == "5M"
    assert format_tokens(3 * 2**10) == "3K"
    assert format_tokens(1000) == "1000"
    assert format_bytes(15 * GiB) == "15.0 GiB"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(700) == "700 B"
    assert [round_tokens(tokens) for tokens in (1000, 3 * 2**10, Mi, 6949888)] == [
        "1000",
        "3K",
        "1.00M",
        "6.63M",
    ]
    assert format_share(60 * GiB, 80 * GiB) == " of 80.0 GiB (75%)"
    assert format_share(60 * GiB, None) == ""
    assert format_share(60 * GiB, 0) == " of 0 B"
