"""Every use of torch's private interfaces in this package.

A new version of torch may rename or remove each of them. `lab_tests/test_cluster_torch_private.py` calls
every function of this module with the torch that is installed.
"""

import functools
import gc
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _python_dispatch

# mypy does not see the names of this module that start with an underscore.
_c10d: Any = dist.distributed_c10d


def set_timeout(seconds: float) -> None:
    """Let each collective of this rank take `seconds`.

    The timeout applies to the default process group, and to groups that are made without a timeout.

    `new_group`, `split_group` and `DeviceMesh` read the default each time that they make a group. A
    `DeviceMesh` takes no timeout as an argument.

    Args:
        seconds: The longest time that one collective may take.
    """
    limit = timedelta(seconds=seconds)
    # From torch 2.14 on, it is a public function, and the private one warns.
    getattr(dist, "set_timeout", _c10d._set_pg_timeout)(limit)
    _c10d.default_pg_timeout = limit
    _c10d.default_pg_nccl_timeout = limit


def process_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that this process belongs to."""
    return list(_c10d._world.pg_map)


def abort_process_groups() -> None:
    """Abort the communicators of every process group, and leave the groups.

    `destroy_process_group` waits for the collectives of NCCL that are under way. This function does not wait.
    """
    _c10d._abort_process_group()


def clear_mesh_caches(*, of_all_threads: bool = True) -> None:
    """Clear the caches in which DTensor keeps its results for a mesh; a mesh keeps its process groups alive.

    Does nothing where `torch.distributed.tensor` is not imported.

    Args:
        of_all_threads: Whether to clear those of other threads too, such as a GPU's in backward. They are
            searched for among all objects, which takes 50 ms and more.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute: Any = sys.modules["torch.distributed.tensor._redistribute"]
    redistribute.clear_redistribute_planner_cache()
    redistribute._gen_transform_infos.cache_clear()
    sys.modules["torch.distributed.tensor._collective_utils"].MeshTopoInfo.build_from_mesh.cache_clear()
    propagator: Any = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
    type(propagator)._propagate_tensor_meta_cached.cache_clear()
    propagator.propagate_op_sharding.cache.cache_clear()
    if of_all_threads:
        _clear_other_lru_caches()


def _clear_other_lru_caches() -> None:
    # A function of its own: the loop's variable keeps the last object alive, and that may be a part of a
    # model.
    for item in gc.get_objects():
        # Not isinstance, which reads `__class__`: some objects of torch warn when an attribute is read.
        if type(item) is functools._lru_cache_wrapper and _is_from_torch_distributed(item):
            item.cache_clear()


def _is_from_torch_distributed(cache: object) -> bool:
    return (getattr(cache, "__module__", None) or "").startswith("torch.distributed.")


def pop_dispatch_modes() -> None:
    """Leave every `TorchDispatchMode` that this thread has entered."""
    while _python_dispatch._get_current_dispatch_mode_stack():
        _python_dispatch._pop_mode()


def pop_function_modes() -> None:
    """Leave every `TorchFunctionMode` that this thread has entered."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()


def pop_saved_tensors_hooks() -> None:
    """Remove every pair of `saved_tensors_hooks` that this thread has set."""
    while torch._C._autograd._top_saved_tensors_default_hooks(False):
        torch._C._autograd._pop_saved_tensors_default_hooks()
