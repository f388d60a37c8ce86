"""What a rank's device holds at most before the first step."""

from __future__ import annotations

from math import prod

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lab.memory.categories import CATEGORIES
from lab.memory.moment import Moment
from lab.models.first_values import piece_elements
from lab.planning.cuda_workspace import fixed_workspace
from lab.recipe.jobs import Job
from lab.techniques import agreement

_SCRATCH, _CHECKED = 32, 24
"""Bytes an element: of a piece of first values, and of a piece that ranks compare, while it is worked on."""


def start_of(job: Job, skeleton: PreTrainedModel, *, workspace: bool) -> Moment:
    """The moment before the first step at which a rank's device holds the most bytes.

    It is the highest of these:

    - The first values of the parameters are made: the rank's parameters, and the scratch of one piece.
    - The optimizer's state is made, for a start makes it at once: the rank's parameters, and twice those that
      are trained.
    - The parameters are compared with those of the other ranks, where each rank holds them whole: without
      FSDP, and of a callable's model.

    With the optimizer on the host, the device holds only the buffers, what is compared, and on CUDA (which a
    plan with a workspace is for) the scratch. The host holds the rest.
    """

    whole = sum(p.nbytes for p in skeleton.parameters())
    buffers = sum(b.nbytes for b in skeleton.buffers())
    parameters = sum(_held(job, p) for p in skeleton.parameters())
    outside = fixed_workspace(job.ranks) if workspace else 0
    largest = max(p.numel() for p in skeleton.parameters())
    trained = sum(p.requires_grad for p in skeleton.parameters())
    moments = [("make_optimizer", parameters + buffers, adam_bytes(job, skeleton) + 4 * trained, 0)]
    from_callable = callable(job.model) and not isinstance(job.model, PretrainedConfig)
    if from_callable or not job.recipe.fsdp:
        compared = _CHECKED * min(agreement.CHECKSUM_ELEMENTS, largest) if job.ranks > 1 else 0
        moments.append(("check_same_model", whole + buffers, 0, compared))
    if not from_callable:
        largest = -(-largest // job.shards)
        piece = piece_elements("cuda" if workspace else "cpu")
        moments.append(("first values", parameters + buffers, 0, _SCRATCH * min(piece, largest)))
    host = 0
    if job.recipe.optimizer == "host":
        # First values are computed on the device, which is the host itself where there is no GPU.
        on_device = workspace
        sharded = [moment for moment in moments if moment[0] != "check_same_model"]
        host = max(sum(moment[1:-1] if on_device else moment[1:]) for moment in sharded) - buffers
        moments = [
            moment if moment not in sharded else (moment[0], buffers, 0, moment[-1] if on_device else 0)
            for moment in moments
        ]
    op, of_parameters, of_optimizer, temporary = max(moments, key=lambda moment: sum(moment[1:]))
    return Moment(
        seconds=0.0,
        device=of_parameters + of_optimizer + temporary + outside,
        host=host,
        by_category=dict.fromkeys(CATEGORIES, 0)
        | {
            "parameters": of_parameters,
            "optimizer": of_optimizer,
            "temporary buffers": temporary,
            "other": outside,
        },
        op=op,
        shapes="",
        module="",
        phase="start",
        step=0,
    )


def adam_bytes(job: Job, skeleton: PreTrainedModel) -> int:
    """Return the bytes of Adam's two moments on a rank."""
    return 2 * sum(_held(job, p) for p in skeleton.parameters() if p.requires_grad)


def _held(job: Job, p: nn.Parameter) -> int:
    """The bytes of a parameter on a rank: of its shard, if it is sharded."""
    return -(-len(p) // job.shards) * prod(p.shape[1:]) * p.itemsize
