"""The meter: it counts the bytes of every storage that crosses torch's dispatcher.

The meter is a dispatch mode. It counts a storage from the first operator that uses it until the storage dies
or is resized. A weak reference reports its death. FSDP frees an unsharded parameter by resizing its storage
to zero bytes. Real and fake tensors give the same count, so a plan and a run can be compared to the byte.

Bytes that a kernel allocates inside itself do not cross the dispatcher, and are not counted. On CPU these are
the scratch memory of flash attention's backward: 4 bytes for each head and token, and 1 MiB for each thread.
All else agrees with the profiler's memory events to the byte; ``lab_tests/test_meter.py`` compares the two.
On CUDA, ``lab.memory.cuda`` combines the meter with the allocator's own count.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lab.memory.categories import DISK, HOST, OTHER
from lab.memory.holders import NO_OPERATOR
from lab.memory.module_paths import ModulePaths
from lab.memory.moment import Moment, Op
from lab.memory.observer import Observer, name_of, tensors_in
from lab.memory.out_of_memory import OutOfMemory
from lab.memory.resizes import report_resizes
from lab.memory.storages import Entry, Move, TensorKind, columns_of
from lab.memory.timeline import TILES, Timeline, TimelineBuilder
from lab.memory.workspace import NO_WORKSPACE, Workspace
from lab.torch_private import (
    ACCUMULATES,
    FakeTensor,
    detect_fake_mode,
    local_part,
    offloaded_parameters,
    running_graph_task,
    running_sequence_number,
    storage_id,
)

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, RECOMPUTED, ACTIVATION_GRADIENTS, TEMPORARY = range(OTHER)

_SHARDING_OPERATORS = {
    "c10d._allgather_base_": PARAMETERS,
    "fsdp.chunk_cat": GRADIENTS,
    "c10d._reduce_scatter_base_": GRADIENTS,
}
"""FSDP's operators, and the category of the tensors that they take: parts of many parameters or gradients.

These have one dimension. What a technique gathers, and the sums that it scatters, has more.
"""

TO_HOST = ("lab.to_host", "lab.to_host_whole")
"""The operators whose results are in host memory."""

FROM_HOST = "lab.from_host"
"""The operator that copies from host memory to the device."""

_RESULT = -1

TRANSFERS = {
    "c10d._allgather_base_": (0, 1),
    "c10d._reduce_scatter_base_": (0, 1),
    "c10d.allreduce_": (0, 0),
    "c10d.alltoall_base_": (0, 1),
    FROM_HOST: (1, 0),
    **dict.fromkeys(TO_HOST, (_RESULT, 0)),
    "lab.write_host": (1, 0),
}
"""The operators that move bytes between ranks, or between device and host.

By each, the argument that it writes and the one that it reads. A call has a row of its own, and the storages
know it as one of their ``moves``.
"""

_MAKES_PIECES = ("lab.to_host", TILES)
_MAKES_HOST_MEMORY = (*TO_HOST, TILES)

_MAPS_FILE = "lab.empty_mapped"
"""The operator whose results are in a mapped file."""

NO_OP = Op(NO_OPERATOR)
"""The operator of the rows that mark the start and the end of a phase."""


class _Block(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a counted storage, which calls the meter when the storage dies.

    Since the row ``first`` it has had its ``size``. ``shape`` and ``dtype`` are those of the first tensor
    that was seen on it, ``op`` is the operator that made it, and ``name`` is that of its parameter.
    """

    __slots__ = ("category", "dtype", "first", "key", "moves", "name", "op", "shape", "size")

    key: int
    size: int
    category: int
    first: int
    shape: torch.Size
    dtype: torch.dtype
    op: str
    name: str
    moves: tuple[Move, ...]


class _Scope:
    """A module whose forward runs, or an autograd node whose backward runs, and the blocks made in it.

    A module has no ``node``. That of a node is the number of its backward pass, and its own.
    """

    __slots__ = ("blocks", "node", "recomputed", "survivors")

    def __init__(self, node: tuple[int, int] | None, survivors: int) -> None:
        self.node = node
        self.survivors = survivors
        """The category of the blocks that outlive it."""
        self.blocks: list[_Block] = []
        self.recomputed: list[_Block] = []
        """Those that a node makes while gradients are on: it runs a forward again, outside of all modules."""


