"""The one place that knows in which order the techniques stack."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lab.recipe import Recipe
from lab.techniques.checkpointing import apply_checkpointing
from lab.techniques.sharding import apply_fsdp, apply_replication
from lab.techniques.tiled_loss import apply_loss


def apply_recipe(model: nn.Module, recipe: Recipe, mesh: DeviceMesh) -> None:
    """Apply a recipe's techniques to a transformers decoder, in place; parameter names stay as they are.

    ``mesh`` is one-dimensional over all P ranks.
    """
    # On the instance, and before anything wraps it: the loss becomes a sum over labels that come shifted.
    apply_loss(model)
    # Around the layers as they are by now: what a layer recomputes in backward is all of the above.
    if recipe.checkpoint:
        apply_checkpointing(model)
    # Last, so that its hooks wrap all of the above: a layer's parameters are whole whenever it runs.
    if recipe.fsdp:
        apply_fsdp(model, mesh=mesh)
    elif mesh.size() > 1:
        apply_replication(model, mesh=mesh)
