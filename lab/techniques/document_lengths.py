"""The lengths of the documents in rows, without torch."""

from __future__ import annotations

from lab.errors import RecipeError
from lab.units import abbreviate

Lengths = tuple[tuple[int, ...], ...]
"""Of each row, the tokens of its documents, in their order."""


def check_documents(documents: object, rows: int, tokens: int) -> Lengths:
    """Return the lengths of documents that a caller has given for rows of tokens.

    Raises:
        RecipeError: They are not a list of whole numbers for each row, are less than 1, or do not add up to
            the tokens of a row.
    """
    if not isinstance(documents, list | tuple) or not all(isinstance(row, list | tuple) for row in documents):
        raise RecipeError("documents: give a list of lengths for each row, such as [[5, 20, 19]] for one row")
    if len(documents) != rows:
        raise RecipeError(f"documents of {len(documents)} rows for input_ids of {rows}: give each row's")
    for row, lengths in enumerate(documents):
        wrong = next((n for n in lengths if type(n) is not int or n < 1), None)
        if wrong is not None:
            raise RecipeError(
                f"documents of row {row} with a length of {abbreviate(repr(wrong))}: a document has 1 token "
                "or more"
            )
        if sum(lengths) != tokens:
            raise RecipeError(
                f"documents of row {row} have {sum(lengths)} tokens together, and the row has {tokens}: give "
                "lengths that add up to the row's tokens"
            )
    return tuple(tuple(lengths) for lengths in documents)


def several_or_none(lengths: Lengths, ring: int, exchange: str) -> Lengths | None:
    """Return the documents; None if each row is one, which needs nothing of its own.

    Raises:
        RecipeError: A row has several documents, R = ``ring`` is more than 1, and ``exchange`` is "send".
    """
    if all(len(of_row) == 1 for of_row in lengths):
        return None
    if ring > 1 and exchange == "send":
        raise RecipeError(
            f"several documents in a row with ring={ring}, whose ranks have pieces of documents: set "
            "ring_exchange='gather', or ring=1 and shard the sequence by ulysses, with or without head_chunk "
            "or stream"
        )
    return lengths


def last_longer(lengths: Lengths, padding: int) -> Lengths:
    """Return the documents with so many more tokens in the last one of each row."""
    return tuple((*of_row[:-1], of_row[-1] + padding) for of_row in lengths)
