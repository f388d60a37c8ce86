"""What other projects assert of sequence parallelism in trainers, asserted of the lab's."""

import os

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState

from lab_tests.support.trainers import launch


def what_accelerate_sees():
    state, one = PartialState(cpu=True), torch.ones(1)
    dist.all_reduce(one)
    return state.num_processes, state.process_index, int(one), os.environ["LOCAL_RANK"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_accelerate_takes_ranks_for_processes_of_torchrun(ranks, ranks4):
    wanted = [(ranks, rank, ranks, str(rank)) for rank in range(ranks)]
    assert launch(ranks4, ranks, what_accelerate_sees) == wanted
    assert ranks4.apply(lambda: (dist.get_world_size(), "LOCAL_RANK" in os.environ)) == [(4, False)] * 4
