"""The state of training in host memory: FSDP's shards, their gradients, and the state of the optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lab.errors import RecipeError
from lab.techniques.host_memory import local_ranks, pinnable
from lab.techniques.host_transfer import PINNED_MEMORY
from lab.torch_private import has_gradient_hooks, set_shard_copy, sharded_parameters


def check_host_backend(mesh: DeviceMesh) -> None:
    """Refuse ranks that cannot add up numbers in host memory.

    The norm of the gradients, by which they are clipped, is a sum over the ranks of numbers on the host.

    Raises:
        RecipeError: The process group of the mesh has no backend for CPU tensors.
    """
    backends = dist.get_backend_config(mesh.get_group())
    if mesh.device_type != "cpu" and "cpu:" not in backends:
        raise RecipeError(
            f"optimizer='host' in a process group of {backends}: clipping adds up norms on the host; begin "
            "with init_process_group('cpu:gloo,cuda:nccl'), or set optimizer='device'"
        )


def may_pin(shards: list[int], gradients: list[int], mesh: DeviceMesh) -> bool:
    """Return whether the shards and the gradients may be pinned; if so, their memory is counted as pinned.

    Args:
        shards: The bytes of each shard of a parameter.
        gradients: The bytes of the gradients of each unit of FSDP.
        mesh: The ranks. On CPU nothing is pinned.
    """
    if mesh.device_type == "cpu":
        return False
    return PINNED_MEMORY.reserve([*shards, *gradients], pinnable(local_ranks(), PINNED_MEMORY.nbytes))


def copy_by_operators(unit: FSDPModule, *, pinned: bool) -> None:
    """Let the operators of ``host_transfer`` copy the shards and the gradients of a unit of FSDP.

    The unit has FSDP's ``CPUOffloadPolicy``, which keeps the shards on the host. On CPU, FSDP would copy
    nothing. A meter would then count other bytes than on a GPU.

    Args:
        unit: The unit.
        pinned: Whether its shards are in pinned memory. Its gradients are pinned then, too.
    """

    def move_to_host(reduced: Tensor) -> None:
        """Give the unit's reduced gradients, one flat tensor, host memory in place of the device's."""
        parameters = [parameter for parameter in sharded_parameters(unit) if parameter.requires_grad]
        # FSDP would cast them to the parameters' dtype after this.
        host = torch.ops.lab.to_host_whole(reduced.to(parameters[0].dtype), pinned)
        if reduced.is_cuda:
            stream = torch.cuda.current_stream(reduced.device)
            # Another stream allocated it. Its memory may not be reused before this copy has ended.
            reduced.record_stream(stream)
            # FSDP waits for the copy when backward ends. Who reads the gradients before waits here: the sum
            # with those of the backward before, and hooks.
            if any(p.grad is not None or has_gradient_hooks(p) for p in parameters):
                stream.synchronize()
        reduced.data = host

    set_shard_copy(unit, _copy_from_host)
    # FSDP calls this hook with what it has summed over the ranks; without replicas it sums no further.
    unit.set_all_reduce_hook(move_to_host)


def _copy_from_host(shard: Tensor, device: torch.device) -> Tensor:
    """Copy a flat shard to the device."""
    out = torch.empty(shard.shape, dtype=shard.dtype, device=device)
    torch.ops.lab.from_host([shard.view(torch.uint8)], out)
    return out
