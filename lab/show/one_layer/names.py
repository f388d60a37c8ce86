"""What a tensor is called, and how bytes move, in words."""

from __future__ import annotations

from enum import Enum

from lab.memory.categories import CATEGORIES, HOST
from lab.memory.holders import LAYER
from lab.memory.moment import Op
from lab.memory.storages import Integers
from lab.show.one_layer.windows import Window


class Moving(Enum):
    """How bytes move."""

    ALL_TO_ALL = "all-to-all"
    RING = "ring"
    GATHER = "all-gather of keys and values"
    SCATTER = "reduce-scatter of their gradients"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    TO_HOST = "to the host"
    FROM_HOST = "from the host"


_OPERATORS = {
    "c10d.alltoall_base_": Moving.ALL_TO_ALL,
    "c10d._allgather_base_": Moving.ALL_GATHER,
    "c10d._reduce_scatter_base_": Moving.REDUCE_SCATTER,
    "c10d.allreduce_": Moving.ALL_REDUCE,
    "lab.to_host": Moving.TO_HOST,
    "lab.write_host": Moving.TO_HOST,
    "lab.to_host_whole": Moving.TO_HOST,
    "lab.from_host": Moving.FROM_HOST,
}


_IN_RING = {Moving.ALL_GATHER: Moving.GATHER, Moving.REDUCE_SCATTER: Moving.SCATTER}


def moving(op: Op, ring: int) -> Moving:
    """Return how an operator of ``lab.memory.meter.TRANSFERS`` moves bytes."""
    kind = _OPERATORS[op.name]
    # FSDP gathers flat tensors, and those of attention have several dimensions.
    if "x" in op.shapes and kind in _IN_RING:
        return _IN_RING[kind]
    # The ring sends flat tensors; an exchange of Ulysses has a dimension for the ranks.
    return Moving.RING if kind is Moving.ALL_TO_ALL and ring > 1 and "x" not in op.shapes else kind


_MODULES = {
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "attention out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "mlp out",
    "act_fn": "act",
}

PARAMETERS, GRADIENTS = CATEGORIES.index("parameters"), CATEGORIES.index("gradients")
ACTIVATION_GRADIENTS = CATEGORIES.index("gradients of activations")


def name_of(window: Window, members: Integers) -> str:
    """Return what a tensor of the layer is, in two or three words; or several of its state."""
    storages, n = window.timeline.storages, int(members[0])
    category, kind = int(storages.category[n]), window.kind(n)
    if category == PARAMETERS:
        return "parameters" if kind.name else "gathered parameters"
    if category == GRADIENTS:
        return _gradient_name(window, members)
    if category >= HOST:
        return "model state" if kind.name else _kept(window, n)
    loaded = _source_of(window, n, "lab.from_host")
    if loaded is not None:
        return _kept(window, loaded)
    if storages.first[n] < window.forward.start:
        return "layer input"
    if window.forward.stop <= storages.first[n] < window.backward.start:
        return "grad of output" if category == ACTIVATION_GRADIENTS else "of layer above"
    prefix = "grad of " if category == ACTIVATION_GRADIENTS or "backward" in kind.op else ""
    return prefix + _activation_name(window, n)


def is_attention(operator: str) -> bool:
    """Return whether an operator is a kernel of attention, or its backward."""
    return "attention" in operator


def _activation_name(window: Window, n: int) -> str:
    """Return the name of a tensor that the layer makes of others."""
    moves, kind = window.timeline.storages.moves, window.kind(n)
    op = kind.op.rpartition(".")[2].strip("_")
    tail = window.module(n).rpartition(".")[2]
    written = [bool(w) for _, _, w in moves[moves[:, 0] == n].tolist()]
    if is_attention(op) and not written:
        return "log-sum-exp" if len(kind.shape) == 3 else "q, k or v" if "backward" in op else "attention"
    if tail in _MODULES:
        return _MODULES[tail]
    if tail == "self_attn":
        if written and not is_attention(op):
            return "exchange buffer" if len(set(written)) == 2 else "received" if written[0] else "to send"
        return _IN_ATTENTION.get(op, "attention")
    if tail == "mlp":
        return _IN_MLP.get(op, f"mlp {op}")
    return "hidden state"


def _gradient_name(window: Window, members: Integers) -> str:
    moves, n = window.timeline.storages.moves, int(members[0])
    kind = window.kind(n)
    if kind.name.endswith("*"):
        return "gradient shard"
    if len(members) > 1:
        return "gradients"
    if not kind.name and n in moves[:, 0]:
        return "gradients to sum"
    what = (kind.name.removesuffix(".weight") or window.module(n)).rpartition(".")[2]
    return f"grad of {what} weight"


def _kept(window: Window, n: int) -> str:
    """Return the name of what a layer keeps on the host."""
    module = window.module(n)
    found = LAYER.search(module)
    what = "attention" if "attn" in module else "input"
    if found is None or int(found[0]) == window.layer:
        return f"layer {what}"
    return f"{what} of layer {found[0]}"


def _source_of(window: Window, n: int, operator: str) -> int | None:
    """Return the storage that an operator copies to this one; None if it does not."""
    moves = window.timeline.storages.moves
    for row in moves[(moves[:, 0] == n) & (moves[:, 2] == 1), 1].tolist():
        if window.operator(row) == operator:
            read = moves[(moves[:, 1] == row) & (moves[:, 2] == 0), 0]
            return int(read[0]) if len(read) else None
    return None


_IN_ATTENTION = {
    "add": "rotated",
    "cat": "rotated",
    "mul": "rotated",
    "neg": "rotated",
    "slice_backward": "rotated",
}

_IN_MLP = {"add": "hidden state", "empty_like": "mlp input", "mul": "gate × up", "new_empty": "mlp out"}
