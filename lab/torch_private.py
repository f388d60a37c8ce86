"""Every use of torch's private interfaces in this package.

A new version of torch may rename or remove each of them. ``lab_tests/test_torch_private.py`` tests each name
of this module with the torch that is installed. A name that torch has too means what it means there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, _guards, nn
from torch._C import _distributed_c10d
from torch._subclasses import fake_tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg
from torch.utils import _python_dispatch

# mypy does not see the names of these that start with an underscore.
_C: Any = torch._C
_c10d: Any = dist.distributed_c10d
_c10d_bindings: Any = _distributed_c10d
_aten: Any = torch.ops.aten

# ---- fake tensors ------------------------------------------------------------------------------------------

FakeTensor = fake_tensor.FakeTensor
"""A tensor with a shape, a dtype and a device, and without memory for its elements.

Its storage has the size in bytes that a real one would have, and dies with the last tensor that uses it. Its
attribute ``fake_mode`` is the mode that made it.
"""

FakeTensorMode = fake_tensor.FakeTensorMode
"""A context in which operators make fake tensors; with ``allow_non_fake_inputs=True`` from real ones too."""

_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)

_UNKNOWN = object()

RESULTS = 20_000
"""The most results of operators that are kept, each of about 1 KiB. A plan of a preset has 1,000 to 2,000."""


class _Made(NamedTuple):
    """A tensor that an operator makes, over the storage of its tensor ``argument`` or over a new one."""

    argument: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class PlanningMode(FakeTensorMode):
    """A ``FakeTensorMode`` that takes a fifth of the time for an operator that has been seen before.

    What an operator returns is kept under a key that is made of its arguments: the number of one of them, or
    the sizes of a tensor that is made anew. No size is symbolic here. An operator is left to torch if an
    argument or a result is not a plain one, if the operator changes the sizes or the storage of an argument,
    or if it cannot be told which of its arguments it returns. All modes of a process share what is kept.
    """

    _results: ClassVar[dict[tuple[object, ...], Any]] = {}

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._attributes: dict[torch.device, dict[str, object]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in DispatchMode.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        key, tensors = self._key(func, args, kwargs)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        known = self._results.get(key, _UNKNOWN)
        if known is not _UNKNOWN:
            return self._make(known, tensors)
        storages = [*map(_storage_of, tensors)]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        with suppress(LookupError):
            kept = self._kept(result, tensors, set())
            if self._key(func, args, kwargs)[0] == key and [*map(_storage_of, tensors)] == storages:
                if len(self._results) >= RESULTS:
                    self._results.clear()
                self._results[key] = kept
        return result

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...] | None, list[FakeTensor]]:
        """Return everything that an operator's result depends on, and the tensors among its arguments.

        The key is None if an argument is not a plain one.
        """
        facts: list[object] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        tensors: list[FakeTensor] = []
        is_known = self._describe(args, facts, tensors)
        if kwargs and is_known:
            facts += kwargs
            is_known = self._describe(kwargs.values(), facts, tensors)
        # Which tensors share a storage: set_ changes none if it is given the one that it has.
        first: dict[int, int] = {}
        facts += [first.setdefault(_storage_of(tensor), number) for number, tensor in enumerate(tensors)]
        return tuple(facts) if is_known else None, tensors

    def _describe(self, args: Iterable[Any], facts: list[object], tensors: list[FakeTensor]) -> bool:
        """Add what arguments are to ``facts``, and return whether all are plain."""
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                if arg.fake_mode is not self or not _is_plain(arg):
                    return False
                tensors.append(arg)
                size = arg.untyped_storage().nbytes()
                facts += (kind, arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), size)
                facts.append(arg.fake_device)
            elif kind in _PLAIN:
                facts += (kind, arg)
            elif kind is list or kind is tuple:
                facts += (kind, len(arg))
                if not self._describe(arg, facts, tensors):
                    return False
            else:
                return False
        return True

    def _kept(self, result: Any, tensors: list[FakeTensor], storages: set[int]) -> Any:
        """Return how to make an operator's result again; ``storages`` has those that it has made.

        Raises:
            LookupError: It cannot be made from tensors of the same description.
        """
        if result is None:
            return None
        if type(result) in (list, tuple):
            return type(result), [self._kept(item, tensors, storages) for item in result]
        if type(result) is not FakeTensor:
            raise LookupError
        same = [number for number, tensor in enumerate(tensors) if tensor is result]
        if len(same) == 1:
            return same[0]
        storage = _storage_of(result)
        arguments = [number for number, tensor in enumerate(tensors) if _storage_of(tensor) == storage]
        if len(arguments) > 1 or storage in storages:
            raise LookupError
        argument = arguments[0] if arguments else None
        if argument is None:
            storages.add(storage)
        sizes = result.shape, result.stride(), int(result.storage_offset())
        made = _Made(argument, *sizes, result.dtype, result.fake_device)
        if not _is_plain(result) or _facts(self._make(made, tensors)) != _facts(result):
            raise LookupError
        return made

    def _make(self, kept: Any, tensors: list[FakeTensor]) -> Any:
        """Return the result that ``_kept`` described."""
        if kept is None:
            return None
        if type(kept) is int:
            return tensors[kept]
        if type(kept) is tuple:
            kind, items = kept
            return kind([self._make(item, tensors) for item in items])
        argument, shape, stride, offset, dtype, device = kept
        if argument is None:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            storage = tensors[argument].untyped_storage()
            meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride)
        tensor = Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        _C._set_throw_on_mutable_data_ptr(tensor)
        vars(tensor).update(self._attributes_on(device))
        return tensor

    def _attributes_on(self, device: torch.device) -> dict[str, object]:
        """Return the attributes of a tensor that this mode makes on a device."""
        if device not in self._attributes:
            with unset_fake_temporarily():
                meta = torch.empty(0, device="meta")
            self._attributes[device] = dict(vars(FakeTensor(self, meta, device)))
        return self._attributes[device]


def _is_plain(tensor: FakeTensor) -> bool:
    """Return whether a tensor has no constant, and neither layout nor bits that its key leaves out."""
    strided = tensor.layout is torch.strided and not tensor.is_inference()
    return strided and tensor.constant is None and not (tensor.is_conj() or tensor.is_neg())


def _storage_of(tensor: FakeTensor) -> int:
    return storage_id(tensor.untyped_storage())


def _facts(tensor: FakeTensor) -> tuple[object, ...]:
    sizes = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return tensor.dtype, *sizes, tensor.requires_grad, _C._dispatch_keys(tensor), vars(tensor)


detect_fake_mode = _guards.detect_fake_mode
"""Return the ``FakeTensorMode`` that this thread is in, or None."""

unset_fake_temporarily = fake_tensor.unset_fake_temporarily
"""A context in which operators make real tensors again, inside a ``FakeTensorMode``."""


# ---- dispatch modes ----------------------------------------------------------------------------------------


class DispatchMode(_python_dispatch.TorchDispatchMode):
    """The base of a mode whose ``__torch_dispatch__`` sees every operator that this thread runs in it.

    torch wraps this method of a mode, so that ``torch.compile`` leaves it out. The wrapper takes a fifth of
    the meter's time, at every operator. Nothing is compiled under a mode of the lab, so a subclass of this
    class has no wrapper.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@cache
