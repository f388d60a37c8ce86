"""The work of a step, operator by operator, counted while it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lab.memory.observer import Observer, name_of, tensors_in
from lab.planning.costs import BACKWARD_FLOPS, Peers, Work, WorkKind
from lab.techniques.slices import repetitions
from lab.torch_private import process_group_of, storage_id

PRODUCTS = {
    "aten.mm": 0, "aten.bmm": 0, "aten.mv": 0, "aten.dot": 0, "aten.vdot": 0, "aten._grouped_mm": 0,
    "aten.addmm": 1, "aten.baddbmm": 1, "aten.addbmm": 1, "aten.addmv": 1, "aten.addr": 1,
    "aten._addmm_activation": 1, "lab.grouped_product": 0, "lab.grouped_outer_product": 0,
}  # fmt: skip
"""The operators that are products of dense matrices or vectors, and which argument is the first factor.

The second factor follows it. An operator in place has the name with ``_`` at its end. In a grouped product,
each row of the first factor is multiplied by one matrix, or by one other row.
"""

OF_A_VECTOR = ("aten.mv", "aten.addmv", "aten.dot", "aten.vdot")
"""The products whose second factor is one vector, by which each row of the first is multiplied."""

ALL_TO_ALL, ARRIVAL = "c10d.alltoall_base_", "lab.arrival"
NOTHING = (
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided",
    "aten._unsafe_view", "lab.empty_host", "profiler._record_function_enter_new",
    "profiler._record_function_exit",
)  # fmt: skip
"""Operators that touch no element, though they are no views."""

FLASH = "aten._scaled_dot_product_flash_attention"


class WorkCounter(Observer):
    """Records the work of the operators that run inside it, whatever device runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.on_host: Callable[[tuple[Any, ...]], bool] = lambda _: False
        """Returns whether an operator with these arguments runs on the host; a meter knows."""
        self.is_tile: Callable[[torch.Tensor], bool] = lambda _: False
        """Returns whether a tensor lies in the tiles of a streamed layer; a meter knows."""
        self._entries: list[tuple[WorkKind, float, int, int]] = []
        self._peers: dict[Peers, int] = {}
        # Entries before this one are those of an earlier row of the timeline.
        self._row = 0
        # The number of each all-to-all that is under way, by the memory that it arrives in.
        self._starts, self._under_way = 0, dict[int, int]()

    def now(self) -> float:
        """Return the number of entries so far: the clock of a walk's timeline."""
        self._row = len(self._entries)
        return float(self._row)

    def work(self) -> Work:
        """Return what was recorded until now."""
        return Work.of(self._entries, tuple(self._peers))

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and record its work."""
        result = func(*args, **kwargs)
        name = name_of(func)
        if name == ARRIVAL:
            self._add(WorkKind.ARRIVAL, 0, 0, self._starts - self._under_way.pop(storage_of(args[0])))
        elif not func.is_view and name not in NOTHING:
            self._record(name, args, result)
        return result

    def _add(self, kind: WorkKind, flops: float, nbytes: int, other: int = 0) -> None:
        times = repetitions()
        flops, nbytes = flops * times, nbytes * times
        if kind in SUMMED and len(self._entries) > self._row and self._entries[-1][0] == kind:
            _, before, held, _ = self._entries.pop()
            flops, nbytes = flops + before, nbytes + held
        self._entries.append((kind, flops, nbytes, other))

    def _record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name.startswith(("c10d.", "_c10d_functional.")):
            self._add_collective(name, args, result)
            return
        if name in ("lab.to_host", "lab.to_host_whole", "lab.write_host", "lab.from_host"):
            kind = WorkKind.TILE_WRITE if name == "lab.write_host" else WorkKind.COPY
            if name == "lab.from_host" and self.is_tile(args[0][0]):
                kind = WorkKind.TILE_READ
            self._add(kind, 0, args[name == "lab.from_host"].nbytes)
            return
        if name.startswith(FLASH):
            backward = name.endswith("backward")
            flops = _attention_flops(args, backward=backward)
            self._add(WorkKind.ATTENTION_BACKWARD if backward else WorkKind.ATTENTION_FORWARD, flops, 0)
            return
        touched = sum(x.nbytes for x in tensors_in((*args, result)))
        product = name if name in PRODUCTS else name.removesuffix("_")
        if self.on_host(args):
            self._add(WorkKind.ON_HOST, 0, touched)
        elif product in PRODUCTS:
            left, right = args[PRODUCTS[product] :][:2]
            flops = 2 * left.numel() * (1 if product in OF_A_VECTOR else right.shape[-1])
            self._add(WorkKind.PRODUCT, flops, touched, max(left.itemsize, 2))
        else:
            self._add(WorkKind.MEMORY, 0, touched)

    def _add_collective(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Add what a rank sends: its share of an all-gather to all others, its input's shares in the rest."""
        group = next((g for g in map(process_group_of, args) if g is not None), None)
        if group is None:
            return
        ranks, me = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
        whole = max((x.nbytes for x in tensors_in((*args, result))), default=0)
        exchange = "alltoall" in name
        # An all-reduce is a reduce-scatter and an all-gather.
        sizes = [whole // len(ranks) * (2 if "allreduce" in name.replace("_", "") else 1)] * len(ranks)
        if exchange and args[4]:  # a step round a ring goes to one of them
            sizes = [elements * args[1].itemsize for elements in args[4]]
        sizes[me] = 0
        to = tuple(rank for rank, size in zip(ranks, sizes, strict=True) if size)
        sent = sum(sizes)
        assert all(size * len(to) == sent for size in sizes if size), "every peer is sent as many bytes"
        number = self._peers.setdefault(Peers(ranks, ranks[me], to, exchange), len(self._peers))
        # Waited for later: the default, and defaults are left out of ``args``.
        if name == ALL_TO_ALL and args[5:6] != (False,):
            self._under_way[storage_of(args[0])] = self._starts
            self._starts += 1
            self._add(WorkKind.START, 0, sent, number)
        else:
            self._add(WorkKind.COLLECTIVE, 0, sent, number)


SUMMED = (WorkKind.MEMORY, WorkKind.ON_HOST, WorkKind.COPY, WorkKind.TILE_WRITE, WorkKind.TILE_READ)
"""Entries of these kinds that follow each other in a row are one."""


def storage_of(x: torch.Tensor) -> int:
    """Return a number that names the tensor's memory."""
    return storage_id(x.untyped_storage())


def _attention_flops(args: tuple[Any, ...], *, backward: bool) -> int:
    """Two matrix products of queries and keys in forward, half of each behind a causal mask."""
    q, k = args[1:3] if backward else args[0:2]
    dropout = 6 if backward else 3
    causal = len(args) > dropout + 1 and args[dropout + 1]
    flops: int = 4 * q.numel() * k.shape[2] // (2 if causal else 1)
    return int(BACKWARD_FLOPS * flops) if backward else flops
