"""Batches of several documents in Trainer: this rank's part of them, and keys that contradict each other.

Seen red: keys that are not compared with positions. The losses are in ``test_hf_trainer.py``.
"""

from typing import Any

import pytest
import torch

from lab.errors import RecipeError
from lab.hf.batches import shard_rows

IDS = torch.arange(8)[None]
BATCH = {
    "input_ids": IDS,
    "labels": torch.tensor([[-100, 1, 2, -100, 4, 5, 6, -100]]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]]),
    "cu_seq_lens_q": torch.tensor([0, 3, 7, 8], dtype=torch.int32),
    "max_length_k": 4,
    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]], dtype=torch.int32),
}


def part_of(ring: int = 1, **more: Any) -> dict[str, Any]:
    return shard_rows(BATCH | more, ulysses=3, ring=ring, index=1, vocab_size=9, sequence=None, everyone=None)


def test_a_part_of_several_documents() -> None:
    part = part_of()
    assert part["documents"] == ((3, 4, 2),)
    assert part["input_ids"].tolist() == [[3, 4, 5]]
    assert part["shifted_labels"].tolist() == [[4, 5, 6]]
    assert part["position_ids"].tolist() == [[0, 1, 2]]


def test_one_document_is_a_plain_part() -> None:
    more = {"position_ids": torch.arange(8)[None], "cu_seq_lens_q": None, "seq_idx": None, "max_length_k": 8}
    assert part_of(**more).keys() == {"input_ids", "shifted_labels", "position_ids", "padding"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 3, 8])}, "cu_seq_lens_q and position_ids have other documents"),
        ({"cu_seq_lens_k": torch.tensor([0, 4, 7, 8])}, "cu_seq_lens_k and position_ids have other doc"),
        ({"max_length_k": 3}, "max_length_k and position_ids have other documents"),
        ({"seq_idx": torch.zeros(1, 8)}, "seq_idx and position_ids have other documents"),
        ({"seq_idx": torch.arange(8)[None]}, "seq_idx and position_ids have other documents"),
        ({"labels": IDS}, "labels at the first token of a document, .*give -100 there"),
        ({"position_ids": None}, "with cu_seq_lens_q and without position_ids, .*return_position_ids"),
        ({"position_ids": BATCH["position_ids"] + 2}, "position_ids of row 0 have 2 at token 0"),
        ({"position_ids": torch.arange(7)[None]}, r"position_ids of shape \[1, 7\]: give one of shape"),
        ({"seq_lengths": IDS}, "the batch has seq_lengths; with a recipe the model gets only "),
        ({"ring": 2}, "several documents in a row with ring=2, .*set ring_exchange='gather', or ring=1"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        part_of(**more)
    assert "\n" not in str(caught.value)