class Meter(Observer):
    """Measures the bytes of a step: ``measure`` goes around the step, and ``phase`` around each of its parts.

    Args:
        on_growth: Called between two operators with the rows that are new since the last call; the live
            timeline draws them. It runs in the measured thread. So it ends with the step, and nothing is
            drawn while one long operator runs.
        interval: The least seconds between two calls of ``on_growth``.
        clock: Returns seconds. A plan gives the clock of the device that it is made for.
        workspace: Bytes to add to the count. A plan gives those of the device that it is made for.
        limit: The bytes of the device. The first operator after which it holds more raises OutOfMemory, so a
            CPU rank runs out of memory as a device of this size would.
        every_operator: Whether the timeline has rows of the operators that change no bytes, too.
        run: Runs each operator, given with its arguments, and returns its result. A plan gives the method
            that counts what the operator costs: one dispatch mode takes less time than two.
        first_step: The number of the first step that is measured, counted from 0.

    Attributes:
        start: What the clock said at the timeline's zero.
    """

    def __init__(
        self,
        on_growth: Callable[[Timeline], None] | None = None,
        interval: float = 0.1,
        *,
        clock: Callable[[], float] = time.perf_counter,
        workspace: Workspace = NO_WORKSPACE,
        limit: int | None = None,
        every_operator: bool = False,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = lambda func, args, kwargs: func(
            *args, **kwargs
        ),
        first_step: int = 0,
    ) -> None:
        super().__init__()
        self.rows = TimelineBuilder()
        self._step = first_step - 1
        self._on_growth, self._interval = on_growth, interval
        self._sent, self._sent_at = 0, 0.0
        self._clock, self.start = clock, clock()
        self._limit = limit
        self._every_operator = every_operator
        self._run = run
        self._workspace = workspace
        self._live: dict[int, _Block] = {}
        # What was held from a row to another, for every block that was freed or resized.
        self._entries: list[Entry] = []
        self._bytes = [0] * (DISK + 1)
        self._bytes[OTHER] = self._workspace.fixed
        self._changed = True
        self._op = NO_OP.name
        self._phase = "setup"
        self._paths = ModulePaths()
        # What runs, the innermost last.
        self._scopes: list[_Scope] = []
        self._swept_module = ""
        self._awaiting_gradient: list[tuple[str, nn.Parameter]] = []
        # By each name of a parameter, its first: a tied head has the name of the embedding.
        self._first_names: dict[str, str] = {}

    # ---- what a step calls -------------------------------------------------------------------------------

    @contextmanager
    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Measure the step that runs in this context; the model and the optimizer count from the start.

        The timeline leaves out the time between steps, in which the next batch is read.
        """
        self._step += 1
        self._paths = ModulePaths()
        self._op = NO_OP.name
        self._fake_mode = detect_fake_mode()
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        every_name = model.named_parameters(remove_duplicate=False)
        self._first_names = {name: names[parameter] for name, parameter in every_name}
        on_host = offloaded_parameters(model)
        # The state of a parameter is in the memory in which the parameter is.
        self._mark(((name, p) for name, p in model.named_parameters() if p in on_host), HOST)
        self._mark(model.named_parameters(), PARAMETERS)
        self._mark(model.named_buffers(), PARAMETERS)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._mark([(name, parameter.grad)], HOST if parameter in on_host else GRADIENTS)
        for owner, values in optimizer.state.items() if optimizer is not None else ():
            # Some optimizers have numbers in addition to tensors.
            tensors = (value for value in values.values() if isinstance(value, torch.Tensor))
            state = ((names.get(owner, ""), tensor) for tensor in tensors)
            self._mark(state, HOST if owner in on_host else OPTIMIZER)
        self._model = model
        hooks = [hook for path, module in model.named_modules() for hook in self._follow(path, module)]
        with report_resizes(self._on_resize), self:
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                self._scopes.clear()
                self._send()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the step that runs in this context: forward, backward or optimizer."""
        outer, self._phase = self._phase, name
        self._swept_module = ""
        self._awaiting_gradient = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self._add_row(NO_OP, "")
        yield
        self._leave_nodes()
        self._sweep_gradients()
        self._add_row(NO_OP, "")
        self._phase = outer

    def timeline(self) -> Timeline:
        """Return the rows of all steps so far, and their storages.

        A storage has one category in all rows: that which it has now. The pieces of a tensor on the host are
        one storage.
        """
        rows = self.rows.since(0)
        held_still = (self._entry(block) for block in self._live.values() if self._in_rows(block))
        return rows.with_storages(**columns_of(_joined((*self._entries, *held_still))))

    # ---- counting ----------------------------------------------------------------------------------------

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count the storages of the operator's inputs, run it, and count those of its outputs."""
        name = self._op = name_of(func)
        self._follow_nodes(name, args)
        for tensor in tensors_in(args):
            self._count_tensor(tensor, TEMPORARY)
        try:
            result = self._run(func, args, kwargs)
        except torch.OutOfMemoryError as error:
            self._add_row(_op_of(name, args), self._paths.current())
            raise OutOfMemory(self._now(), None, str(error).splitlines()[0]) from error
        to_host = name in _MAKES_HOST_MEMORY or self.on_host(args)
        category = HOST if to_host else DISK if name == _MAPS_FILE else TEMPORARY
        for tensor in tensors_in((result,)):
            self._count_tensor(tensor, category)
        if name in _SHARDING_OPERATORS and not (isinstance(args[0], torch.Tensor) and args[0].dim() > 1):
            self._classify((*args, *kwargs.values()), _SHARDING_OPERATORS[name])
        elif name == FROM_HOST:
            # What has a name is a shard of a parameter. All else is what forward kept, which backward copies
            # back. What is on the host stays host memory.
            self._classify(args[1:], PARAMETERS if self._live[_key(args[0][0])].name else ACTIVATIONS)
        inside = self._workspace.kernel(name, args)
        if name in TRANSFERS:
            written, read = TRANSFERS[name]
            # The operator's row is the next.
            row = len(self.rows)
            self._add_move(result if written == _RESULT else args[written], Move(row, written=True))
            self._add_move(args[read], Move(row, written=False))
        if self._changed or inside or self._every_operator or name in TRANSFERS:
            module = self._paths.current()
            if module != self._swept_module:
                self._sweep_gradients()
                self._swept_module = module
            self._bytes[OTHER] += inside
            self._add_row(_op_of(name, args), module)
            self._bytes[OTHER] -= inside
        return result

    def _count_tensor(self, tensor: torch.Tensor, category: int) -> _Block | None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        block = self._live.get(key)
        if block is not None or self._takes_no_memory(tensor):
            return block
        block = _Block(storage, self._on_death)
        block.key, block.category = key, category
        block.size = storage.nbytes()
        block.first = len(self.rows)
        block.shape, block.dtype, block.op, block.name = tensor.shape, tensor.dtype, self._op, ""
        block.moves = ()
        self._live[block.key] = block
        self._bytes[category] += block.size
        self._changed = True
        if self._scopes:
            scope = self._scopes[-1]
            forward_again = scope.node is not None and torch.is_grad_enabled()
            (scope.recomputed if forward_again else scope.blocks).append(block)
        return block

    def on_host(self, args: tuple[Any, ...]) -> bool:
        """Return whether the first tensor among an operator's arguments is in host memory.

        Such an operator runs on the host, and its results are there: the tensors that an operator takes and
        makes are in one memory, but for those of the copies between the two.
        """
        tensor = next(tensors_in(args), None) if self._bytes[HOST] else None
        block = None if tensor is None else self._live.get(_key(tensor))
        return block is not None and block.category == HOST

    def is_tile(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the host tiles of a streamed layer."""
        block = self._live.get(_key(tensor))
        return block is not None and block.op == TILES

    def _takes_no_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether DTensor computes shapes with this tensor, on device meta or in another fake mode."""
        if isinstance(tensor, FakeTensor):
            # The device of a fake tensor is not read, because that takes time in the dispatcher.
            return tensor.fake_mode is not self._fake_mode
        return tensor.device.type == "meta"

    def _on_death(self, block: _Block) -> None:
        del self._live[block.key]
        self._resize(block, 0)

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        block = self._live.get(storage_id(storage))
        if block is not None:
            self._resize(block, storage.nbytes())

    def _resize(self, block: _Block, size: int) -> None:
        if self._in_rows(block):
            self._entries.append(self._entry(block))
        self._bytes[block.category] += size - block.size
        block.size, block.first, block.moves = size, len(self.rows), ()
        self._changed = True

    def _in_rows(self, block: _Block) -> bool:
        """Return whether a row has counted the block at its present size."""
        return block.size > 0 and block.first < len(self.rows)

    def _entry(self, block: _Block) -> Entry:
        kind = _kind(block.shape, block.dtype, block.op, block.name)
        return Entry(block.first, len(self.rows), block.size, block.category, kind, block.moves)

    def _add_move(self, value: Any, move: Move) -> None:
        """Add a move to the storages of a tensor, or of several."""
        for block in self._blocks((value,)):
            block.moves = (*block.moves, move)

    def _blocks(self, values: Sequence[Any]) -> Iterator[_Block]:
        """Yield the blocks of the tensors among an operator's arguments that are counted."""
        for tensor in tensors_in(values):
            if (block := self._live.get(_key(tensor))) is not None:
                yield block

    def _mark(self, tensors: Iterable[tuple[str, torch.Tensor]], category: int) -> None:
        """Give the storages of tensors, which come with the names of their parameters, a category."""
        for name, tensor in tensors:
            block = self._count_tensor(local_part(tensor), category)
            if block is not None:
                if block.category != HOST:
                    self._set_category(block, category)
                block.name = _name_of_all(block.name, self._first_names.get(name, name))

    def _classify(self, values: Sequence[Any], category: int) -> None:
        """Give the tensors among an operator's arguments a category, if they are not of the model's state."""
        for block in self._blocks(values):
            if ACTIVATIONS <= block.category < OTHER:
                self._set_category(block, category)

    def _set_category(self, block: _Block, category: int) -> None:
        self._bytes[block.category] -= block.size
        self._bytes[category] += block.size
        block.category = category

    # ---- categories: what outlives the module or the node that made it, and whose it is ---------------

    def _follow(self, path: str, module: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, _: Any) -> None:
            self._follow_nodes("", ())
            # FSDP has gathered this module's parameters before. Those of its children are marked too, because
            # a technique may use their weights without calling them.
            self._mark(module.named_parameters(path), PARAMETERS)
            self._paths.enter(path)
            recomputed = any(scope.node for scope in self._scopes)
            self._scopes.append(_Scope(None, RECOMPUTED if recomputed else ACTIVATIONS))

        def leave(*_: Any) -> None:
            while self._close_scope().node is not None:
                pass
            self._paths.leave()

        def name_used(module: nn.Module, *_: Any) -> None:
            # Of a module that is not entered, a technique has used the gathered parameters by now.
            named = module.named_parameters(path)
            self._mark(((name, p) for name, p in named if _key(local_part(p)) in self._live), PARAMETERS)

        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)
        if isinstance(module, FSDPModule):
            # Before FSDP frees them.
            yield module.register_forward_hook(name_used, prepend=True)

    def _follow_nodes(self, name: str, args: tuple[Any, ...]) -> None:
        """Note which autograd node runs, if one does, and the operator that it runs."""
        task = running_graph_task()
        number = None if task < 0 else running_sequence_number()
        if number is None:
            self._leave_nodes()
            return
        node = (task, number)
        # Nodes of a pass that was begun inside this node have ended, and so have others of this pass.
        while (inner := self._running_node()) is not None and inner != node and inner[0] >= task:
            self._close_scope()
        if number == ACCUMULATES and name == "aten.detach" and not self._is_nested(task):
            # What it accumulates is the gradient of a parameter, or of FSDP's copy of one. A technique that
            # differentiates inside its own forward or backward accumulates what is its own.
            self._classify(args, GRADIENTS)
        # In a module whose forward is computed again, the node that does it is further out.
        if inner != node and not any(scope.node == node for scope in self._scopes):
            self._scopes.append(_Scope(node, ACTIVATION_GRADIENTS))

    def _is_nested(self, task: int) -> bool:
        """Return whether a backward pass was begun inside a module's forward, or a node of another pass."""
        return any(scope.node is None or scope.node[0] < task for scope in self._scopes)

    def _running_node(self) -> tuple[int, int] | None:
        """Return the innermost scope's node, if that is one."""
        return self._scopes[-1].node if self._scopes else None

    def _leave_nodes(self) -> None:
        while self._running_node() is not None:
            self._close_scope()

    def _close_scope(self) -> _Scope:
        """Leave the innermost module or node: what is new in it and held still outlives it."""
        scope = self._scopes.pop()
        if scope.node is not None and self._is_nested(scope.node[0]):
            # A technique differentiates inside its own forward or backward, and what that makes is its own.
            self._scopes[-1].blocks += scope.blocks
            self._scopes[-1].recomputed += scope.recomputed
            return scope
        for blocks, category in ((scope.blocks, scope.survivors), (scope.recomputed, RECOMPUTED)):
            for block in blocks:
                if block.size and block.category == TEMPORARY:
                    self._set_category(block, category)
        return scope

    def _sweep_gradients(self) -> None:
        waiting = self._awaiting_gradient
        arrived = [(name, parameter.grad) for name, parameter in waiting if parameter.grad is not None]
        if arrived:
            self._mark(arrived, GRADIENTS)
            self._awaiting_gradient = [pair for pair in waiting if pair[1].grad is None]

    # ---- rows --------------------------------------------------------------------------------------------

    def _add_row(self, op: Op, module: str) -> None:
        *device, host, disk = self._bytes
        now = self._clock() - self.start
        self.rows.add(now, device, host, disk=disk, phase=self._phase, module=module, op=op, step=self._step)
        self._changed = False
        if self._limit is not None and sum(device) > self._limit:
            raise OutOfMemory(self._now(), self._limit)
        if self._on_growth is not None and time.perf_counter() - self._sent_at >= self._interval:
            self._send()

    def _now(self) -> Moment:
        return self.rows.since(len(self.rows) - 1).moment(0)

    def _send(self) -> None:
        if self._on_growth is not None and self._sent < len(self.rows):
            grown = self.rows.since(self._sent)
            self._sent, self._sent_at = len(self.rows), time.perf_counter()
            self._on_growth(grown)


