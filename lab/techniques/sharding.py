"""Parameters over ranks: sharded by FSDP2, or whole on every rank with their gradients summed.

Both leave the dense model's gradient on every parameter, not 1/P of it: ``lab.loss`` divides by the global
number of labels, so the ranks' gradients are to be summed, never averaged.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def apply_fsdp(model: nn.Module, *, mesh: DeviceMesh) -> None:
    """Shard parameters, gradients and optimizer state over the ranks of a mesh, each layer a unit.

    Saves: of the 16 bytes a parameter costs in fp32 training with Adam (4 weight, 4 gradient, 8 state),
    each of P ranks keeps 16/P. Beside that a rank holds the whole parameters of the layer it is in, and the
    whole embedding, final norm and head for the length of the step.

    Costs: per layer an all-gather of its parameters in forward, one more in backward, and a reduce-scatter
    of its gradients. Source: ZeRO, arXiv 1910.02054, section 5 (stage 3); PyTorch FSDP, arXiv 2304.11277.

    Composes with: everything that patches modules, applied before it, so that its hooks run outside.
    """
    layers: nn.ModuleList = model.model.layers  # type: ignore[union-attr, assignment]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP averages gradients over ranks unless told to sum; gloo knows only the plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def apply_replication(model: nn.Module, *, mesh: DeviceMesh) -> None:
    """Keep whole parameters on every rank and sum each gradient over the ranks as backward makes it.

    Saves nothing: every rank holds all 16 bytes a parameter. Costs: one all-reduce a parameter and step.
    A tensor hook sums the gradient before it is added to ``.grad``, so accumulation over several backward
    passes stays right. Source: plain data parallelism.
    """
    group = mesh.get_group()

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(summed)
