"""Rows of several documents in Trainer and SFTTrainer: the losses of plain trainers, which build masks.

Seen red: documents that the recipe's model does not get, keys that are not compared with positions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening
from trl import SFTConfig, SFTTrainer

from cluster.ranks import Cluster
from lab.errors import RecipeError
from lab.hf.batches import shard_rows
from lab.hf.ranks import fresh_process
from lab.techniques.rope import apply_rope
from lab_tests.support.small_trainings import (
    LONGEST,
    Case,
    Outcome,
    assert_same,
    long_trainer,
    model,
    outcome,
    plain_trainer,
    rows,
    settings,
    tokenizer,
)
from lab_tests.support.trainers import launch

# PEFT asks a model for what transformers is about to call otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)

FLAT = {
    "upipe": Case(rows=3, accumulate=2, steps=3),
    "streamed, adapters": Case("streamed", lora=True, rows=3, steps=3),
    "groups of ranks": Case(knobs={"ulysses": 2, "ring": 1}, rows=2, plain_rows=4, steps=3),
    "ddp": Case("checkpoint", knobs={"fsdp": False, "ulysses": 1, "ring": 1}, rows=1, plain_rows=4, steps=3),
}
EVEN = 12
"""Rows that the batches of an evaluation divide, on one group of ranks and on four."""

PACKED = Case(sft=True, rows=2, steps=3)


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except RecipeError as error:
        return str(error)
    return ""


def flat_trainings(folder: Path) -> dict[str, Any]:
    """Runs on ranks."""
    results: dict[str, Any] = {}
    for name, case in FLAT.items():
        trainer = long_trainer(case, folder / name)
        trainer.data_collator = flatten
        if name == "groups of ranks":
            # Seven rows fill no batch of two groups.
            results["uneven"] = refusal(trainer.evaluate)
        trainer.eval_dataset = rows()[:EVEN]
        results[name] = outcome(trainer)
    results["packed"] = outcome(long_trainer(PACKED, folder / "packed", packing=True))
    return results


@pytest.fixture(scope="module")
def on_four(ranks4: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(ranks4, 4, flat_trainings, tmp_path_factory.mktemp("on_four"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAT)
def test_a_flattened_batch(name: str, on_four: list[dict[str, Any]], tmp_path: Path) -> None:
    case = FLAT[name]
    with fresh_process():
        padded = outcome(plain_trainer(case, tmp_path / "padded"))
    with fresh_process():
        trainer = plain_trainer(case, tmp_path / "flat")
        trainer.data_collator = flatten
        trainer.eval_dataset = rows()[:EVEN]
        flat = outcome(trainer)
    # Padded rows are the same documents, one a row; their evaluation has other means of means.
    assert_same(Outcome(flat.losses, flat.norms, 0.0), Outcome(padded.losses, padded.norms, 0.0))
    for rank in on_four:
        evaluation = rank[name].evaluation if case.plain_rows is None else flat.evaluation
        assert_same(Outcome(rank[name].losses, rank[name].norms, evaluation), flat)


@pytest.mark.slow
def test_packed_rows_of_trl(on_four: list[dict[str, Any]], tmp_path: Path) -> None:
    with fresh_process():
        made = model(PACKED)
        apply_rope(made)
        args: Any = SFTConfig(
            packing=True, bf16=False, max_length=LONGEST, per_device_train_batch_size=PACKED.rows,
            activation_checkpointing=False, **settings(PACKED, tmp_path),
        )  # fmt: skip
        data = Dataset.from_list(rows())
        trainer = SFTTrainer(
            made, args, train_dataset=data, eval_dataset=data.select(range(7)), processing_class=tokenizer()
        )
        plain = outcome(trainer)
    for rank in on_four:
        assert_same(rank["packed"], plain)


@pytest.mark.slow
def test_documents_that_accelerate_would_repeat_are_refused(on_four: list[dict[str, Any]]) -> None:
    words = "a last batch of documents in one row, where groups of ranks have rows of their own: "
    assert all(rank["uneven"].startswith(words) for rank in on_four), on_four[0]["uneven"]


# ---- batches -----------------------------------------------------------------------------------------------

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
        ({"seq_lengths": IDS}, "a batch with seq_lengths, which a recipe does not give to the model"),
        ({"ring": 2}, "several documents in a row with ring=2, .*set ring=1"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        part_of(**more)
    assert "\n" not in str(caught.value)
