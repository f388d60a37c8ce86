"""Each name of `lab.torch_private` does with the installed torch what its docstring says."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._python_dispatch import TorchDispatchMode

from lab import torch_private
from lab.recipe.recipe import Recipe
from lab.step.loopback import Loopback
from lab.step.one_rank import one_rank
from lab.torch_private import DispatchMode, FakeTensor, FakeTensorMode

RANKS = 4


class Seen(DispatchMode):
    """Notes the operators that run inside it, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        self.arguments.append(args)
        return func(*args, **kwargs or {})


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process as rank 0 of four, which answers for its peers itself."""
    with one_rank(Recipe(fsdp=True), RANKS, "loopback") as ranks:
        yield ranks


# ---- fake tensors ------------------------------------------------------------------------------------------


def test_a_fake_tensor_has_a_size_and_a_mode() -> None:
    real = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.ones(2**40)
        total = x[:3] + real
    assert isinstance(x, FakeTensor)
    assert x.fake_mode is mode
    assert x.untyped_storage().nbytes() == 2**42
    assert isinstance(total, FakeTensor)
    assert total.device == real.device


@pytest.mark.parametrize("mode", [FakeTensorMode, suppress], ids=["fake", "real"])
def test_a_storage_dies_with_the_last_tensor_over_it(mode: Callable[[], Any]) -> None:
    with mode():
        x = torch.ones(5)
        part = x[1:]
        storage = weakref.ref(x.untyped_storage())
        del x
        assert storage() is not None
        del part
        assert storage() is None


def test_the_fake_mode_of_the_thread_is_detected() -> None:
    assert torch_private.detect_fake_mode() is None
    with FakeTensorMode() as mode, Seen():
        assert torch_private.detect_fake_mode() is mode
    assert torch_private.detect_fake_mode() is None


def test_tensors_are_real_where_the_fake_mode_is_unset() -> None:
    with FakeTensorMode():
        with torch_private.unset_fake_temporarily():
            assert (torch.ones(3) + 1).tolist() == [2, 2, 2]
        assert isinstance(torch.ones(3), FakeTensor)


def results() -> list[Any]:
    """Run operators whose arguments differ in one thing, and return what they returned."""
    aten = torch.ops.aten
    x = torch.ones(6, 4)
    part, bits = x[1:].narrow(1, 1, 2), torch.ones(6, 4, dtype=torch.complex64)
    kinds = [
        x * 2,
        x.int() * 2,
        x.int() * 2.0,
        x.int() * True,
        x.to(torch.bfloat16),
        x.double() * 2,
        bits * 2,
    ]
    strides = [x.t() * 2, torch.ones(4, 6) * 2]
    sums = [x.sum(), x.sum(dim=0), x.sum(dim=[0, 1]), x.sum(0, keepdim=True), x.sum(1, dtype=torch.float64)]
    views = [x.t(), part, part.t(), part[1:], x.view(4, 6), x.view(4, 6).t(), x.expand(2, 6, 4), x.detach()]
    parts = [*x.split([1, 5]), *x.split([5, 1]), *x.unbind(1), torch.cat([part, part]), torch.cat([x, x], 1)]
    conjugates = [bits.conj() * 2, bits.conj().t(), bits.conj().imag, bits.conj()[1:]]
    copies = [part.clone(), x.t().clone(), x.t().clone(memory_format=torch.contiguous_format)]
    leaf = torch.ones(4, 3, requires_grad=True)
    products = [x @ leaf, (x @ leaf).detach() * 2, torch.mm(x, leaf, out=torch.empty(6, 3).detach())]
    y, out, empty = x.clone(), x.clone(), x.new_empty(0)
    add_, add, addcmul_ = aten.add_.Tensor, aten.add.out, aten.addcmul_.default
    same = [add_(x, x), add_(x, y), add(x, y, out=x), add(x, y, out=out), add(x, y, out=y), add(x, x, out=y)]
    same += [addcmul_(part, part, x[1:, :2], value=2), addcmul_(part, x[1:, :2], part, value=2)]
    grown = [torch.add(x, y, out=empty), torch.add(x, y, out=empty), y.t_(), y.t_(), y.unsqueeze_(0)]
    moved = [x.detach().set_(x), x.clone().set_(x), part.clone().set_(part), x.clone().resize_(2, 3)]
    return [
        x,
        leaf,
        x.add_(1),
        *same,
        *grown,
        *moved,
        *kinds,
        *strides,
        *sums,
        *views,
        *parts,
        *conjugates,
        *copies,
        *products,
    ]


def facts_of(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    bits = tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.is_leaf
    sizes = tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes()
    return tensor.dtype, tensor.device, *sizes, *bits


def sharing(tensors: list[Tensor]) -> list[int]:
    """Return the number of the first tensor over the same memory as each."""
    storages = [torch_private.storage_id(tensor.untyped_storage()) for tensor in tensors]
    return [storages.index(storage) for storage in storages]


def test_the_planning_mode_returns_what_torchs_mode_does_and_knows_it_again() -> None:
    with torch.no_grad(), FakeTensorMode():
        expected = results()
    with torch.no_grad(), torch_private.PlanningMode():
        results()
        misses = FakeTensorMode.cache_misses
    with torch.no_grad(), torch_private.PlanningMode() as mode:
        again = results()
    assert {getattr(tensor, "fake_mode", None) for tensor in again} == {mode}
    assert [facts_of(tensor) for tensor in again] == [facts_of(tensor) for tensor in expected]
    assert sharing(again) == sharing(expected)
    assert FakeTensorMode.cache_misses == misses


def test_the_planning_mode_keeps_no_more_results_than_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(torch_private, "RESULTS", 7)
    monkeypatch.setattr(torch_private.PlanningMode, "_results", kept)
    with torch.no_grad(), torch_private.PlanningMode():
        results()
    assert 0 < len(kept) <= 7


# ---- dispatch modes ----------------------------------------------------------------------------------------


def dispatch(_: Any, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **kwargs or {})


def test_a_mode_sees_each_operator_and_is_not_wrapped() -> None:
    with Seen() as seen:
        torch.ones(3).mul(2)
    assert seen.names == ["aten.ones", "aten.mul"]
    plain = type("Plain", (DispatchMode,), {"__torch_dispatch__": dispatch})
    wrapped = type("Wrapped", (TorchDispatchMode,), {"__torch_dispatch__": dispatch})
    assert vars(plain)["__torch_dispatch__"] is dispatch
    assert vars(wrapped)["__torch_dispatch__"] is not dispatch, "torch wraps no mode: drop the exception"


def test_wrappers_are_told_from_other_tensors(mesh: DeviceMesh) -> None:
    sharded = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)], src_data_rank=None)
    waiting = functional.all_gather_single(torch.ones(3), 0, mesh)
    assert torch_private.is_wrapper(type(sharded))
    assert torch_private.is_wrapper(type(waiting))
    for kind in (Tensor, nn.Parameter, FakeTensor):
        assert not torch_private.is_wrapper(kind)


def test_the_innermost_mode_is_the_current_one() -> None:
    assert torch_private.get_current_dispatch_mode() is None
    with FakeTensorMode() as fake:
        assert torch_private.get_current_dispatch_mode() is fake
        with Seen() as seen:
            assert torch_private.get_current_dispatch_mode() is seen
    assert torch_private.get_current_dispatch_mode() is None


def test_disabled_modes_see_nothing_and_come_back_in_order() -> None:
    with Seen() as outer, FakeTensorMode(), Seen() as inner:
        with torch_private.disable_current_modes():
            assert torch.arange(3).tolist() == [0, 1, 2]
        assert (outer.names, inner.names) == ([], [])
        assert isinstance(torch.zeros(3), FakeTensor)
        assert torch_private.get_current_dispatch_mode() is inner
    assert inner.names == ["aten.zeros"]


# ---- autograd ----------------------------------------------------------------------------------------------


class Numbered(torch.autograd.Function):
    """Notes which node runs its backward."""

    running: list[int | None]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Numbered.running.append(torch_private.running_sequence_number())
        return grads[0]


def test_nodes_are_numbered_in_the_order_of_forward() -> None:
    x = torch.ones(3, requires_grad=True)
    accumulated: list[int | None] = []
    x.register_post_accumulate_grad_hook(
        lambda _: accumulated.append(torch_private.running_sequence_number())
    )
    Numbered.running = []
    first = torch_private.next_sequence_number()
    y = Numbered.apply(x)  # type: ignore[no-untyped-call]
    assert torch_private.next_sequence_number() == first + 1
    y = Numbered.apply(y.sin())  # type: ignore[no-untyped-call]
    after = torch_private.next_sequence_number()
    assert after == first + 3
    assert torch_private.running_sequence_number() is None
    y.sum().backward()
    assert Numbered.running == [first + 2, first]
    [last] = accumulated
    assert last is not None
    assert last > after
    assert torch_private.running_sequence_number() is None


def test_a_callback_runs_when_backward_has_ended() -> None:
    x = torch.ones(3, requires_grad=True)
    gradients: list[list[float]] = []

    def queue(_: Tensor) -> None:
        def note() -> None:
            assert x.grad is not None
            gradients.append(x.grad.tolist())

        torch_private.queue_callback(note)

    y = 2 * x
    y.register_hook(queue)
    y.sum().backward()
    assert gradients == [[2, 2, 2]]


def test_a_callback_does_not_run_when_backward_fails() -> None:
    x = torch.ones(3, requires_grad=True)
    called: list[None] = []

    def fail(_: Tensor) -> None:
        raise ValueError("this hook fails")

    y = 2 * x
    x.register_hook(fail)
    y.register_hook(lambda _: torch_private.queue_callback(lambda: called.append(None)))
    with pytest.raises(ValueError, match="this hook fails"):
        y.sum().backward()
    (3 * torch.ones(3, requires_grad=True)).sum().backward()
    assert called == []


# ---- tensors and their storages ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [FakeTensorMode, suppress], ids=["fake", "real"])
def test_a_storage_has_one_number_whatever_its_size(mode: Callable[[], Any]) -> None:
    with mode():
        x, other = torch.ones(5), torch.ones(5)
        number = torch_private.storage_id(x.untyped_storage())
        assert torch_private.storage_id(x[2:].untyped_storage()) == number
        assert torch_private.storage_id(other.untyped_storage()) != number
        x.untyped_storage().resize_(0)
        assert torch_private.storage_id(x.untyped_storage()) == number


def test_the_graph_counts_as_a_use_of_a_tensor_and_another_tensor_as_one_of_its_storage() -> None:
    # pytest's assertions hold what they compare: all is counted before the first one.
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    of_tensor, of_storage, in_python = torch_private.reference_counts(x)
    y = weight * x
    with_graph = torch_private.reference_counts(x)
    del y
    gc.collect()
    of_same_storage = x.data
    with_other = torch_private.reference_counts(x)
    del of_same_storage
    other = x
    with_name = torch_private.reference_counts(x)
    assert with_graph[:2] == (of_tensor + 1, of_storage)
    assert with_other == (of_tensor, of_storage + 1, in_python)
    assert with_name == (of_tensor, of_storage, in_python + 1)
    assert other is x


def test_each_change_in_place_is_counted() -> None:
    x = torch.zeros(3)
    before = torch_private.version(x)
    x[1:].add_(1)
    torch.autograd.graph.increment_version(x)
    assert torch_private.version(x) == before + 2
    assert torch_private.version(x.clone()) == 0


def test_the_local_part_is_taken_without_an_operator(mesh: DeviceMesh) -> None:
    sharded = nn.Parameter(distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None))
    plain = torch.ones(3)
    with Seen() as seen:
        part = torch_private.local_part(sharded)
        assert torch_private.local_part(plain) is plain
    assert type(part) is Tensor
    assert part.tolist() == [0, 1]
    assert part.data_ptr() == sharded.to_local().data_ptr()
    assert seen.names == []


# ---- modules -----------------------------------------------------------------------------------------------


def test_a_module_computes_with_what_its_dictionary_holds() -> None:
    linear = nn.Linear(2, 3)
    names = torch_private.parameters_by_name(linear)
    assert list(names) == ["weight", "bias"]
    assert names["weight"] is linear.weight
    plain: Any = torch.ones(3, 2)
    names["weight"] = plain
    names["bias"] = None
    assert linear(torch.ones(1, 2)).tolist() == [[2, 2, 2]]


def test_hooks_on_a_parameter_are_noticed() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert not torch_private.has_gradient_hooks(parameter)
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert torch_private.has_gradient_hooks(parameter)
        handle.remove()
        assert not torch_private.has_gradient_hooks(parameter)


@pytest.mark.parametrize(
    "kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_on_modules_are_listed(kind: str, everywhere: bool) -> None:
    def hook(*_: Any) -> None:
        return None

    linear = nn.Linear(2, 3)
    assert torch_private.module_hooks(linear) == []
    if everywhere:
        handle = getattr(nn.modules.module, f"register_module_{kind}")(hook)
    else:
        handle = getattr(linear, f"register_{kind}")(hook)
    try:
        assert torch_private.module_hooks(linear) == [hook]
    finally:
        handle.remove()
    assert torch_private.module_hooks(linear) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_model_gives_back_its_own() -> None:
    linear = nn.Linear(2, 3)
    compiled: Any = torch.compile(linear)
    assert compiled is not linear
    assert torch_private.uncompiled(compiled) is linear
    assert torch_private.uncompiled(linear) is linear


# ---- FSDP and DTensor --------------------------------------------------------------------------------------


def test_fsdp_calls_a_custom_all_gather_and_reduce_scatter(mesh: DeviceMesh) -> None:
    calls: list[tuple[str, int, int]] = []

    class AllGather(torch_private.DefaultAllGather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
        ) -> Any:
            calls.append(("all-gather", input_tensor.numel(), output_tensor.numel()))
            return super().__call__(output_tensor, input_tensor, group, async_op)

    class ReduceScatter(torch_private.DefaultReduceScatter):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            calls.append(("reduce-scatter", input_tensor.numel(), output_tensor.numel()))
            work = super().__call__(output_tensor, input_tensor, group, op, async_op=True)
            assert isinstance(work, dist.Work)
            work.wait()
            return work

    linear = fully_shard(nn.Linear(3, 8, bias=False), mesh=mesh)
    assert isinstance(linear, FSDPModule)
    linear.set_custom_all_gather(AllGather())
    linear.set_custom_reduce_scatter(ReduceScatter())
    # gloo and the test's group sum, and FSDP divides otherwise.
    linear.set_gradient_divide_factor(1.0)
    linear.set_force_sum_reduction_for_comms(True)
    linear(torch.ones(1, 3)).sum().backward()
    assert calls[0] == ("all-gather", 6, 24)
    assert calls[-1] == ("reduce-scatter", 24, 6)
    gradient: Any = linear.weight.grad
    assert gradient.to_local().tolist() == [[RANKS] * 3] * 2


def test_fsdp_uses_the_parameters_that_a_module_has_after_a_reset(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU())
    for module in model:
        fully_shard(module, mesh=mesh)
    linear: Any = model[0]
    linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="cpu"))
    for module in model:
        assert isinstance(module, FSDPModule)
        torch_private.reset_shards(module)  # of the second too, which has no parameters
    with torch.no_grad():
        linear.weight.to_local().fill_(2)
    # Every peer's shard is this rank's.
    assert model(torch.ones(1, 3)).tolist() == [[6] * 8]


def test_shards_that_fsdp_keeps_on_the_host_are_copied_by_a_function(mesh: DeviceMesh) -> None:
    outer, inner = nn.Linear(3, 8, bias=False), nn.Linear(8, 12, bias=False)
    copied: list[tuple[int, torch.device]] = []
    fully_shard(inner, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    model = fully_shard(nn.Sequential(outer, inner), mesh=mesh)
    assert isinstance(model, FSDPModule)
    assert isinstance(inner, FSDPModule)
    for unit, weight in ((model, outer.weight), (inner, inner.weight)):
        [parameter] = torch_private.sharded_parameters(unit)
        assert parameter is weight
    [offloaded] = torch_private.offloaded_parameters(model)
    assert offloaded is inner.weight

    def copy(shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append((shard.numel(), device))
        return torch.full_like(shard, 2)

    torch_private.set_shard_copy(inner, copy)
    # The copy of every peer is this rank's.
    assert inner(torch.ones(1, 8)).tolist() == [[16] * 12]
    assert copied == [(24, torch.device("cpu"))]
    [parameter] = torch_private.sharded_parameters(inner)
    assert parameter is offloaded


def test_a_layout_is_computed_once_though_tensors_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    # Releases of torch whose dispatcher has no key for lists of tensors ask for it at every update.
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    whole, asked = propagator._propagate_tensor_meta_non_cached, []
    monkeypatch.setattr(
        propagator, "_propagate_tensor_meta_non_cached", lambda op: asked.append(op) or whole(op)
    )
    with one_rank(Recipe(fsdp=True), RANKS, "fake") as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        specs: Any = [distribute_tensor(torch.ones(n, 7), mesh, [Shard(0)])._spec for n in (51, 53)]
        schema = OpSchema(torch.ops.aten._foreach_mul.Scalar, (specs, 2.0), {})
        with torch_private.cached_layouts():
            layouts = [propagator.propagate_op_sharding_non_cached(schema) for _ in range(3)]
    assert len(asked) == 1
    assert layouts[0] is layouts[2]
    assert "propagate_op_sharding_non_cached" not in vars(propagator)


# ---- process groups ----------------------------------------------------------------------------------------


def test_the_ranks_of_a_fake_group_are_not_waited_for() -> None:
    dist.init_process_group("fake", rank=3, world_size=5, store=torch_private.FakeStore())
    try:
        x = torch.ones(3)
        dist.all_reduce(x)
        dist.barrier()
        mesh = init_device_mesh("cpu", (5,))
        assert (mesh.get_local_rank(), dist.get_world_size()) == (3, 5)
        assert x.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_groups_are_listed_with_the_names_that_torch_finds_them_by(mesh: DeviceMesh) -> None:
    world: Any = dist.group.WORLD
    later: Any = dist.new_group([0, 2])
    assert torch_private.process_groups() == {world: world.group_name, later: later.group_name}
    assert len({world.group_name, later.group_name}) == 2
    dist.destroy_process_group(later)
    assert list(torch_private.process_groups()) == [world]


def test_an_operators_arguments_name_its_group() -> None:
    x = torch.ones(3)
    with one_rank(Recipe(fsdp=True), RANKS, "fake"):
        later: Any = dist.new_group([0, 2])
        with Seen() as seen:
            dist.all_reduce(x, group=later)
            torch.ops._c10d_functional.all_reduce(x, "sum", later.group_name)
        calls = dict(zip(seen.names, seen.arguments, strict=True))
        for name in ("c10d.allreduce_", "_c10d_functional.all_reduce"):
            assert groups_among(calls[name]) == [later]


def groups_among(arguments: tuple[Any, ...]) -> list[dist.ProcessGroup]:
    groups = map(torch_private.process_group_of, arguments)
    return [group for group in groups if group is not None]


class Noting(torch_private.PythonProcessGroup):
    """Notes which of its methods torch calls."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.called: list[str] = []

    def getBackendName(self) -> str:
        return "noting"

    def _note(self, name: str) -> Any:
        self.called.append(name)
        return torch_private.completed_work()

    def allreduce(self, *_: Any) -> Any:
        return self._note("allreduce")

    def all_gather_single(self, *_: Any) -> Any:
        return self._note("all_gather_single")

    def all_gather_single_coalesced(self, *_: Any) -> Any:
        return self._note("all_gather_single_coalesced")

    def reduce_scatter_single(self, *_: Any) -> Any:
        return self._note("reduce_scatter_single")

    def reduce_scatter_single_coalesced(self, *_: Any) -> Any:
        return self._note("reduce_scatter_single_coalesced")

    def all_to_all_single(self, *_: Any) -> Any:
        return self._note("all_to_all_single")


