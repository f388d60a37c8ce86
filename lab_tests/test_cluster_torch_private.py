"""Each function of `cluster.torch_private` does with the installed torch what its docstring says."""

import functools
import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cluster import torch_private
from lab_tests.support.refusing import RefusingDispatch, RefusingFunction, refuse_saved


@pytest.fixture
def group() -> Iterator[None]:
    """This process as the only rank of a default group, and torch's default timeout restored afterwards."""
    c10d: Any = dist.distributed_c10d
    defaults = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = defaults


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.usefixtures("group")
def test_the_default_timeout_is_that_of_the_default_group_and_of_later_groups() -> None:
    limit = timedelta(seconds=123.5)
    assert timeout_of(dist.group.WORLD) != limit
    torch_private.set_timeout(123.5)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("rows", "columns"))
    assert timeout_of(dist.group.WORLD) == limit
    assert timeout_of(dist.new_group([0])) == limit
    assert timeout_of(mesh.get_group("rows")) == limit
    assert dist.distributed_c10d.default_pg_nccl_timeout == limit


@pytest.mark.usefixtures("group")
def test_process_groups_lists_the_default_group_and_those_made_later() -> None:
    assert torch_private.process_groups() == [dist.group.WORLD]
    later = dist.new_group([0])
    assert torch_private.process_groups() == [dist.group.WORLD, later]
    dist.destroy_process_group(later)
    assert torch_private.process_groups() == [dist.group.WORLD]


@pytest.mark.usefixtures("group")
def test_abort_leaves_every_group() -> None:
    """gloo has nothing to abort; that NCCL's communicators are aborted needs GPUs."""
    dist.new_group([0])
    torch_private.abort_process_groups()
    assert not dist.is_initialized()


class Mesh:
    """Stands for a mesh that a cache holds."""


def test_the_caches_hold_no_mesh_after_they_are_cleared() -> None:
    importlib.import_module("torch.distributed.tensor")

    @functools.lru_cache
    def of_torch(mesh: Mesh) -> int:
        return id(mesh)

    @functools.lru_cache
    def of_the_caller(number: int) -> int:
        return number

    of_torch.__module__ = "torch.distributed.tensor._utils"
    mesh = Mesh()
    reference = weakref.ref(mesh)
    of_torch(mesh)
    of_the_caller(7)
    del mesh
    assert reference() is not None
    torch_private.clear_mesh_caches()
    gc.collect()
    assert reference() is None
    assert of_the_caller.cache_info().currsize == 1, "only torch's own caches are cleared"


@pytest.mark.usefixtures("group")
def test_dtensors_own_caches_are_emptied() -> None:
    tensor = importlib.import_module("torch.distributed.tensor")
    redistribute = importlib.import_module("torch.distributed.tensor._redistribute")
    cleared: list[None] = []
    mesh = init_device_mesh("cpu", (1,))
    sharded = tensor.distribute_tensor(torch.ones(6, 4), mesh, [tensor.Shard(0)])
    assert float((sharded + sharded).sum().full_tensor()) == 48
    with pytest.MonkeyPatch.context() as patch:
        clear = redistribute.clear_redistribute_planner_cache
        patch.setattr(
            redistribute, "clear_redistribute_planner_cache", lambda: (clear(), cleared.append(None))
        )
        torch_private.clear_mesh_caches()
    assert cleared == [None]
    assert float((sharded + sharded).sum().full_tensor()) == 48, "the caches are filled again"


CACHES = {
    "MeshTopoInfo.build_from_mesh", "ShardingPropagator._propagate_tensor_meta_cached",
    "ShardingPropagator.propagate_op_sharding_non_cached", "_gen_transform_infos",
}  # fmt: skip


@pytest.mark.usefixtures("group")
def test_the_caches_of_this_thread_are_cleared_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that torch has: another one would hold the mesh of a plan that has ended."""
    names = ("", "._collective_utils", "._op_schema", "._redistribute")
    tensor, collective, schema, redistribute = (
        importlib.import_module(f"torch.distributed.tensor{name}") for name in names
    )
    mesh = init_device_mesh("cpu", (1,))
    spec = tensor.distribute_tensor(torch.ones(6, 4), mesh, [tensor.Shard(0)])._spec
    added = schema.OpSchema(torch.ops.aten.add.Tensor, (spec, spec), {})
    propagator = tensor.DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding(added)
    propagator._propagate_tensor_meta_cached(added)
    redistribute._gen_transform_infos(spec, spec)
    collective.MeshTopoInfo.build_from_mesh(mesh)
    gc.unfreeze()
    caches = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]
    gc.freeze()
    caches = [one for one in caches if str(one.__module__).startswith("torch.distributed.tensor")]
    assert {one.__qualname__ for one in caches} == CACHES
    assert {one.__qualname__ for one in caches if one.cache_info().currsize} == CACHES
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("looked for caches"))
    torch_private.clear_mesh_caches(of_all_threads=False)
    assert not any(one.cache_info().currsize for one in caches)


def test_without_dtensor_there_is_nothing_to_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("looked for caches"))
    torch_private.clear_mesh_caches()


def gradient() -> list[float]:
    x = torch.full((3,), 2.0, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize(
    ("enter", "refused", "leave"),
    [
        (RefusingDispatch, "an operator reached the mode", torch_private.pop_dispatch_modes),
        (RefusingFunction, "a function reached the mode", torch_private.pop_function_modes),
        (
            lambda: torch.autograd.graph.saved_tensors_hooks(refuse_saved, refuse_saved),
            "a saved tensor reached the hook",
            torch_private.pop_saved_tensors_hooks,
        ),
    ],
    ids=["dispatch modes", "function modes", "hooks of saved tensors"],
)
def test_modes_are_left(enter: Callable[[], Any], refused: str, leave: Callable[[], None]) -> None:
    for _ in range(2):
        enter().__enter__()
    try:
        with pytest.raises(AssertionError, match=refused):
            gradient()
    finally:
        leave()
    assert gradient() == [4.0] * 3
