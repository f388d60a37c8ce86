"""Documents in one row on several ranks: DeepSpeed's exchange has the gradients of each document alone.

Seen red: ranks with other documents. All other recipes are in the table of cases.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cluster.ranks import Cluster
from lab.errors import LabError
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab_tests.support.documents import DOCUMENTS, TOKENS, relative_errors, save, token_ids

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ranks2():
    with Cluster(ranks=2) as cluster:
        yield cluster


@pytest.mark.usefixtures("_fresh_ranks_after_deepspeed")
def test_the_exchange_of_deepspeed(ranks4, tmp_path):
    pytest.importorskip("deepspeed")
    folder = save(tmp_path)
    for [errors] in ranks4.apply(relative_errors, [(folder, Recipe(ulysses=2, ulysses_backend="deepspeed"))]):
        assert max(errors) < 1e-9


def refusals():
    """Return what each rank says to documents or positions that another rank does not have."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    others = positions.clone()
    others[0] = torch.arange(TOKENS)
    cases = (
        {"documents": [[5, 21, 18], *DOCUMENTS[1:]] if rank == 1 else DOCUMENTS},
        {"documents": None if rank == 1 else DOCUMENTS},
        {"documents": [[44]] if rank == 1 else DOCUMENTS},
        {"position_ids": others if rank == 1 else positions},
        {"position_ids": None if rank == 1 else positions},
    )
    said = []
    for given in cases:
        try:
            shard_batch(token_ids(), Recipe(ulysses=2), mesh, **given)
            said.append("taken")
        except LabError as error:
            said.append(str(error))
    return said


def test_ranks_with_other_documents_are_refused(ranks2):
    message = "the tokens, the mask or the documents differ on rank"
    for said in ranks2.apply(refusals):
        assert len(said) == 5
        assert all(one.startswith(message) for one in said), said
