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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from lab.memory.module_paths import ModulePaths
from lab.memory.observer import Observer
from lab.memory.out_of_memory import OutOfMemory
from lab.memory.resizes import report_resizes
from lab.memory.timeline import CATEGORIES, Moment, Op, Timeline, TimelineBuilder
from lab.memory.workspace import NO_WORKSPACE, Workspace
from lab.torch_private import FakeTensor, detect_fake_mode, local_part, storage_id

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = range(len(CATEGORIES))

HOST = len(CATEGORIES)
"""The category of host memory, after those of the device: the results of ``lab::to_host``.

On CPU nothing else tells memory of the host from memory of the device.
"""

NO_OP = Op("-")
"""The operator of the rows that mark the start and the end of a phase."""


class _Block(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a counted storage, which calls the meter when the storage dies."""

    __slots__ = ("category", "key", "size")

    key: int
    size: int
    category: int


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
    ) -> None:
        super().__init__()
        self.rows = TimelineBuilder()
        self._step = -1
        self._on_growth, self._interval = on_growth, interval
        self._sent, self._sent_at = 0, 0.0
        self._clock, self._start = clock, clock()
        self._limit = limit
        self._every_operator = every_operator
        self._run = run
        self._workspace = workspace
        self._live: dict[int, _Block] = {}
        self._bytes = [0] * (len(CATEGORIES) + 1)
        self._bytes[OTHER] = self._workspace.fixed
        self._changed = True
        self._phase = "setup"
        self._paths = ModulePaths()
        # The new blocks of each module that runs its forward, the innermost last.
        self._new_blocks: list[list[_Block]] = []
        self._swept_module = ""
        self._awaiting_gradient: list[nn.Parameter] = []

    # ---- what a step calls -------------------------------------------------------------------------------

    @contextmanager
    def measure(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Measure the step that runs in this context; the model and the optimizer count from the start.

        The timeline leaves out the time between steps, in which the next batch is read.
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
        with report_resizes(self._on_resize), self:
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                self._new_blocks.clear()
                self._send()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the step that runs in this context: forward, backward or optimizer."""
        outer, self._phase = self._phase, name
        self._swept_module = ""
        self._awaiting_gradient = [p for p in self._model.parameters() if p.requires_grad]
        self._add_row(NO_OP, "")
        yield
        self._sweep_gradients()
        self._add_row(NO_OP, "")
        self._phase = outer

    def timeline(self) -> Timeline:
        """Return the rows of all steps so far."""
        return self.rows.since(0)

    # ---- counting ----------------------------------------------------------------------------------------

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count the storages of the operator's inputs, run it, and count those of its outputs."""
        for value in args:
            self._count(value, OTHER)
        name = _name(func)
        try:
            result = self._run(func, args, kwargs)
        except torch.OutOfMemoryError as error:
            self._add_row(Op(name, _shapes(args)), self._paths.current())
            raise OutOfMemory(self._now(), None, str(error).splitlines()[0]) from error
        self._count(result, HOST if name == "lab.to_host" else OTHER)
        inside = self._workspace.kernel(name, args)
        if self._changed or inside or self._every_operator:
            module = self._paths.current()
            if module != self._swept_module:
                self._sweep_gradients()
                self._swept_module = module
            self._bytes[OTHER] += inside
            self._add_row(Op(name, _shapes(args)), module)
            self._bytes[OTHER] -= inside
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
        block = _Block(storage, self._on_death)
        block.key, block.category = key, category
        block.size = self._workspace.allocation(storage.nbytes())
        self._live[block.key] = block
        self._bytes[category] += block.size
        self._changed = True
        if self._new_blocks:
            self._new_blocks[-1].append(block)
        return block

    def _takes_no_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether DTensor computes shapes with this tensor, on device meta or in another fake mode."""
        if isinstance(tensor, FakeTensor):
            # The device of a fake tensor is not read, because that takes time in the dispatcher.
            return tensor.fake_mode is not self._fake_mode
        return tensor.device.type == "meta"

    def _on_death(self, block: _Block) -> None:
        del self._live[block.key]
        self._bytes[block.category] -= block.size
        block.size = 0
        self._changed = True

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        block = self._live.get(storage_id(storage))
        if block is not None:
            self._bytes[block.category] -= block.size
            block.size = self._workspace.allocation(storage.nbytes())
            self._bytes[block.category] += block.size
            self._changed = True

    def _mark(self, tensors: Iterable[torch.Tensor], category: int) -> None:
        for tensor in tensors:
            block = self._count_tensor(local_part(tensor), category)
            if block is not None:
                self._move(block, category)

    def _move(self, block: _Block, category: int) -> None:
        self._bytes[block.category] -= block.size
        self._bytes[category] += block.size
        block.category = category

    # ---- categories: what outlives its module is activations, gradients belong to parameters --------------

    def _follow(self, path: str, module: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, _: Any) -> None:
            # FSDP has gathered this module's parameters before. Those of its children are marked too, because
            # a technique may use their weights without calling them.
            self._mark(module.parameters(), PARAMETERS)
            self._paths.enter(path)
            self._new_blocks.append([])

        def leave(*_: Any) -> None:
            for block in self._new_blocks.pop():
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
        *device, host = self._bytes
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