def is_wrapper(kind: type) -> bool:
    """Return whether a class of tensors holds other tensors, to which its operators are dispatched again.

    ``DTensor`` and the result of an asynchronous functional collective are such classes.
    """
    return hasattr(kind, "__tensor_flatten__")


def get_current_dispatch_mode() -> object | None:
    """Return the innermost dispatch mode that this thread is in, a ``FakeTensorMode`` among them, or None."""
    return _python_dispatch._get_current_dispatch_mode()


def disable_current_modes() -> AbstractContextManager[object]:
    """Return a context in which no dispatch mode of this thread sees an operator."""
    context: AbstractContextManager[object] = _python_dispatch._disable_current_modes()
    return context


# ---- autograd ----------------------------------------------------------------------------------------------


def next_sequence_number() -> int:
    """Return the number of the next autograd node that this thread makes; the numbers count upwards."""
    number: int = _C._autograd._get_sequence_nr()
    return number


def running_sequence_number() -> int | None:
    """Return the number of the autograd node that backward runs in this thread; None outside backward.

    A node that accumulates a gradient has a number above all others.
    """
    node = _C._current_autograd_node()
    return None if node is None else node._sequence_nr()


ACCUMULATES = 2**64 - 1
"""The number of a node that accumulates a gradient; see ``running_sequence_number``."""


