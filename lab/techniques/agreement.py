"""Checks that all ranks of a group have the same weights, recipe and batch, and refuse them together.

Each rank computes one number from what it has, and the numbers are compared. A rank that refused something by
itself would leave its peers waiting in the next collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.decoder import facts_of
from lab.errors import LabError
from lab.techniques.exchange import size_of

T = TypeVar("T")

CHECKSUM_ELEMENTS = 2**22
"""Elements that a checksum widens to 64 bits at once."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_together(check: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Return what ``check`` returns; where it refuses on one rank of ``group``, every rank refuses.

    Costs: one exchange of texts. In a plan, whose peers are not there, nothing is exchanged.

    Raises:
        LabError: this rank's own refusal, or that of the first rank that refused.
    """
    if _alone(group):
        return check()
    refusal: LabError | None = None
    try:
        result = check()
    except LabError as error:
        refusal = error
    messages: list[str | None] = [None] * size_of(group)
    dist.all_gather_object(messages, None if refusal is None else str(refusal), group=group)
    if refusal is not None:
        raise refusal
    for rank, message in enumerate(messages):
        if message is not None:
            raise LabError(f"rank {rank} refuses: {message}")
    return result


def check_same_model(model: nn.Module, recipe: str, group: dist.ProcessGroup | None) -> None:
    """Refuse a model that differs between the ranks of ``group``: weights, what is frozen, modules, recipe.

    Replicas that begin apart stay apart, and FSDP would put shards of several models together. Parameters on
    the meta device have no values to compare: ``check_same`` compares what these will be made from.

    Costs: one pass over the parameters, 32 MiB while it runs, and 24 bytes from each rank. In a plan
    nothing is compared.

    Raises:
        LabError: the ranks that differ.
    """
    if _alone(group):
        return
    total = torch.zeros((), dtype=torch.int64)
    for name, parameter in model.named_parameters():
        # The name and requires_grad are part of the sum, so that swapped parameters, and a parameter that is
        # frozen on one rank only, are noticed.
        facts = f"{name} {list(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        total = total * 31 + crc32(facts.encode())
        if not parameter.is_meta:
            total = total + checksum(parameter.detach()).to(total.device)
    parts = [(name, type(module).__qualname__, facts_of(module)) for name, module in model.named_modules()]
    for what, text in {
        "the recipe differs": recipe,
        "the modules or their attributes differ": str(parts),
    }.items():
        check_same(what, text, group, "make the same model and apply the same recipe on every rank")
    _compare(
        "the weights, or which of them are trained, differ",
        total,
        group,
        "build the model from one seed or checkpoint, and freeze the same parameters, on every rank",
    )


def check_same(what: str, text: str, group: dist.ProcessGroup | None, works: str) -> None:
    """Refuse a text that differs between the ranks of ``group``; ``works`` says what would work.

    Costs: 8 bytes from each rank. In a plan nothing is compared.

    Raises:
        LabError: ``what``, and the ranks that differ.
    """
    if not _alone(group):
        _compare(what, torch.tensor(crc32(text.encode())), group, works)


def check_same_batch(
    input_ids: Tensor, attention_mask: Tensor | None, group: dist.ProcessGroup | None
) -> None:
    """Refuse a batch whose tokens or mask differ between the ranks of ``group``.

    Costs: one pass over the tokens, and 8 bytes from each rank. In a plan nothing is compared.

    Raises:
        LabError: the ranks that differ.
    """
    if _alone(group):
        return
    shapes = [list(input_ids.shape), None if attention_mask is None else list(attention_mask.shape)]
    total = checksum(input_ids) + crc32(str(shapes).encode())
    if attention_mask is not None:
        total = total + 31 * checksum((attention_mask != 0).to(total.device, torch.int64))
    works = "give every rank the whole batch; shard_batch takes each rank's part"
    _compare("the tokens or the attention_mask differ", total, group, works)


def checksum(x: Tensor) -> Tensor:
    """A number that depends on every bit of ``x`` and on the order of its elements; a scalar, int64."""
    bits = x.contiguous().view(-1).view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in bits.split(CHECKSUM_ELEMENTS):
        places = torch.arange(1, len(piece) + 1, device=x.device)
        total = total * 31 + (piece.long() * places).sum()
    return total


def _alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there is no peer to ask: a group of one, or the group of a plan."""
    return size_of(group) == 1 or dist.get_backend(group) == "fake"


def _compare(what: str, value: Tensor, group: dist.ProcessGroup | None, works: str) -> None:
    own = value.view(1).to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    gathered = [torch.empty_like(own) for _ in range(size_of(group))]
    dist.all_gather(gathered, own, group=group)
    values = torch.cat(gathered).tolist()
    common = Counter(values).most_common(1)[0][0]
    others = [str(rank) for rank, one in enumerate(values) if one != common]
    if others:
        raise LabError(f"{what} on rank{'s' * (len(others) > 1)} {', '.join(others)}: {works}")
