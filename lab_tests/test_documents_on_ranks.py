"""Documents in one row on several ranks, against transformers' own model on each document alone.

Seen red: documents that see each other, positions that do not restart, a label that crosses the border of two
documents, lengths that are off by one; ranks with other documents.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cluster.ranks import Cluster
from lab.errors import LabError
from lab.recipe.ladder import RECIPE_NAMES, resolve_recipe
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab_tests.support.documents import DOCUMENTS, TOKENS, relative_errors, save, token_ids

pytestmark = pytest.mark.long

MODELS = (("llama", 40, 8), ("gpt_oss", 28, 4))
"""The family, the query heads and the key/value heads."""

EVERYTHING = Recipe(
    fsdp=True, ulysses=2, head_chunk=4, overlap=True, attention_tile=7, checkpoint=True, offload="attention",
    mlp_tile=5, norm_tile=8, loss_tile=7, optimizer="host",
)  # fmt: skip
FURTHER = {
    "everything": EVERYTHING,
    "streamed, kept attention": replace(
        EVERYTHING, mlp_tile=None, norm_tile=8, stream=5, segment=2, optimizer="device"
    ),
    "replicas": Recipe(ulysses=2, head_chunk=2),
}


@pytest.fixture(scope="module")
def ranks2():
    with Cluster(ranks=2) as cluster:
        yield cluster


def recipes(folder, ranks):
    """Return the named recipes and three with more knobs; those with a ring are refused."""
    named = {n: resolve_recipe(n, folder, ranks, TOKENS, compute_dtype=None) for n in RECIPE_NAMES}
    assert all(recipe.ring == 1 for recipe in named.values())
    return named | FURTHER


def assert_exact(cluster, folder, ranks):
    work = recipes(folder, ranks)
    for rank in cluster.apply(relative_errors, [(folder, recipe) for recipe in work.values()]):
        for name, errors in zip(work, rank, strict=True):
            assert max(errors) < 1e-9, name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_every_recipe_on_four_ranks(ranks4, tmp_path, model):
    assert_exact(ranks4, save(tmp_path, *model), 4)


def test_every_recipe_on_two_ranks(ranks2, tmp_path):
    assert_exact(ranks2, save(tmp_path, *MODELS[0]), 2)


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
