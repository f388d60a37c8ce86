"""UPipe gives the plain model's loss and gradients for every chunk; its calls and its bytes are counted."""

import pytest
import torch
import torch.distributed as dist

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.rope import apply_rope
from lab.techniques.upipe import apply_upipe
from lab.techniques.upipe_schedule import schedule
from lab_tests.reference import Calls, build, config, error, subgroup, tokens, truth, worst_errors


def chunks(heads, ranks):
    return [u for u in range(ranks, heads + 1, ranks) if heads % u == 0]


def model_and_positions(cfg, ids, chunk, group, dtype):
    model = build(cfg, dtype)
    apply_rope(model)
    apply_upipe(model, head_chunk=chunk, group=group)
    local = ids.shape[1] // dist.get_world_size(group) if group else ids.shape[1]
    return model, torch.arange(local) + local * (dist.get_rank(group) if group else 0)
