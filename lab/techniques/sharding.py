"""Parameters on P ranks: sharded by FSDP2, or whole on every rank, with gradients summed over ranks.

Both give every parameter the gradient of the dense model, and not 1/P of it. ``lab.loss`` divides by the
global number of labels, so the gradients of the ranks must be summed, not averaged.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lab.decoder import check_materialized, decoder_of
from lab.errors import RecipeError
from lab.techniques.exchange import wait_for_release
from lab.techniques.host_state import copy_by_operators, may_pin
from lab.techniques.precision import accumulation_dtype
from lab.torch_private import (
    DefaultAllGather,
    DefaultReduceScatter,
    disable_current_modes,
    forget_forward,
    queue_callback,
    unset_fake_temporarily,
)

OPTIMIZER_BEFORE = (
    "an optimizer that was made before the recipe, which replaces the parameters by their shards: make it of "
    "model.parameters() after the recipe was applied"
)


def apply_fsdp(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None = None,
    on_host: bool = False,
) -> None:
    """Shard parameters, gradients and optimizer state over the ranks of a mesh with FSDP2.

    Each layer is one unit: its parameters are gathered together. The embedding, the last norm and the head
    are the last unit. Gradients are summed over ranks in fp32 or wider.

    Args:
        model: The model.
        mesh: All P ranks. A mesh of two dimensions replicates over the first, and shards over the second
            (HSDP).
        compute_dtype: The dtype in which parameters are gathered and modules run. The shards, their gradients
            and their optimizer state keep the parameters' own dtype. By default, modules run in that dtype.
        on_host: Whether the shards, their gradients and their optimizer state are in host memory, by FSDP2's
            ``CPUOffloadPolicy``. The optimizer then steps on the CPU.

    Saves:
        Training in fp32 with Adam takes 16 bytes per parameter (4 for the weight, 4 for the gradient, 8 for
        the state of Adam). Each rank keeps 16/P of them. In addition, a rank holds the whole parameters of
        the layer that runs, and the whole embedding, last norm and head during the step.
        With ``on_host``, the 16/P bytes per parameter are on the host. The device holds a shard in fp32 while
        it is copied, one parameter at a time, and the reduced gradients of a layer until they are copied.
    Costs:
        Per layer, an all-gather of its parameters in forward, another one in backward, and a reduce-scatter
        of its gradients.
        With Y replicas, a rank keeps 16 Y/P bytes per parameter. The all-gathers and the reduce-scatter are
        among P/Y ranks, and a layer has also an all-reduce of the rank's shard of its gradients, among Y.
        With ``on_host``, the shards cross the host link at each all-gather, and the gradients once: 12/P
        bytes per parameter of a layer in fp32, and 8/P bytes per other parameter. The device waits while the
        CPU clips the gradients and runs Adam. On CUDA the shards and the gradients are pinned if the host has
        room for all of them.
    Source:
        ZeRO (arXiv 1910.02054), section 5, stage 3; PyTorch FSDP (arXiv 2304.11277); for ``on_host``,
        ZeRO-Offload (arXiv 2101.06840).
    Composes with:
        Every technique that patches modules, applied before, so that FSDP's hooks run outside.

    Raises:
        ModelError: See ``decoder_of``.
        RecipeError: The trained parameters of a layer have several dtypes. In forward: a parameter was added,
            frozen or unfrozen; inference mode is on; or the last backward failed. In backward:
            ``create_graph=True``. In the step of an optimizer: it has a parameter that a shard has replaced.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=accumulation_dtype(compute_dtype or next(model.parameters()).dtype),
    )
    layers = [layer.module for layer in decoder_of(model).layers]
    units = _units(model, layers)
    _check_dtypes(units)
    pinned = on_host and may_pin(*_shard_bytes(units, mesh.size(mesh.ndim - 1)), mesh)
    offload = CPUOffloadPolicy(pin_memory=pinned) if on_host else OffloadPolicy()
    # By weak references, because a whole parameter that nobody else holds is freed when its unit is sharded.
    replaced = [ref(parameter) for parameter in model.parameters()]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if on_host:
                copy_by_operators(module, pinned=pinned)
            # FSDP averages gradients over ranks unless told to sum; gloo knows only the plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.device_type == "cpu":
                module.set_custom_all_gather(_SettledAllGather())
                module.set_custom_reduce_scatter(_SettledReduceScatter())
    _refuse_steps_of(replaced)
    _refuse_changed_requires_grad(model)
    _refuse_after_failure(model)
    _reshard_after_evaluation(model)