def make_noting(_: Any, rank: int, size: int, __: timedelta) -> Noting:
    return Noting(rank, size)


@pytest.fixture
def noting() -> Iterator[Noting]:
    if "noting" not in dist.Backend.backend_list:
        dist.Backend.register_backend("noting", make_noting, devices=["cpu"])
    dist.init_process_group("noting", rank=0, world_size=2, store=torch_private.FakeStore())
    group = dist.group.WORLD
    assert isinstance(group, Noting)
    yield group
    dist.destroy_process_group()


def test_torch_calls_the_methods_of_a_group_in_python(noting: Noting) -> None:
    one, two = torch.ones(3), torch.ones(6)
    work = dist.all_reduce(one, async_op=True)
    assert work is not None
    assert work.wait()
    dist.all_gather_single(two, one)
    dist.reduce_scatter_single(one, two)
    dist.all_to_all_single(two, torch.ones(6))
    assert noting.called == ["allreduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single"]
    del noting.called[:]
    functional.all_gather_single_coalesced([one, one], noting)
    functional.reduce_scatter_single_coalesced([two, two], "sum", [0, 0], noting)
    assert noting.called == ["all_gather_single_coalesced", "reduce_scatter_single_coalesced"]


def test_names_of_earlier_releases_call_the_same_methods(noting: Noting) -> None:
    for earlier in (
        "_allgather_base", "_reduce_scatter_base", "allgather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced", "alltoall_base",
    ):  # fmt: skip
        getattr(noting, earlier)(torch.ones(2), torch.ones(2))
    assert noting.called == [
        "all_gather_single", "reduce_scatter_single", "all_gather_single_coalesced",
        "reduce_scatter_single_coalesced", "all_to_all_single",
    ]  # fmt: skip


