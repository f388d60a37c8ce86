"""Sharding of a trainer's batch: each rank takes its part of every row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from lab.errors import RecipeError
from lab.techniques.agreement import check_same_batch, refuse_together
from lab.techniques.inputs import boolean_mask, check_right_padding
from lab.techniques.loss import IGNORED
from lab.techniques.ring import local_positions, token_multiple

INPUTS = ("input_ids", "labels", "attention_mask", "position_ids")
"""The keys that a batch may have."""

LISTED = f"{', '.join(INPUTS[:-1])} and {INPUTS[-1]}"

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "seq_lengths")
"""Keys by which the collators of transformers and TRL say where the documents of a row begin."""


def shard_rows(
    inputs: Mapping[str, Any],
    *,
    ulysses: int,
    ring: int,
    index: int,
    vocab_size: int,
    sequence: dist.ProcessGroup | None,
    everyone: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    """Return this rank's part of a batch, with labels that are shifted before the rows are divided.

    Letters: b rows of S tokens, s tokens of a row on one rank.

    Args:
        inputs: What a collator of transformers or TRL makes: ``input_ids`` and ``labels`` [b, S], with -100
            where nothing is predicted, and perhaps ``attention_mask`` [b, S] with padding at the end of rows
            and ``position_ids`` that count from 0. The label at place i is the token at place i.
        ulysses: C, the Ulysses degree.
        ring: R, the ring degree.
        index: The rank's number among the C*R ranks that share a sequence.
        vocab_size: The number of tokens in the model's vocabulary.
        sequence: The group of ranks that share a sequence, which must have the same batch; None for one rank.
        everyone: The group of all ranks, which all raise an error if one refuses its batch; None for one
            rank.

    Returns:
        ``input_ids`` and ``shifted_labels`` [b, s] and ``position_ids`` [1, s], with s = S/(C*R). Rows are
        first padded, so that ``token_multiple`` divides S. The label at place i is the token that follows
        place i.

    Raises:
        RecipeError: No ``input_ids`` or no ``labels``, or other shapes than [b, S]; packed documents; padding
            that is not at the end of a row; keys that are not in ``INPUTS``; labels on padding; tokens or
            labels that are not in the vocabulary.
        LabError: another rank refuses its batch; the ranks that share a sequence have different batches.
    """
    refuse_together(lambda: _check(inputs, vocab_size), everyone)
    input_ids, labels = inputs["input_ids"], inputs["labels"]
    check_same_batch(torch.stack([input_ids, labels]), None, sequence)
    tokens = input_ids.shape[1]
    padding = -tokens % token_multiple(ulysses, ring)
    positions = local_positions(tokens + padding, ulysses=ulysses, ring=ring, index=index).to(
        input_ids.device
    )
    # The last token predicts nothing, and neither does the padding.
    shifted = pad(labels[:, 1:], (0, 1 + padding), value=IGNORED)
    return {
        "input_ids": pad(input_ids, (0, padding))[:, positions],
        "shifted_labels": shifted[:, positions],
        "position_ids": positions[None],
    }


def _check(inputs: Mapping[str, Any], vocab_size: int) -> None:
    for name in ("input_ids", "labels"):
        if not isinstance(inputs.get(name), Tensor):
            raise RecipeError(
                f"a batch without {name}: the loss needs input_ids and labels, as a collator for language "
                "modeling makes them"
            )
    for name, value in inputs.items():
        if name in PACKED and value is not None:
            raise RecipeError(
                f"a batch with {name}, so with rows of several documents, which would attend to each other: "
                "set packing=False and padding_free=False, and take a collator that pads"
            )
        if name not in INPUTS and value is not None:
            tokenizer = " (a tokenizer takes return_token_type_ids=False)" if name == "token_type_ids" else ""
            raise RecipeError(
                f"a batch with {name}, which a recipe does not give to the model: it gives {LISTED} alone; "
                f"leave {name} out of the rows and of what the collator returns{tokenizer}"
            )
    input_ids, labels = inputs["input_ids"], inputs["labels"]
    if input_ids.dim() != 2 or input_ids.shape[1] < 2 or labels.shape != input_ids.shape:
        raise RecipeError(
            f"input_ids of shape {list(input_ids.shape)} with labels of shape {list(labels.shape)}: give two "
            "of shape [rows, tokens], with 2 tokens or more"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RecipeError(
            f"input_ids with token {wrong}: the model's vocabulary ends at {vocab_size - 1}; take the "
            "tokenizer that belongs to the model"
        )
    counted = labels[labels != IGNORED]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= vocab_size):
        raise RecipeError(
            f"labels outside of 0 to {vocab_size - 1}: give tokens of the model, or {IGNORED} where nothing "
            "is predicted"
        )
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise RecipeError(
                f"attention_mask of shape {list(mask.shape)}: give one of shape {list(input_ids.shape)}, 1 "
                "for tokens and 0 for padding at the end of rows"
            )
        is_token = boolean_mask(mask)
        check_right_padding(is_token)
        if bool((~is_token & (labels != IGNORED)).any()):
            raise RecipeError(f"labels on padding: give {IGNORED} there, so that padding is not predicted")
    if positions is not None:
        counted_up = torch.arange(input_ids.shape[1], device=positions.device)
        if not bool((positions == counted_up).all()):
            raise RecipeError(
                "position_ids that do not count from 0 in each row: packed documents are not supported; set "
                "packing=False and padding_free=False"
            )