def _refuse_steps_of(replaced: list[ref[nn.Parameter]]) -> None:
    """Refuse the step of an optimizer that holds a whole parameter, which gets no gradient."""
    for reference in replaced:
        parameter = reference()
        if parameter is not None:
            parameter.lab_replaced = True  # type: ignore[attr-defined]
    _refuse_steps_of_replaced_parameters()


@cache
def _refuse_steps_of_replaced_parameters() -> None:
    """Check every optimizer before each step, once per process."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if any(hasattr(parameter, "lab_replaced") for parameter in group["params"]):
                raise RecipeError(OPTIMIZER_BEFORE)

    register_optimizer_step_pre_hook(check)


def _units(model: nn.Module, layers: list[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each unit of FSDP: those of each layer, and those in no layer."""
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    units = [list(layer.parameters()) for layer in layers]
    return [*units, [parameter for parameter in model.parameters() if parameter not in in_layers]]


def _shard_bytes(units: list[list[nn.Parameter]], ranks: int) -> tuple[list[int], list[int]]:
    """Return the bytes of a rank's shard of each parameter, and of the gradients of each unit.

    FSDP divides the rows of a parameter, and pads each shard to the size of the first.
    """

    def shard(parameter: nn.Parameter) -> int:
        rows = parameter.shape[0]
        return -(-rows // ranks) * parameter.nbytes // rows

    shards = [shard(parameter) for unit in units for parameter in unit]
    gradients = [sum(shard(parameter) for parameter in unit if parameter.requires_grad) for unit in units]
    return shards, [size for size in gradients if size]


def _check_dtypes(units: list[list[nn.Parameter]]) -> None:
    """Refuse a unit of FSDP (a layer, or the parameters in no layer) whose trained dtypes differ.

    FSDP gathers the parameters of a unit in one buffer.
    """
    for unit in units:
        dtypes = sorted({str(parameter.dtype) for parameter in unit if parameter.requires_grad})
        if len(dtypes) > 1:
            raise RecipeError(
                f"trained parameters of {' and '.join(dtypes)} in one layer: FSDP takes one dtype; cast them "
                "first, for instance by model.to(torch.float32)"
            )


class _SettledAllGather(DefaultAllGather):
    """FSDP's own all-gather; it ends when gloo has dropped its references to the buffers."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        with wait_for_release(output_tensor, input_tensor):
            super().__call__(output_tensor, input_tensor, group)


class _SettledReduceScatter(DefaultReduceScatter):
    """FSDP's own reduce-scatter; it ends when gloo has dropped its references to the buffers."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with wait_for_release(output_tensor, input_tensor):
            wait = super().__call__(output_tensor, input_tensor, group, op, async_op=True).wait
            # Gloo sums in a copy of the input, and copies the result from there during the wait. The meter
            # must not count these operators.
            with disable_current_modes():
                wait()
            del wait


def apply_replication(
    model: nn.Module, *, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None
) -> None:
    """Keep whole parameters on every rank, and sum each gradient over ranks when backward computes it.

    A tensor hook sums the gradient before it is added to ``.grad``, so gradients may be accumulated over
    several backward passes. With ``compute_dtype`` this is FSDP in which each rank is a shard group by
    itself, so one layer at a time has a copy in that dtype.

    Args:
        model: The model.
        mesh: All P ranks, one dimension.
        compute_dtype: The dtype in which modules run. By default, that of the parameters.

    Saves:
        Nothing: every rank holds all 16 bytes per parameter.
    Costs:
        One all-reduce per parameter and step.
    Source:
        Plain data parallelism.
    Composes with:
        Every technique that patches modules, applied before.

    Raises:
        ModelError: A parameter is on the meta device; its hook would be lost when it gets memory.
        RecipeError: In forward, see ``apply_fsdp``.
    """
    if compute_dtype is not None:
        single_rank_shards = reshape_mesh(mesh, (-1, 1), ("replicate", "shard"))
        apply_fsdp(model, mesh=single_rank_shards, compute_dtype=compute_dtype)
        return
    check_materialized(model)
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    _refuse_changed_requires_grad(model)

    def sum_gradient(gradient: Tensor) -> Tensor:
        total = gradient.to(
            accumulation_dtype(gradient.dtype), copy=True, memory_format=torch.contiguous_format
        )
        with wait_for_release(total):
            dist.all_reduce(total, group=group)
        return total.to(gradient.dtype)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(sum_gradient)


def _refuse_changed_requires_grad(model: nn.Module) -> None:
    """Refuse a forward after parameters were added, frozen or unfrozen, and a forward in inference mode.

    The sums of gradients over ranks are set up for the parameters that are trained when the recipe is
    applied. In inference mode, FSDP would gather parameters that no later step can train.

    Raises:
        RecipeError: In forward, one of these.
    """
    before = {name: p.requires_grad for name, p in model.named_parameters()}

    def check(*_: Any) -> None:
        if torch.is_inference_mode_enabled():
            raise RecipeError("torch.inference_mode around a model with a recipe: use torch.no_grad instead")
        for name, parameter in model.named_parameters():
            if name not in before:
                raise RecipeError(
                    f"{name} was added after the recipe was applied: change the model first, then apply the "
                    "recipe"
                )
            if before[name] is not parameter.requires_grad:
                raise RecipeError(
                    f"{name} was frozen or unfrozen after the recipe was applied: set requires_grad first, "
                    "then apply the recipe"
                )

    # This hook runs before FSDP's own hook, which gathers the parameters.
    model.register_forward_pre_hook(check, prepend=True)


def _refuse_after_failure(model: nn.Module) -> None:
    """Refuse a forward after a backward that failed, and a backward with ``create_graph=True``.

    When a backward fails, FSDP keeps gradients that it has not reduced yet. It has no way to drop them, and
    would add the next gradients to them.

    Raises:
        RecipeError: In forward, the last backward did not end. In backward, ``create_graph=True``.
    """
    backward_runs = False

    def begin_backward(_: Tensor) -> None:
        nonlocal backward_runs
        if torch.is_grad_enabled():
            raise RecipeError(
                "backward with create_graph=True under FSDP: the gradients that it sums over ranks have no "
                "graph; leave create_graph out"
            )
        backward_runs = True
        # The callback runs at the end of this backward. It does not run if the backward fails.
        queue_callback(end_backward)

    def end_backward() -> None:
        nonlocal backward_runs
        backward_runs = False

    def check(*_: Any) -> None:
        if backward_runs:
            raise RecipeError(
                "the backward before this forward failed, and FSDP still holds a part of its gradients: "
                "build the model again, apply the recipe, and load the last good weights"
            )

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        result: Tensor = output.logits if output.loss is None else output.loss
        if result.requires_grad:
            result.register_hook(begin_backward)

    model.register_forward_pre_hook(check, prepend=True)
    model.register_forward_hook(watch)


def _reshard_after_evaluation(model: nn.Module) -> None:
    """Give the outermost unit its shards back after a forward without gradients.

    FSDP keeps the whole parameters of this unit until backward. An optimizer that is made of the model's
    parameters before would hold these, and never train the shards.
    """

    def reshard(*_: Any) -> None:
        if not torch.is_grad_enabled():
            forget_forward(model)

    # This hook runs after FSDP's own hook.
    model.register_forward_hook(reshard)


def reshape_mesh(mesh: DeviceMesh, shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of the same ranks with another shape, in which the last axis varies fastest.

    Args:
        mesh: The ranks.
        shape: The size of each axis; -1 for one of them means the remaining ranks.
        axes: The name of each axis.
    """
    # A mesh stores its ranks in a tensor. In a plan new tensors are fake, but a mesh needs real ones.
    with unset_fake_temporarily():
        return DeviceMesh(mesh.device_type, mesh.mesh.view(shape), mesh_dim_names=axes)