def test_completed_work_is_not_waited_for() -> None:
    work = torch_private.completed_work()
    assert isinstance(work, dist.Work)
    assert work.wait()
    assert work.is_completed()


def test_a_group_in_python_is_found_by_its_name(mesh: DeviceMesh) -> None:
    assert isinstance(dist.group.WORLD, Loopback)
    gathered = functional.all_gather_single(torch.arange(3), 0, dist.group.WORLD.group_name)
    assert gathered.tolist() == [0, 1, 2] * RANKS


def test_a_forward_inside_ddp(mesh: DeviceMesh) -> None:
    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noted.append(torch_private.runs_inside_ddp())
            return super().forward(x)

    noted: list[bool] = []
    module = Noting(2, 3)
    module(torch.ones(1, 2))
    nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())(torch.ones(1, 2))
    module(torch.ones(1, 2))
    assert noted == [False, True, False]


# ---- distributed checkpoints -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_where_a_chunk_lies_is_what_torch_writes(tmp_path: Path) -> None:
    dcp.save({"steps": torch.tensor(7)}, checkpoint_id=tmp_path, no_dist=True)
    (written,) = dcp.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    made = torch_private.storage_info(written.relative_path, written.offset, written.length)
    assert (type(made), made) == (type(written), written)


# ---- CUDA's allocator --------------------------------------------------------------------------------------


