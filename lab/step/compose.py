"""The one place that knows in which order the techniques stack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from lab import models
from lab.decoder import check_materialized, check_untouched, decoder_of
from lab.models.lora import Lora
from lab.recipe.jobs import WEIGHT_DECAY
from lab.recipe.recipe import Recipe
from lab.step.kernel_limits import attention_dtype
from lab.step.training_step import make_optimizer
from lab.techniques.agreement import check_same, check_same_model, refuse_together
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.attention.kernel import Kernel
from lab.techniques.attention.kernels import apply_kernel, kernel_for
from lab.techniques.attention.tiled_backward import tiled_kernel
from lab.techniques.checkpointing import apply_checkpointing
from lab.techniques.compiling import apply_compiled
from lab.techniques.deepspeed import apply_deepspeed_ulysses
from lab.techniques.experts import apply_experts
from lab.techniques.gathered import apply_gathered
from lab.techniques.host_file import HostFile
from lab.techniques.host_state import check_host_backend
from lab.techniques.inputs import apply_input_checks
from lab.techniques.liger_loss import apply_liger_loss, liger_fused
from lab.techniques.loss import apply_loss, apply_tiled_loss
from lab.techniques.offload import apply_offload
from lab.techniques.ring import apply_ring
from lab.techniques.rope import apply_rope
from lab.techniques.sharding import apply_fsdp, apply_replication, reshape_mesh
from lab.techniques.streaming.layer import apply_streaming
from lab.techniques.tiling import apply_tiled_mlp, apply_tiled_norms
from lab.techniques.ulysses import apply_ulysses
from lab.techniques.upipe.layer import apply_upipe


@dataclass(frozen=True, eq=False)
class AppliedRecipe:
    """A model with a recipe's techniques.

    Attributes:
        model: The model, which ``lab.loss`` calls.
        recipe: The recipe that was applied to it.
    """

    model: PreTrainedModel
    recipe: Recipe

    def make_optimizer(
        self, *, learning_rate: float, weight_decay: float = WEIGHT_DECAY
    ) -> torch.optim.Optimizer:
        """Make the optimizer of the model's parameters; see ``lab.step.training_step.make_optimizer``.

        Its state is in the memory of the parameters: on the host with ``optimizer="host"``.
        """
        return make_optimizer(self.model, learning_rate=learning_rate, weight_decay=weight_decay)


def start(
    model: models.ModelLike,
    recipe: Recipe,
    mesh: DeviceMesh,
    *,
    dtype: str | None = None,
    lora: Lora | None = None,
    seed: int = 0,
    host_file: HostFile | None = None,
) -> AppliedRecipe:
    """Make a model on the mesh's device, under a recipe that has been checked; every rank calls this.

    With ``fsdp`` a rank never holds more than its shard: the techniques and FSDP are applied before there is
    memory for the parameters, and each rank makes, or reads, the values of its own shard. A callable's model
    arrives whole, and without ``fsdp`` every rank holds it whole. With ``optimizer="host"`` the shards are in
    host memory. The parameters have ``dtype``, or that of the model's config. With ``lora`` the model has
    these adapters, and all of its other parameters are frozen.

    Raises:
        LabError: as ``models.build`` and ``apply_recipe``; ranks with another seed or other files.
    """
    device = torch.device(mesh.device_type)
    if not recipe.fsdp or (callable(model) and not isinstance(model, PretrainedConfig)):
        whole = models.build(model, dtype=dtype, lora=lora, seed=seed, device=device)
        whole.train()
        return apply_recipe(whole, recipe, mesh, checked=True, host_file=host_file)
    meta = models.build_on_meta(model, dtype=dtype, lora=lora, seed=seed)
    meta.model.train()
    applied = apply_recipe(meta.model, recipe, mesh, checked=True, host_file=host_file)
    origin = refuse_together(meta.origin, mesh.get_group())
    check_same(
        "the seed, or the files of the weights, differ",
        origin,
        mesh.get_group(),
        "give every rank the same seed, and a copy of the same files",
    )
    refuse_together(partial(meta.materialize, device), mesh.get_group())
    return applied


def apply_recipe(
    model: PreTrainedModel,
    recipe: Recipe,
    mesh: DeviceMesh,
    *,
    checked: bool = False,
    host_file: HostFile | None = None,
) -> AppliedRecipe:
    """Apply a recipe's techniques to a transformers decoder, in place; parameter names stay as they are.

    ``mesh`` is one-dimensional over all P ranks; rank = (data * R + ring) * C + ulysses. Adapters are added,
    and parameters frozen, before. From then on ``lab.loss`` calls the model; it is not copied or pickled.
    With ``fsdp`` the parameters may be on the meta device, to be given memory afterwards, see ``start``.
    A hook of yours on a layer sees what this rank holds: its part of the sequence, and of a batch.
    With ``checked``, ``Recipe.check`` has let the recipe pass for this model, and is not called again. The
    long tensors of streamed layers lie in ``host_file``, or in host memory where there is none.

    Raises:
        ModelError: a family, a config or modules that the techniques are not proved with.
        RecipeError: see ``Recipe.check``; a model that techniques were applied to already; a kernel of
            attention or loss that is not on this machine.
        LabError: ranks with other weights or another recipe.
    """
    apply_techniques(model, recipe, mesh, checked=checked, host_file=host_file)
    # After all of these, so that FSDP's hooks wrap them: parameters are whole whenever a module runs.
    dtype = getattr(torch, recipe.compute_dtype) if recipe.compute_dtype else None
    if recipe.fsdp:
        replicated = reshape_mesh(mesh, (recipe.replicas, -1), ("replicate", "shard"))
        of_shards = mesh if recipe.replicas == 1 else replicated
        apply_fsdp(model, mesh=of_shards, compute_dtype=dtype, on_host=recipe.optimizer == "host")
    else:
        apply_replication(model, mesh=mesh, compute_dtype=dtype)
    # Last, because it records the modules as they are now, and refuses a forward after any of them changed.
    check_inputs(model, recipe, mesh)
    return AppliedRecipe(model, recipe)


def apply_techniques(
    model: PreTrainedModel,
    recipe: Recipe,
    mesh: DeviceMesh,
    *,
    checked: bool = False,
    host_file: HostFile | None = None,
) -> None:
    """Apply the techniques that change what runs inside the model, and leave its parameters as they are.

    ``apply_recipe`` shards or replicates the parameters after this. Where another library does it instead,
    ``check_inputs`` follows when that library has changed the model.

    Raises:
        LabError: as ``apply_recipe``.
    """
    # What one rank alone would refuse, all refuse together; nothing has been changed until here.
    kernel = refuse_together(partial(_kernel, model, recipe, mesh, checked), mesh.get_group())
    check_same_model(model, str(recipe), mesh.get_group())
    ulysses, ring = _sequence_groups(recipe, mesh)
    # Attention by the lab's kernels, exact positions and experts by grouped products, for every recipe: the
    # plain model is the same maths as all the others. What refuses a model comes before what changes it.
    apply_rope(model, ulysses=recipe.ulysses, ring=recipe.ring)
    apply_attention(model)
    apply_experts(model)
    # The kernel is chosen once, with its backward in tiles. A ring, or a gather, wraps it; Ulysses or
    # UPipe, applied below, wraps both.
    apply_kernel(model, kernel=kernel)
    if recipe.ring_exchange == "gather":
        apply_gathered(model, group=ring, kernel=kernel)
    elif ring is not None:
        apply_ring(model, group=ring, kernel=kernel)
    # A streamed layer has the stages of UPipe, checkpointing, offload and its tiles in one.
    if recipe.stream is not None:
        apply_streaming(
            model,
            tile=recipe.stream,
            head_chunk=recipe.head_chunk,
            group=ulysses,
            overlap=recipe.overlap,
            segment=recipe.segment,
            attention=recipe.offload == "attention",
            file=host_file,
        )
    elif recipe.head_chunk is not None:
        apply_upipe(model, head_chunk=recipe.head_chunk, group=ulysses, overlap=recipe.overlap)
    elif ulysses is not None and recipe.ulysses_backend == "deepspeed":
        apply_deepspeed_ulysses(model, group=ulysses)
    elif ulysses is not None:
        apply_ulysses(model, group=ulysses)
    # Inside a layer, so before checkpointing: what a layer recomputes is already tiled, and a tile compiled.
    if recipe.compile != "none":
        apply_compiled(model, mlps=recipe.compile == "tiles")
    if recipe.mlp_tile is not None:
        apply_tiled_mlp(model, tile=recipe.mlp_tile)
    if recipe.norm_tile is not None:
        apply_tiled_norms(model, tile=recipe.norm_tile, layers=recipe.stream is None)
    # Around the layers as they are by now; what a layer then keeps may wait on the host.
    if recipe.checkpoint and recipe.stream is None:
        apply_checkpointing(model)
    if recipe.offload != "none" and recipe.stream is None:
        apply_offload(model, attention=recipe.offload == "attention")
    # On the model's own forward: a sum over labels that come shifted, with its head in tiles.
    if recipe.loss_kernel == "liger":
        apply_liger_loss(model, fused=liger_fused(model))
    elif recipe.loss_tile is not None:
        apply_tiled_loss(model, tile=recipe.loss_tile)
    else:
        apply_loss(model)


def check_inputs(model: PreTrainedModel, recipe: Recipe, mesh: DeviceMesh) -> None:
    """Check the arguments of every forward from now on; see ``apply_input_checks``."""
    index = mesh.get_local_rank() % (recipe.ulysses * recipe.ring)
    apply_input_checks(
        model, ulysses=recipe.ulysses, ring=recipe.ring, index=index, exchange=recipe.ring_exchange
    )


def _kernel(model: PreTrainedModel, recipe: Recipe, mesh: DeviceMesh, checked: bool) -> Kernel:
    """Check that the recipe can be right for this model; return the kernel of its attention, in tiles."""
    check_untouched(model)
    if not recipe.fsdp:
        check_materialized(model)
    decoder = decoder_of(model)
    if not checked:
        recipe.check(model.config, mesh.size())
    if recipe.optimizer == "host":
        check_host_backend(mesh)
    dtype = attention_dtype(recipe, model.dtype)
    kernel = kernel_for(recipe.kernel, torch.device(mesh.device_type), decoder.shape.D, dtype)
    return kernel if recipe.attention_tile is None else tiled_kernel(kernel, recipe.attention_tile)


def _sequence_groups(
    recipe: Recipe, mesh: DeviceMesh
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's Ulysses group and ring group, None where there is one rank in it."""
    if recipe.ulysses == recipe.ring == 1:
        return None, None
    axes = reshape_mesh(mesh, (-1, recipe.ring, recipe.ulysses), ("data", "ring", "ulysses"))
    return (
        axes.get_group("ulysses") if recipe.ulysses > 1 else None,
        axes.get_group("ring") if recipe.ring > 1 else None,
    )