def _joined(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries, with the pieces of one tensor on the host as one entry at the place of the first."""
    pieces: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        # An operator that makes pieces makes those of one tensor.
        of_tensor = entry.kind.op in _MAKES_PIECES and entry.category >= HOST
        key = entry[:2] + entry.kind[2:] if of_tensor else (len(pieces),)
        pieces.setdefault(key, []).append(entry)
    for first, *others in pieces.values():
        if not others:
            yield first
            continue
        size = sum(piece.size for piece in (first, *others))
        moves = dict.fromkeys(move for piece in (first, *others) for move in piece.moves)
        yield first._replace(size=size, kind=first.kind._replace(shape=(size,)), moves=tuple(sorted(moves)))


def _key(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


@cache
def _kind(shape: torch.Size, dtype: torch.dtype, op: str, name: str) -> TensorKind:
    return TensorKind(tuple(shape), str(dtype).removeprefix("torch."), op, name)


@cache
def _name_of_all(first: str, second: str) -> str:
    """Return one name for what two names mean: ``"model.layers.3.*"`` of two parameters of a layer."""
    if not first or first == second or (first.endswith("*") and second.startswith(first[:-1])):
        return first or second
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return f"{''.join(a for a, _ in same).rpartition('.')[0]}.*".removeprefix(".")


def _op_of(name: str, args: tuple[Any, ...]) -> Op:
    return _op(name, tuple(a.shape for a in args if isinstance(a, torch.Tensor)))


@cache
def _op(name: str, shapes: tuple[torch.Size, ...]) -> Op:
    return Op(name, " ".join("x".join(map(str, shape)) for shape in shapes))
