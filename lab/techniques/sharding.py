"""Parameters over ranks: sharded by FSDP2, or whole on every rank with their gradients summed.

Both leave the dense model's gradient on every parameter, not 1/P of it: ``lab.loss`` divides by the global
number of labels, so the ranks' gradients are to be summed, never averaged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils._python_dispatch import _disable_current_modes

from lab.decoder import check_materialized, decoder_of
from lab.errors import RecipeError
from lab.techniques.exchange import wait_for_release
from lab.techniques.precision import accumulation_dtype


def apply_fsdp(model: nn.Module, *, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None) -> None:
    """Shard parameters, gradients and optimizer state over the ranks of a mesh, each layer a unit.

    Saves: of the 16 bytes a parameter costs in fp32 training with Adam (4 weight, 4 gradient, 8 state),
    each of P ranks keeps 16/P. Beside that a rank holds the whole parameters of the layer it is in, and the
    whole embedding, final norm and head for the length of the step.

    Costs: per layer an all-gather of its parameters in forward, one more in backward, and a reduce-scatter
    of its gradients. Source: ZeRO, arXiv 1910.02054, section 5 (stage 3); PyTorch FSDP, arXiv 2304.11277.

    With ``compute_dtype`` parameters are gathered, and modules run, in that dtype, while each rank's shard,
    its gradient and its optimizer state keep the parameters' own; gradients are summed in fp32 or wider.

    Composes with: everything that patches modules, applied before it, so that its hooks run outside. A mesh
    of two dimensions replicates over the first and shards over the second.

    Raises:
        ModelError: see ``decoder_of``.
        RecipeError: trained parameters of several dtypes in one layer. In forward: see
            ``_refuse_changed_requires_grad`` and ``_refuse_after_failure``.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=accumulation_dtype(compute_dtype or next(model.parameters()).dtype),
    )
    layers = [layer.module for layer in decoder_of(model).layers]
    _check_dtypes(model, layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP averages gradients over ranks unless told to sum; gloo knows only the plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if mesh.device_type == "cpu":
                module.set_custom_all_gather(_SettledAllGather())
                module.set_custom_reduce_scatter(_SettledReduceScatter())
    _refuse_changed_requires_grad(model)
    _refuse_after_failure(model)


def _check_dtypes(model: nn.Module, layers: list[nn.Module]) -> None:
    """Refuse parameters that FSDP cannot put into one buffer: those of a layer, and those in no layer."""
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    units = [list(layer.parameters()) for layer in layers]
    for unit in (*units, [parameter for parameter in model.parameters() if parameter not in inside]):
        dtypes = sorted({str(parameter.dtype) for parameter in unit if parameter.requires_grad})
        if len(dtypes) > 1:
            raise RecipeError(
                f"trained parameters of {' and '.join(dtypes)} in one layer: FSDP takes one dtype; cast them "
                "first, for instance by model.to(torch.float32)"
            )


class _SettledAllGather(DefaultAllGather):
    """FSDP's own, which ends when nothing of gloo holds its buffers."""

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
    """The same the other way round."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with wait_for_release(output_tensor, input_tensor):
            waiting = super().__call__(output_tensor, input_tensor, group, op, async_op=True).wait
            # Gloo sums in a copy of the input, and takes the result from there while it is waited for.
            with _disable_current_modes():
                waiting()
            del waiting


def apply_replication(
    model: nn.Module, *, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None
) -> None:
    """Keep whole parameters on every rank and sum each gradient over the ranks as backward makes it.

    Saves nothing: every rank holds all 16 bytes a parameter. Costs: one all-reduce a parameter and step.
    A tensor hook sums the gradient before it is added to ``.grad``, so accumulation over several backward
    passes stays right. With ``compute_dtype`` it is FSDP with each rank a shard group of its own, which holds
    a cast copy of one layer at a time. Source: plain data parallelism.

    Raises:
        ModelError: parameters on the meta device, whose hooks would be lost with them.
    """
    if compute_dtype is not None:
        alone = refolded(mesh, (-1, 1), ("replicate", "shard"))
        apply_fsdp(model, mesh=alone, compute_dtype=compute_dtype)
        return
    check_materialized(model)
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    _refuse_changed_requires_grad(model)

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.to(
            accumulation_dtype(gradient.dtype), copy=True, memory_format=torch.contiguous_format
        )
        with wait_for_release(total):
            dist.all_reduce(total, group=group)
        return total.to(gradient.dtype)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(summed)


def _refuse_changed_requires_grad(model: nn.Module) -> None:
    """Refuse a forward after parameters were frozen or unfrozen.

    What sums gradients over ranks was set up for the parameters that were trained when the recipe was
    applied.

    Raises, in forward:
        RecipeError: a parameter that changed; inference mode, in which FSDP would gather parameters that no
            later step can train.
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

    # Before FSDP's own hook, which makes parameters whole.
    model.register_forward_pre_hook(check, prepend=True)


def _refuse_after_failure(model: nn.Module) -> None:
    """Refuse a forward after a backward that failed in its middle, and a backward that would be wrong.

    FSDP then holds gradients that it had not reduced yet, would add the next ones to them, and has no way to
    drop them.

    Raises, in forward:
        RecipeError: the backward before did not end. In backward: a graph of the gradients is asked for.
    """
    under_way = False

    def begins(_: Tensor) -> None:
        nonlocal under_way
        if torch.is_grad_enabled():
            raise RecipeError(
                "backward with create_graph=True under FSDP: the gradients that it sums over ranks have no "
                "graph; leave create_graph out"
            )
        under_way = True
        # Runs when this backward has ended, and not where it fails.
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def ended() -> None:
        nonlocal under_way
        under_way = False

    def check(*_: Any) -> None:
        if under_way:
            raise RecipeError(
                "the backward before this forward failed, and FSDP still holds a part of its gradients: "
                "build the model again, apply the recipe, and load the last good weights"
            )

    def watch(_: nn.Module, __: Any, output: Any) -> None:
        result: Tensor = output.logits if output.loss is None else output.loss
        if result.requires_grad:
            result.register_hook(begins)

    model.register_forward_pre_hook(check, prepend=True)
    model.register_forward_hook(watch)


def refolded(mesh: DeviceMesh, shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """The same ranks in another shape, the last axis varying fastest; -1 stands for what is left."""
    # Ranks are real numbers also in a plan, where every tensor that is made is fake.
    with unset_fake_temporarily():
        return DeviceMesh(mesh.device_type, mesh.mesh.view(shape), mesh_dim_names=axes)
