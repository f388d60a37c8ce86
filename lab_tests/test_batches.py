import pytest
import torch

from lab.batches import shard_batch
from lab.recipe import Recipe


class Mesh:
    """As much of a device mesh as a batch asks for."""

    def __init__(self, ranks: int, rank: int):
        self.ranks, self.rank = ranks, rank

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank

    def get_group(self) -> None:
        return None


def shards(rows: int, tokens: int, ranks: int):
    ids = torch.arange(rows * tokens).view(rows, tokens)
    return ids, [shard_batch(ids, Recipe(), Mesh(ranks, rank)) for rank in range(ranks)]


@pytest.mark.parametrize(("rows", "ranks"), [(6, 3), (3, 4), (1, 3), (5, 2), (7, 1)])
def test_every_label_is_counted_exactly_once(rows, ranks):
    ids, batches = shards(rows, 11, ranks)
    labels = torch.cat([b.labels[b.labels != -100] for b in batches])
    assert sorted(labels.tolist()) == sorted(ids[:, 1:].flatten().tolist())
    assert all(b.label_count == len(labels) for b in batches)
    assert len({b.input_ids.shape for b in batches}) == 1


def test_labels_are_the_next_tokens():
    ids, [batch] = shards(2, 5, 1)
    assert batch.labels.tolist() == [[1, 2, 3, 4, -100], [6, 7, 8, 9, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert torch.equal(batch.input_ids, ids)