def running_graph_task() -> int:
    """Return the number of the backward pass that this thread runs, the innermost; -1 outside backward.

    A pass that is begun inside another has a higher number.
    """
    number: int = _C._current_graph_task_id()
    return number


def queue_callback(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now has ended; a pass that fails does not call it."""
    # mypy knows no such attribute.
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


# ---- tensors and their storages ----------------------------------------------------------------------------


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that tensors over the same memory share, and that no other living storage has.

    Fake tensors have it too. It stays the same when the storage is resized.
    """
    number: int = storage._cdata
    return number


def reference_counts(tensor: Tensor) -> tuple[int, int, int]:
    """Return how many references there are to a tensor in C++, to its storage, and to the tensor in Python.

    Autograd's graph holds tensors in C++, and so does the thread of a collective. The views that gloo's
    all-gather makes of its output hold the storage alone.
    """
    storage = tensor.untyped_storage()
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count, _C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)


def is_held_elsewhere(gradient: Tensor) -> bool:
    """Return whether anything but a node's backward holds the gradient that autograd passed to it.

    A hook may have stored the tensor, a view of it, or its storage.

    Args:
        gradient: An argument of ``backward`` of a function with one output. ``backward`` has no other
            reference to it, and passes it on directly.
    """
    return any(count > own for count, own in zip(reference_counts(gradient), _own_references(), strict=True))


