"""What a tensor is called, and how bytes move, in words."""

from __future__ import annotations

from enum import Enum

from lab.memory.categories import CATEGORIES, HOST
from lab.memory.holders import LAYER
from lab.memory.storages import Integers
from lab.memory.timeline import Op, Timeline
from lab.show.one_layer.windows import Window


class Moving(Enum):
    """How bytes move."""

    ALL_TO_ALL = "all-to-all"
    RING = "ring"
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


def moving(op: Op, ring: int) -> Moving:
    """Return how an operator of ``lab.memory.meter.TRANSFERS`` moves bytes."""
    kind = _OPERATORS[op.name]
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


def name_of(timeline: Timeline, members: Integers, window: Window) -> str:
    """Return what a tensor of the layer is, in two or three words; or several of its state."""
    storages, n = timeline.storages, int(members[0])
    category, kind = int(storages.category[n]), storages.kinds[storages.kind[n]]
    if category == PARAMETERS:
        return "parameters" if kind.name else "gathered parameters"
    if category == GRADIENTS:
        return _gradient_name(timeline, members)
    if category >= HOST and kind.name:
        return "model state"
    if category >= HOST:
        return _kept(timeline, n, window)
    loaded = _source_of(timeline, n, "lab.from_host")
    if loaded is not None:
        return _kept(timeline, loaded, window)
    if storages.first[n] < window.forward.start:
        return "layer input"
    if window.forward.stop <= storages.first[n] < window.backward.start:
        return "grad of output" if category == ACTIVATION_GRADIENTS else "of layer above"
    backward = "backward" in storages.kinds[storages.kind[n]].op
    prefix = "grad of " if category == ACTIVATION_GRADIENTS or backward else ""
    return prefix + _activation_name(timeline, n)


def is_attention(operator: str) -> bool:
    """Return whether an operator is a kernel of attention, or its backward."""
    return "attention" in operator


def _activation_name(timeline: Timeline, n: int) -> str:
    """Return the name of a tensor that the layer makes of others."""
    storages = timeline.storages
    op = storages.kinds[storages.kind[n]].op.rpartition(".")[2].strip("_")
    tail = timeline.modules[storages.module[n]].rpartition(".")[2]
    written = [bool(w) for _, _, w in storages.moves[storages.moves[:, 0] == n].tolist()]
    if is_attention(op) and not written:
        shape = storages.kinds[storages.kind[n]].shape
        return "log-sum-exp" if len(shape) == 3 else "q, k or v" if "backward" in op else "attention"
    if tail in _MODULES:
        return _MODULES[tail]
    if tail == "self_attn":
        if written and not is_attention(op):
            return "exchange buffer" if len(set(written)) == 2 else "received" if written[0] else "to send"
        return _IN_ATTENTION.get(op, "attention")
    if tail == "mlp":
        return _IN_MLP.get(op, f"mlp {op}")
    return "hidden state"


def _gradient_name(timeline: Timeline, members: Integers) -> str:
    storages, n = timeline.storages, int(members[0])
    kind = storages.kinds[storages.kind[n]]
    if kind.name.endswith("*"):
        return "gradient shard"
    if len(members) > 1:
        return "gradients"
    if not kind.name and len(storages.moves[storages.moves[:, 0] == n]):
        return "gradients to sum"
    tail = timeline.modules[storages.module[n]].rpartition(".")[2]
    what = kind.name.removesuffix(".weight").rpartition(".")[2] or tail
    return f"grad of {what} weight"


def _kept(timeline: Timeline, n: int, window: Window) -> str:
    """Return the name of what a layer keeps on the host."""
    module = timeline.modules[timeline.storages.module[n]]
    found = LAYER.search(module)
    what = "attention" if "attn" in module else "input"
    if found is None or int(found[0]) == window.layer:
        return f"layer {what}"
    return f"{what} of layer {found[0]}"


def _source_of(timeline: Timeline, n: int, operator: str) -> int | None:
    """Return the storage that an operator copies to this one; None if it does not."""
    moves = timeline.storages.moves
    for row in moves[(moves[:, 0] == n) & (moves[:, 2] == 1), 1].tolist():
        if timeline.ops[timeline.op[row]].name == operator:
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
