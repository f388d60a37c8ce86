"""Sharding of a trainer's batch: each rank takes its part of every row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import DataCollatorWithFlattening

from lab.errors import RecipeError
from lab.techniques.agreement import check_same_batch, refuse_together
from lab.techniques.attention.documents import document_positions, documents_of
from lab.techniques.document_lengths import Lengths, last_longer, several_or_none
from lab.techniques.inputs import boolean_mask, check_right_padding
from lab.techniques.loss import IGNORED
from lab.techniques.ring import local_positions, row_padding

INPUTS = ("input_ids", "labels", "attention_mask", "position_ids")
"""The keys that a batch may have."""

LISTED = f"{', '.join(INPUTS[:-1])} and {INPUTS[-1]}"

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys by which the collators of transformers and TRL also say where the documents of a row begin."""

SHIFTED = "shift_labels"
"""The key of labels that a collator has shifted. As in transformers, they count, and ``labels`` do not."""

BATCH_KEYS = (*INPUTS, SHIFTED, *PACKED)
"""Every key of a batch."""


def flattens(collator: object) -> bool:
    """Return whether a collator makes one row of the documents of a batch."""
    return isinstance(collator, DataCollatorWithFlattening) or bool(getattr(collator, "padding_free", False))


def shard_rows(
    inputs: Mapping[str, Any],
    *,
    ulysses: int,
    ring: int,
    exchange: str = "send",
    index: int,
    vocab_size: int,
    sequence: dist.ProcessGroup | None,
    everyone: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Return this rank's part of a batch, with labels that are shifted before the rows are divided.

    Letters: b rows of S tokens, s tokens of a row on one rank.

    Args:
        inputs: What a collator of transformers or TRL makes: ``input_ids`` and ``labels`` [b, S], with -100
            where nothing is predicted, and perhaps ``attention_mask`` [b, S] with padding at the end of rows
            and ``position_ids`` that count from 0 in each document of a row. The label at place i is the
            token at place i. With ``shift_labels`` [b, S], the label at place i is the one that follows it,
            and ``labels`` do not count. The keys of ``PACKED`` must say the same as ``position_ids``.
        ulysses: C, the Ulysses degree.
        ring: R, the ring degree.
        exchange: How the ranks of a ring exchange keys and values, "send" or "gather".
        index: The rank's number among the C*R ranks that share a sequence.
        vocab_size: The number of tokens in the model's vocabulary.
        sequence: The group of ranks that share a sequence, which must have the same batch; None for one rank.
        everyone: The group of all ranks, which all raise an error if one refuses its batch; None for one
            rank.

    Returns:
        ``input_ids`` and ``shifted_labels`` [b, s] and ``position_ids`` [1, s], with s = S/(C*R). Rows are
        first padded, so that ``token_multiple`` divides S. The label at place i is the token that follows
        place i. ``padding`` is the number of tokens that were added to a row. If a row has several documents,
        also their lengths, ``documents``, and ``position_ids`` are [b, s] if the rows have different ones.

    Raises:
        RecipeError: No ``input_ids`` or no labels, or other shapes than [b, S]; several documents in a
            row with a ring that sends, with labels that one predicts of the next, or that other keys
            contradict; padding that is not at the end of a row; keys that are not in ``INPUTS``; labels on
            padding; tokens or labels that are not in the vocabulary.
        LabError: another rank refuses its batch; the ranks that share a sequence have different batches.
    """
    shifted, documents = refuse_together(lambda: _check(inputs, vocab_size, ring, exchange), everyone)
    input_ids = inputs["input_ids"]
    check_same_batch(torch.stack([input_ids, shifted]), None, sequence, documents=documents)
    tokens = input_ids.shape[1]
    padding = row_padding(tokens, ulysses, ring)
    positions = local_positions(tokens + padding, ulysses=ulysses, ring=ring, index=index).to(
        input_ids.device
    )
    part = {
        "input_ids": pad(input_ids, (0, padding))[:, positions],
        "shifted_labels": pad(shifted, (0, padding), value=IGNORED)[:, positions],
        "position_ids": positions[None],
        "padding": padding,
    }
    if documents is None:
        return part
    documents = last_longer(documents, padding)
    own = document_positions(documents, input_ids.device)[:, positions]
    return {**part, "position_ids": own, "documents": documents}


def _check(
    inputs: Mapping[str, Any], vocab_size: int, ring: int, exchange: str
) -> tuple[Tensor, Lengths | None]:
    """Check a batch; return its shifted labels [b, S], and the documents of its rows, None if each is one."""
    name_of_labels = "labels" if inputs.get(SHIFTED) is None else SHIFTED
    for name in ("input_ids", name_of_labels):
        if not isinstance(inputs.get(name), Tensor):
            raise RecipeError(
                f"a batch without {name}: the loss needs input_ids and labels, as a collator for language "
                "modeling makes them"
            )
    for name, value in inputs.items():
        if name in PACKED and value is not None and inputs.get("position_ids") is None:
            raise RecipeError(
                f"a batch with {name} and without position_ids, which say where documents begin: let the "
                "collator return them (DataCollatorWithFlattening takes return_position_ids=True)"
            )
        if name not in BATCH_KEYS and value is not None:
            tokenizer = " (a tokenizer takes return_token_type_ids=False)" if name == "token_type_ids" else ""
            raise RecipeError(
                f"the batch has {name}; with a recipe the model gets only {LISTED}: remove {name} from the "
                f"rows or the collator{tokenizer}"
            )
    input_ids, given = inputs["input_ids"], inputs[name_of_labels]
    if input_ids.dim() != 2 or input_ids.shape[1] < 2 or given.shape != input_ids.shape:
        raise RecipeError(
            f"input_ids of shape {list(input_ids.shape)} with {name_of_labels} of shape {list(given.shape)}: "
            "give two of shape [rows, tokens], with 2 tokens or more"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RecipeError(
            f"input_ids with token {wrong}: the model's vocabulary ends at {vocab_size - 1}; take the "
            "tokenizer that belongs to the model"
        )
    if given.is_floating_point():
        raise RecipeError(
            f"{name_of_labels} in {given.dtype}: give whole numbers, those of the tokens to predict"
        )
    counted = given[given != IGNORED]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= vocab_size):
        raise RecipeError(
            f"{name_of_labels} outside of 0 to {vocab_size - 1}: give tokens of the model, or {IGNORED} "
            "where nothing is predicted"
        )
    # The label at place i, up to place S, is the token at place i. The last token of a row predicts that of
    # place S, which ``shift_labels`` alone can have.
    labels = pad(given, (0, 1) if name_of_labels == "labels" else (1, 0), value=IGNORED)
    shifted, counts = labels[:, 1:], labels != IGNORED
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    is_token = None
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise RecipeError(
                f"attention_mask of shape {list(mask.shape)}: give one of shape {list(input_ids.shape)}, 1 "
                "for tokens and 0 for padding at the end of rows"
            )
        is_token = boolean_mask(mask)
        check_right_padding(is_token)
        # A label after the row is on padding if the row ends with padding.
        on_padding = ~torch.cat([is_token, is_token[:, -1:]], dim=1)
        if bool((on_padding & counts).any()):
            raise RecipeError(f"labels on padding: give {IGNORED} there, so that padding is not predicted")
    if positions is None:
        return shifted, None
    if positions.shape not in (input_ids.shape, (1, input_ids.shape[1])):
        raise RecipeError(
            f"position_ids of shape {list(positions.shape)}: give one of shape {list(input_ids.shape)}"
        )
    lengths = documents_of(positions.expand_as(input_ids), is_token)
    starts = document_positions(lengths, given.device).expand_as(given) == 0
    _check_packed(inputs, lengths, starts)
    if bool((starts & counts[:, :-1])[:, 1:].any()):
        raise RecipeError(
            f"labels at the first token of a document, which the document before it would predict: give "
            f"{IGNORED} there, as DataCollatorWithFlattening does"
        )
    return shifted, several_or_none(lengths, ring, exchange)


def _check_packed(inputs: Mapping[str, Any], lengths: Lengths, starts: Tensor) -> None:
    """Refuse keys of ``PACKED`` that contradict the documents.

    Args:
        inputs: The batch.
        lengths: The documents of its rows.
        starts: [b, S], whether a token is the first of a document.

    Raises:
        RecipeError: The first key that does.
    """
    flat = [length for of_row in lengths for length in of_row]
    ends = torch.tensor([0, *flat]).cumsum(0)
    expected = {
        "cu_seq_lens": lambda value: value.shape == ends.shape and bool((value.cpu() == ends).all()),
        "max_length": lambda value: int(value) >= max(flat),
        "seq_idx": lambda value: (
            value.shape == starts.shape and bool(((value.diff(dim=1) != 0) == starts[:, 1:]).all())
        ),
    }
    for name in PACKED:
        value = inputs.get(name)
        if value is not None and not expected[name.removesuffix("_q").removesuffix("_k")](value):
            raise RecipeError(
                f"{name} and position_ids have other documents: let one collator make both, and begin each "
                "document at position 0"
            )