@cache
def _own_references() -> tuple[int, int, int]:
    """Return the references to a gradient that nothing else holds, as counted inside ``backward``."""
    counted: list[tuple[int, int, int]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            counted.append(count_in_callee(gradient))
            return gradient

    def count_in_callee(gradient: Tensor) -> tuple[int, int, int]:
        return reference_counts(gradient)

    with disable_current_modes(), torch.enable_grad():
        x = torch.zeros(2, requires_grad=True)
        y: Tensor = Probe.apply(x)  # type: ignore[no-untyped-call]
        (y * y).sum().backward()
    return counted[0]


def version(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place, or another tensor over its memory."""
    return tensor._version


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a ``DTensor`` that this rank holds, and any other tensor itself.

    ``DTensor.to_local`` runs an operator that autograd records. This function runs none.
    """
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


# ---- modules -----------------------------------------------------------------------------------------------


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary in which a module keeps its own parameters.

    The module computes with what this dictionary holds. Unlike ``setattr`` it takes any tensor.
    """
    return module._parameters


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a hook was registered on a parameter, to run before or after its gradient is added."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before or after the forward or backward of a module.

    Those that were registered for all modules are among them.
    """
    everywhere: Any = torch.nn.modules.module
    return [
        *everywhere._global_forward_hooks.values(),
        *everywhere._global_forward_pre_hooks.values(),
        *everywhere._global_backward_hooks.values(),
        *everywhere._global_backward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    ]


def uncompiled(model: nn.Module) -> Any:
    """Return the model that was given to ``torch.compile``; a model that was not compiled is returned itself.

    The type is Any because the attributes of a compiled model are those of the model in it.
    """
    return getattr(model, "_orig_mod", model)


# ---- FSDP and DTensor --------------------------------------------------------------------------------------

DefaultAllGather = _fsdp_collectives.DefaultAllGather
"""How FSDP gathers parameters, called as ``(output, input, group, async_op)``.

``FSDPModule.set_custom_all_gather`` takes an instance of a subclass. A subclass replaces the call, and keeps
the allocation of the buffers.
"""

DefaultReduceScatter = _fsdp_collectives.DefaultReduceScatter
"""How FSDP reduces gradients, called as ``(output, input, group, op, async_op)``, which returns a ``Work``.

``FSDPModule.set_custom_reduce_scatter`` takes an instance of a subclass.
"""


def reset_shards(module: FSDPModule) -> None:
    """Let FSDP use the parameters that a module has now, as it does after ``module.to_empty``.

    ``to_empty`` exchanges tensors in place, which torch refuses where they are fake.
    """
    for parameter in _fsdp_parameters(module):
        parameter.reset_sharded_param()


def forget_forward(model: nn.Module) -> None:
    """Let FSDP hold no parameters that a forward has gathered, and not await that forward's backward.

    The outermost unit keeps its parameters until backward. The next backward would gather parameters in
    the order of both forwards.
    """
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        unit.reshard()
        for group in _fsdp_groups(unit):
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()


def sharded_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters of a unit of FSDP, those of the units inside it left out.

    They are the same parameters while the module works with gathered ones.
    """
    return [parameter.sharded_param for parameter in _fsdp_parameters(module)]


def offloaded_parameters(model: nn.Module) -> set[Tensor]:
    """Return the sharded parameters in a model that FSDP keeps in host memory: its ``CPUOffloadPolicy``."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    every = [parameter for unit in units for parameter in _fsdp_parameters(unit)]
    return {parameter.sharded_param for parameter in every if parameter.offload_to_cpu}


def pad_shards(model: nn.Module) -> None:
    """Let FSDP prepare a model's shards now, and not in the first forward.

    Where a shard has fewer rows than the first one, FSDP pads it once more if it is a fake tensor, because it
    does not see that it is padded already. A meter would then see a new tensor in the place of a parameter.
    """
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def set_shard_copy(module: FSDPModule, copy: Callable[[Tensor, torch.device], Tensor]) -> None:
    """Let a function copy the shards of a unit of FSDP to the device, before each all-gather.

    The unit has FSDP's ``CPUOffloadPolicy``. FSDP's own copy is ``Tensor.to``, which makes none between two
    tensors of one device.

    Args:
        module: The unit.
        copy: Called with a shard, flat and padded, and the device of the mesh. It returns the copy, which is
            then cast to the dtype in which parameters are gathered.
    """
    for parameter in _fsdp_parameters(module):
        parameter.__class__ = _CopiedParameter
        parameter.copy = copy


class _CopiedParameter(_fsdp_param.FSDPParam):
    """FSDP's record of a parameter, with another copy of the shard to the device."""

    copy: Callable[[Tensor, torch.device], Tensor]

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        on_device = self.copy(self._sharded_param_data, self.device)
        return [on_device.to(self.param_dtype or on_device.dtype)]


def _fsdp_parameters(module: FSDPModule) -> list[Any]:
    """Return FSDP's record of each parameter of a unit."""
    return [parameter for group in _fsdp_groups(module) for parameter in group.fsdp_params]


def _fsdp_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP's records of the groups in which a unit gathers its parameters."""
    state: Any = module._get_fsdp_state()
    # In releases before 2.13 the name is in the singular, and its value is None without parameters.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def cached_layouts() -> Iterator[None]:
    """Let DTensor compute each operator's layout once in this context, as it does for real tensors.

    It computes a layout on fake tensors of the size of the whole model, which a meter would count. Where an
    operator's own tensors are fake, DTensor takes that for tracing and computes the layout each time.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding_non_cached = propagator.propagate_op_sharding
    try:
        yield
    finally:
        del propagator.propagate_op_sharding_non_cached


# ---- process groups ----------------------------------------------------------------------------------------

FakeStore = fake_pg.FakeStore
"""A store for a process group whose other ranks do not exist: nothing waits for them.

To import it registers the backend "fake", whose collectives return at once and write nothing.
"""


def process_groups() -> dict[dist.ProcessGroup, str]:
    """Return the process groups that this process belongs to, each with the name that torch gave it."""
    groups: dict[dist.ProcessGroup, str] = _c10d._world.pg_names
    return groups


def process_group_of(argument: object) -> dist.ProcessGroup | None:
    """Return the process group that an argument of a collective's operator stands for, or None.

    The operators of ``torch.ops.c10d`` take a group as a ``torch.ScriptObject``, and those of
    ``torch.ops._c10d_functional`` take its name.
    """
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument)
    if isinstance(argument, str):
        return next((group for group, name in process_groups().items() if name == argument), None)
    return None


class PythonProcessGroup(dist.ProcessGroup):
    """The base of a process group whose collectives are methods in Python, called as torch 2.13 calls them.

    torch stores a group's name in the group's backends, and finds the group by that name again. A group in
    Python has no backend, so this class stores the name. Releases before 2.13 call some collectives by other
    names, which this class translates.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name that torch gave the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _allgather_base(self, *args: Any) -> Any:
        return self.all_gather_single(*args)

    def _reduce_scatter_base(self, *args: Any) -> Any:
        return self.reduce_scatter_single(*args)

    def allgather_into_tensor_coalesced(self, *args: Any) -> Any:
        """Call ``all_gather_single_coalesced``."""
        return self.all_gather_single_coalesced(*args)

    def reduce_scatter_tensor_coalesced(self, *args: Any) -> Any:
        """Call ``reduce_scatter_single_coalesced``."""
        return self.reduce_scatter_single_coalesced(*args)

    def alltoall_base(self, *args: Any) -> Any:
        """Call ``all_to_all_single``."""
        return self.all_to_all_single(*args)


def completed_work() -> dist.Work:
    """Return what a collective returns that has ended already: ``wait`` returns at once.

    It holds no tensor.
    """
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    work: dist.Work = _c10d_bindings._create_work_from_future(future)
    return work


def runs_inside_ddp() -> bool:
    """Return whether a forward of DDP is running."""
    return DistributedDataParallel._get_active_ddp_module() is not None


# ---- distributed checkpoints -------------------------------------------------------------------------------


def storage_info(file: str, at: int, length: int) -> Any:
    """Return torch's record of where a chunk of a tensor lies in a checkpoint.

    Args:
        file: The name of the file.
        at: The first byte in it.
        length: The number of bytes.
    """
    # Imported late: few commands read checkpoints.
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, at, length)


# ---- CUDA's allocator --------------------------------------------------------------------------------------


def set_expandable_segments(expandable: bool) -> None:
    """Let the segments that CUDA's allocator makes from now on grow or not.

    Torch reads PYTORCH_ALLOC_CONF at the allocator's first use in a process, and not again.
    """
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")


def start_memory_history(*, stacks: bool) -> None:
    """Record what the caching allocator of CUDA does from now on, with the Python stacks that asked for it.

    Args:
        stacks: Whether stacks are recorded. They take more time than all else.
    """
    if stacks:
        torch.cuda.memory._record_memory_history()
    else:
        torch.cuda.memory._record_memory_history("all", context=None)


def stop_memory_history() -> None:
    """Stop what ``start_memory_history`` started, and forget it."""
    torch.cuda.memory._record_memory_history(None)


def memory_snapshot() -> dict[str, Any]:
    """Return the allocator's state and history, as PyTorch's memory viewer reads it from a pickle."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


def memory_events() -> list[dict[str, Any]]:
    """Return the history of the current device, in order.

    Each event has an ``action`` ("alloc", "free_requested" and others), a ``size`` in bytes, and ``time_us``,
    microseconds since the epoch.
    """
    events: list[dict[str, Any]] = memory_snapshot()["device_traces"][torch.cuda.current_device()]
    return events


# ---- attention kernels -------------------------------------------------------------------------------------

# The shapes: q and out [b, h, S, D], k and v [b, h/G, S', D], LSE [b, h, S]. Query head i attends to the head
# i // G of k and v. Causal attention takes S == S'.


def cpu_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention on CPU; return out and LSE, the logarithm of the softmax's denominators."""
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def cpu_flash_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from what ``cpu_flash_attention`` returned."""
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return dq, dk, dv


def cuda_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention on CUDA; return out and LSE. D is a multiple of 8.

    A scale of None stands for 1/sqrt(D).
    """
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def cuda_flash_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from what ``cuda_flash_attention`` returned."""
    # The random state of dropout: there is no dropout, and the operator takes the tensors all the same.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    lengths = (q.shape[2], k.shape[2])
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, seed, scale=scale
    )
    return dq, dk, dv


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention by cuDNN; return out and LSE. D is a multiple of 8."""
    # No bias; the LSE is computed.
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse.squeeze(-1)


def cudnn_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from what ``cudnn_attention`` returned."""
    # The random state of dropout, of which there is none; no bias, and no packed sequences.
    state, nothing = torch.empty(2, dtype=torch.int64, device=q.device), (None, None, None)
    lengths = (q.shape[2], k.shape[2])
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, lse[..., None], state, state, *nothing, *lengths, 0.0, causal, scale=scale
    )
    return dq, dk, dv
