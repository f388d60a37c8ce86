"""The meter: counts every storage that crosses torch's dispatcher, on every backend but CUDA.

It is a dispatch mode. A storage is counted from the first operator that touches it until it dies (a weak
reference tells) or is resized (FSDP frees an unsharded parameter by resizing its storage to nothing). The
count is the same for real and for fake tensors, so a plan and a run can be compared to the byte.

What an operator takes inside itself never crosses the dispatcher and is not counted. On CPU that is flash
attention's scratch in backward, 4 bytes a head and token and 1 MiB a thread; all else agrees with the
profiler's memory events to the byte (``lab_tests/test_meter.py`` measures both).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from lab.memory.module_paths import ModulePaths
from lab.memory.observing import Observer
from lab.memory.out_of_memory import OutOfMemory
from lab.memory.resizes import resizes_seen
from lab.memory.timeline import CATEGORIES, Moment, Op, Timeline, TimelineBuilder
from lab.memory.workspace import NO_WORKSPACE, Workspace
from lab.torch_private import FakeTensor, detect_fake_mode, local_part, storage_id

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = range(len(CATEGORIES))

HOST = len(CATEGORIES)
"""Stands behind the device's categories: what ``lab::to_host`` returns, on CPU the one sign of the host."""

NO_OP = Op("-")
"""Stands at the rows that mark the beginning and the end of a phase."""


class _Block(weakref.ref[torch.UntypedStorage]):
    """A counted storage. Its death calls the meter back."""

    __slots__ = ("category", "key", "size")

    key: int
    size: int
    category: int


