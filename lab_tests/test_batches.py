"""The labels of a batch are counted once, however its tokens are sharded."""

import pytest
import torch

from lab.errors import RecipeError
from lab.recipe.recipe import Recipe
from lab.step.batches import IGNORED, shard_batch
from lab_tests.support.mesh import Mesh


def shards(rows: int, tokens: int, ranks: int, **knobs):
    ids = 1 + torch.arange(rows * tokens).view(rows, tokens)
    return ids, [shard_batch(ids, Recipe(**knobs), Mesh(ranks, rank)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("rows", "tokens", "ranks", "knobs"),
    [
        (6, 11, 3, {}), (3, 11, 4, {}), (1, 11, 3, {}), (5, 11, 2, {}), (7, 11, 1, {}),
        (2, 12, 4, {"ulysses": 4}), (3, 11, 6, {"ulysses": 3}), (5, 13, 4, {"ulysses": 2}),
        (2, 12, 3, {"ring": 3}), (1, 17, 4, {"ring": 2}), (3, 25, 12, {"ulysses": 3, "ring": 2}),
    ],
)  # fmt: skip
def test_every_label_is_counted_exactly_once_beside_its_own_token(rows, tokens, ranks, knobs):
    ids, batches = shards(rows, tokens, ranks, **knobs)
    kept = [b.labels != IGNORED for b in batches]
    labels = torch.cat([b.labels[k] for b, k in zip(batches, kept, strict=True)])
    before = torch.cat([b.input_ids[k] for b, k in zip(batches, kept, strict=True)])
    assert sorted(labels.tolist()) == sorted(ids[:, 1:].flatten().tolist())
    assert torch.equal(labels, before + 1)
    for b, k in zip(batches, kept, strict=True):
        positions = b.position_ids.expand_as(b.labels)[k]
        assert torch.equal((b.input_ids[k] - 1) % tokens, positions)
    assert all(b.label_count == len(labels) for b in batches)
    assert len({b.input_ids.shape for b in batches}) == 1


def test_a_ring_is_zigzag_and_each_rank_has_the_same_work():
    _, batches = shards(1, 12, 3, ring=3)
    assert [b.position_ids[0].tolist() for b in batches] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert len({int(b.position_ids.sum()) for b in batches}) == 1


def test_tokens_without_rows_are_refused():
    with pytest.raises(RecipeError, match=r"shape \[5\]: give \[rows, tokens\]; documents= says which"):
        shard_batch(torch.arange(5), Recipe(), Mesh(1, 0))
