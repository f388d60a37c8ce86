"""Checks that all ranks of a group have the same weights, the same recipe and the same batch.

Each rank computes one number from its own data, and the ranks compare their numbers. All ranks raise the
error together, because a rank that raised it alone would leave its peers waiting in the next collective.
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
"""The number of elements that ``checksum`` converts to 64 bits at once, which limits its memory."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_together(check: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Call ``check`` on every rank of ``group``; if one rank raises a ``LabError``, all ranks raise one.

    Costs: one exchange of short texts. A plan has no peers, so nothing is exchanged there.

    Args:
        check: The function to call. It runs no collective.
        group: The ranks that call this function. None is a group of one rank.

    Returns:
        What ``check`` returned on this rank.

    Raises:
        LabError: The error of this rank, or else the error of the first rank that has one.
    """
    if _has_no_peers(group):
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
    """Refuse a model whose weights, frozen parameters, modules or recipe differ between ranks of ``group``.

    Replicas that start with different weights never become equal, and FSDP would combine shards of different
    models. Parameters on the meta device have no values to compare. For those, the caller passes the origin
    of the values to ``check_same``.

    Costs: one pass over the parameters, 32 MiB during the pass, and 24 bytes from each rank. In a plan
    nothing is compared.

    Args:
        model: The model of this rank.
        recipe: The recipe of this rank, as text.
        group: The ranks to compare. None is a group of one rank.

    Raises:
        LabError: Ranks differ; the message names them.
    """
    if _has_no_peers(group):
        return
    total = torch.zeros((), dtype=torch.int64)
    for name, parameter in model.named_parameters():
        # The sum includes the name and requires_grad. It therefore changes if two parameters are swapped, or
        # if a parameter is frozen on one rank only.
        facts = f"{name} {list(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        total = total * 31 + crc32(facts.encode())
        if not parameter.is_meta:
            total = total + checksum(parameter.detach()).to(total.device)
    modules = [(name, type(module).__qualname__, facts_of(module)) for name, module in model.named_modules()]
    for difference, text in {
        "the recipe differs": recipe,
        "the modules or their attributes differ": str(modules),
    }.items():
        check_same(difference, text, group, "make the same model and apply the same recipe on every rank")
    _compare(
        "the weights, or which of them are trained, differ",
        total,
        group,
        "build the model from one seed or checkpoint, and freeze the same parameters, on every rank",
    )


def check_same(difference: str, text: str, group: dist.ProcessGroup | None, advice: str) -> None:
    """Refuse a text that differs between the ranks of ``group``.

    Costs: 8 bytes from each rank. In a plan nothing is compared.

    Args:
        difference: The beginning of the error message, such as "the recipe differs".
        text: The text of this rank.
        group: The ranks to compare. None is a group of one rank.
        advice: The end of the error message, which says what would work.

    Raises:
        LabError: Ranks differ; the message names them.
    """
    if not _has_no_peers(group):
        _compare(difference, torch.tensor(crc32(text.encode())), group, advice)


def check_same_batch(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    group: dist.ProcessGroup | None,
    *,
    documents: object = None,
    position_ids: Tensor | None = None,
) -> None:
    """Refuse a batch whose tokens, mask, documents or positions differ between the ranks of ``group``.

    Costs: one pass over the tokens, and 8 bytes from each rank. In a plan nothing is compared.

    Args:
        input_ids: The tokens of the whole batch, [b, S], with b rows of S tokens.
        attention_mask: The mask of the whole batch, [b, S], or None.
        group: The ranks to compare. None is a group of one rank.
        documents: The lengths of the documents of each row, or None.
        position_ids: The positions of the whole batch, [b, S], or None.

    Raises:
        LabError: Ranks differ; the message names them.
    """
    if _has_no_peers(group):
        return
    given = (input_ids, attention_mask, position_ids)
    shapes = [None if tensor is None else list(tensor.shape) for tensor in given]
    total = checksum(input_ids) + crc32(f"{shapes} {documents}".encode())
    if attention_mask is not None:
        total = total + 31 * checksum((attention_mask != 0).to(total.device, torch.int64))
    if position_ids is not None:
        total = total + 37 * checksum(position_ids.to(total.device, torch.int64))
    advice = "give every rank the whole batch; shard_batch takes each rank's part"
    _compare("the tokens, the mask or the documents differ", total, group, advice)


def checksum(x: Tensor) -> Tensor:
    """Return an int64 scalar that depends on every bit of ``x`` and on the order of its elements."""
    bits = x.contiguous().view(-1).view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in bits.split(CHECKSUM_ELEMENTS):
        places = torch.arange(1, len(piece) + 1, device=x.device)
        total = total * 31 + (piece.long() * places).sum()
    return total


def _has_no_peers(group: dist.ProcessGroup | None) -> bool:
    """Return whether there is nothing to compare: the group has one rank, or it is the group of a plan."""
    return size_of(group) == 1 or dist.get_backend(group) == "fake"


def _compare(difference: str, value: Tensor, group: dist.ProcessGroup | None, advice: str) -> None:
    own = value.view(1).to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    gathered = [torch.empty_like(own) for _ in range(size_of(group))]
    dist.all_gather(gathered, own, group=group)
    values = torch.cat(gathered).tolist()
    common = Counter(values).most_common(1)[0][0]
    others = [str(rank) for rank, one in enumerate(values) if one != common]
    if others:
        raise LabError(f"{difference} on rank{'s' * (len(others) > 1)} {', '.join(others)}: {advice}")