def test_torch_takes_the_settings_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the binding in C++, which a torch without CUDA lacks."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        torch._C, "_cuda_record_memory_history", lambda *arguments: given.append(arguments), raising=False
    )
    torch_private.start_memory_history(stacks=True)
    torch_private.start_memory_history(stacks=False)
    torch_private.stop_memory_history()
    assert [arguments[:2] for arguments in given] == [("all", "all"), ("all", None), (None, "all")]


def test_the_events_are_those_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = {"segments": [], "device_traces": [[], [{"action": "alloc"}]]}
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", lambda _: snapshot, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert torch_private.memory_snapshot() is snapshot
    assert torch_private.memory_events() == [{"action": "alloc"}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stacks", [False, True])
def test_the_allocator_notes_what_it_does(stacks: bool) -> None:
    torch_private.start_memory_history(stacks=stacks)
    try:
        x = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
        del x
        events = torch_private.memory_events()
    finally:
        torch_private.stop_memory_history()
    own = [event for event in events if event["size"] == 3 * 2**20]
    assert [event["action"] for event in own][:2] == ["alloc", "free_requested"]
    assert own[0]["time_us"] <= own[1]["time_us"]
    assert bool(own[0].get("frames")) == stacks
    torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    assert len(torch_private.memory_events()) <= len(events)


# ---- attention kernels -------------------------------------------------------------------------------------

B, H, K, S, D = 2, 6, 3, 20, 8


def expected_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize(("causal", "keys"), [(True, S), (False, 33)])
def test_attention_on_cpu(causal: bool, keys: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, H, S, D, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, B, K, keys, D, generator=generator, dtype=torch.float64).requires_grad_().unbind()
    grad = torch.randn(B, H, S, D, generator=generator, dtype=torch.float64)
    expected, expected_lse = expected_attention(q, k, v, causal, 0.21)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse = torch_private.cpu_flash_attention(q, k, v, causal=causal, scale=0.21)
        own = torch_private.cpu_flash_attention_backward(grad, q, k, v, out, lse, causal=causal, scale=0.21)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert len(own) == 3
    for mine, right in zip(own, gradients, strict=True):
        torch.testing.assert_close(mine, right)


CUDA_KERNELS = [
    (torch_private.cuda_flash_attention, torch_private.cuda_flash_attention_backward),
    (torch_private.cudnn_attention, torch_private.cudnn_attention_backward),
]


@pytest.mark.parametrize(("forward", "backward"), CUDA_KERNELS, ids=["flash", "cudnn"])
def test_attention_on_cuda_without_a_gpu(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """torch's own shapes for it, and that each argument has the name that is meant by its place."""
    q = torch.empty(B, H, S, D, device="meta", dtype=torch.bfloat16)
    k, v = torch.empty(2, B, K, 33, D, device="meta", dtype=torch.bfloat16).unbind()
    with Named() as named:
        out, lse = forward(q, k, v, causal=False, scale=0.21)
        own = backward(torch.empty_like(q), q, k, v, out, lse, causal=False, scale=0.21)
    assert out.shape == q.shape
    assert (lse.shape, lse.dtype) == ((B, H, S), torch.float32)
    assert [x.shape for x in own] == [q.shape, k.shape, v.shape]
    for given in named.calls:
        assert (given["query"] is q, given["key"] is k, given["value"] is v) == (True, True, True)
        assert (given["dropout_p"], given["is_causal"], given["scale"]) == (0.0, False, 0.21)
    ahead, back = named.calls
    assert ahead.get("compute_log_sumexp", True) is True
    assert ahead.get("attn_bias") is None
    assert (back["max_q"], back["max_k"], back["cum_seq_q"], back["cum_seq_k"]) == (S, 33, None, None)
    assert back["out"] is out
    assert back["logsumexp"].untyped_storage()._cdata == lse.untyped_storage()._cdata


class Named(DispatchMode):
    """Notes the arguments of each attention operator by the names in torch's schema."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            names = [argument.name for argument in func._schema.arguments]
            defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
            self.calls.append({**defaults, **dict(zip(names, args, strict=False)), **(kwargs or {})})
        return func(*args, **kwargs or {})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("forward", "backward"), CUDA_KERNELS, ids=["flash", "cudnn"])
@pytest.mark.parametrize(("causal", "keys"), [(True, S), (False, 33)])
def test_attention_on_cuda(
    forward: Callable[..., Any], backward: Callable[..., Any], causal: bool, keys: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, H, S, D, generator=generator, requires_grad=True)
    k, v = torch.randn(2, B, K, keys, D, generator=generator).requires_grad_().unbind()
    grad = torch.randn(B, H, S, D, generator=generator)
    expected, expected_lse = expected_attention(q, k, v, causal, 0.21)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    on_gpu = [x.detach().to("cuda", torch.bfloat16) for x in (grad, q, k, v)]
    out, lse = forward(*on_gpu[1:], causal=causal, scale=0.21)
    own = backward(*on_gpu, out, lse, causal=causal, scale=0.21)
    torch.testing.assert_close(lse.cpu(), expected_lse.detach(), atol=0.02, rtol=0.02)
    for mine, right in zip((out, *own), (expected.detach(), *gradients), strict=True):
        torch.testing.assert_close(mine.cpu().float(), right, atol=0.05, rtol=0.05)