class Meter(Observer):
    """Measures a step's bytes: ``measure(model, optimizer)`` around it, ``phase(name)`` around its parts.

    ``on_growth`` is called between operators, at most every ``interval`` seconds, with the rows that came
    since the last call: the live timeline. It runs in the measured thread, so there is no sampler to outlive
    the step; the price is that nothing is drawn while one long operator runs.

    A plan gives the ``clock`` of the device that it stands for, and the ``workspace`` that its kernels take.
    With a ``limit``, in bytes, the operator after which the device holds more raises OutOfMemory: a CPU rank
    runs out as a device of that size would. With ``every_operator`` the operators that change no bytes have a
    row too.
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
    ) -> None:
        super().__init__()
        self.rows = TimelineBuilder()
        self._step = -1
        self._on_growth, self._interval = on_growth, interval
        self._sent, self._sent_at = 0, 0.0
        self._clock, self._start = clock, clock()
        self._limit = limit
        self._every_operator = every_operator
        self._workspace = workspace
        self._live: dict[int, _Block] = {}
        self._held = [0] * (len(CATEGORIES) + 1)
        self._held[OTHER] = self._workspace.fixed
        self._changed = True
        self._phase = "setup"
        self._paths = ModulePaths()
        self._made: list[list[_Block]] = []  # by each module that runs its forward, innermost last
        self._swept = ""
        self._awaiting_gradient: list[nn.Parameter] = []

    # ---- what a step calls -------------------------------------------------------------------------------

    @contextmanager
    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Count one step, the block, beginning with what the model and the optimizer hold already.

        What happens between steps (the next batch is read) is not part of the timeline.
        """
        self._step += 1
        self._paths = ModulePaths()
        self._fake_mode = detect_fake_mode()
        self._mark(model.parameters(), PARAMETERS)
        self._mark(model.buffers(), PARAMETERS)
        self._mark((p.grad for p in model.parameters() if p.grad is not None), GRADIENTS)
        if optimizer is not None:
            self._mark((v for s in optimizer.state.values() for v in s.values()), OPTIMIZER)
        self._model = model
        hooks = [hook for path, module in model.named_modules() for hook in self._follow(path, module)]
        with resizes_seen(self._resized), self:
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                self._made.clear()
                self._send()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the part of the step that runs in the block: forward, backward, optimizer."""
        outer, self._phase = self._phase, name
        self._swept = ""
        self._awaiting_gradient = [p for p in self._model.parameters() if p.requires_grad]
        self._add_row(NO_OP, "")
        yield
        self._sweep_gradients()
        self._add_row(NO_OP, "")
        self._phase = outer

    def timeline(self) -> Timeline:
        """Everything measured so far."""
        return self.rows.since(0)

    # ---- counting ----------------------------------------------------------------------------------------

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, then count the storages of its inputs and outputs."""
        for value in args:
            self._count(value, OTHER)
        name = _name(func)
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            self._add_row(Op(name, _shapes(args)), self._paths.current())
            raise OutOfMemory(self._now(), None, str(error).splitlines()[0]) from error
        self._count(result, HOST if name == "lab.to_host" else OTHER)
        inside = self._workspace.inside(name, args)
        if self._changed or inside or self._every_operator:
            module = self._paths.current()
            if module != self._swept:
                self._sweep_gradients()
                self._swept = module
            self._held[OTHER] += inside
            self._add_row(Op(name, _shapes(args)), module)
            self._held[OTHER] -= inside
        return result

    def _count(self, value: Any, category: int) -> None:
        if isinstance(value, torch.Tensor):
            self._count_tensor(value, category)
        elif isinstance(value, tuple | list):
            for item in value:
                self._count(item, category)

    def _count_tensor(self, tensor: torch.Tensor, category: int) -> _Block | None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        block = self._live.get(key)
        if block is not None or self._takes_no_memory(tensor):
            return block
        block = _Block(storage, self._freed)
        block.key, block.category = key, category
        block.size = self._workspace.rounded(storage.nbytes())
        self._live[block.key] = block
        self._held[category] += block.size
        self._changed = True
        if self._made:
            self._made[-1].append(block)
        return block

    def _takes_no_memory(self, tensor: torch.Tensor) -> bool:
        """DTensor propagates shapes on meta tensors, and on fake tensors of a mode of its own."""
        if isinstance(tensor, FakeTensor):
            # Not asked for its device: a fake tensor's takes a trip through the dispatcher.
            return tensor.fake_mode is not self._fake_mode
        return tensor.device.type == "meta"

    def _freed(self, block: _Block) -> None:
        del self._live[block.key]
        self._held[block.category] -= block.size
        block.size = 0
        self._changed = True

    def _resized(self, storage: torch.UntypedStorage) -> None:
        block = self._live.get(storage_id(storage))
        if block is not None:
            self._held[block.category] -= block.size
            block.size = self._workspace.rounded(storage.nbytes())
            self._held[block.category] += block.size
            self._changed = True

    def _mark(self, tensors: Iterable[torch.Tensor], category: int) -> None:
        for tensor in tensors:
            block = self._count_tensor(local_part(tensor), category)
            if block is not None:
                self._move(block, category)

    def _move(self, block: _Block, category: int) -> None:
        self._held[block.category] -= block.size
        self._held[category] += block.size
        block.category = category

    # ---- whose: modules promote what outlives them, parameters claim their gradients ---------------------

    def _follow(self, path: str, module: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, _: Any) -> None:
            # FSDP has gathered by now what this module needs. Those of its children too, for a technique may
            # use their weights without running them.
            self._mark(module.parameters(), PARAMETERS)
            self._paths.enter(path)
            self._made.append([])

        def leave(*_: Any) -> None:
            for block in self._made.pop():
                if block.size and block.category == OTHER:
                    self._move(block, ACTIVATIONS)
            self._paths.leave()

        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)

    def _sweep_gradients(self) -> None:
        waiting = []
        for parameter in self._awaiting_gradient:
            if parameter.grad is None:
                waiting.append(parameter)
            else:
                self._mark((parameter.grad,), GRADIENTS)
        self._awaiting_gradient = waiting

    # ---- rows --------------------------------------------------------------------------------------------

    def _add_row(self, op: Op, module: str) -> None:
        *device, host = self._held
        now = self._clock() - self._start
        self.rows.add(now, device, host, phase=self._phase, module=module, op=op, step=self._step)
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


@cache
def _name(func: Any) -> str:
    return str(func.overloadpacket)


def _shapes(args: tuple[Any, ...]) -> str:
    return " ".join("x".join(map(str, a.shape)) for a in args if isinstance(a, torch.Tensor))
