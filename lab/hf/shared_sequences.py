"""The ``parallelism_config`` of accelerate for a recipe: which ranks share a sequence, and get one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from lab.errors import RecipeError
from lab.models import ModelLike
from lab.recipe.ladder import resolve_recipe
from lab.recipe.recipe import Recipe


@dataclass(repr=False)
class SharedSequences(ParallelismConfig):
    """Groups of ``cp_size`` ranks that share a sequence; ``dp_shard_size`` groups have different batches.

    Accelerate then gives the ranks of a group the same batch, and counts it once. Its own context
    parallelism, which would put hooks on the attention, stays off.
    """

    @property
    def cp_enabled(self) -> bool:
        """Whether accelerate shards sequences itself: never."""
        return False

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return a mesh of all ranks: its rows are the groups, and its columns the ranks of a group."""
        shape = (self.dp_shard_size, self.cp_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp_shard", "cp"))

    def to_json(self) -> dict[str, Any]:
        """Return the sizes, which Trainer writes with its arguments."""
        return {"dp_shard_size": self.dp_shard_size, "cp_size": self.cp_size}

    def __getstate__(self) -> dict[str, Any]:
        # Trainer pickles its arguments. The mesh is of use in this process alone.
        return {name: value for name, value in vars(self).items() if name != "device_mesh"}

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Refuse another number of processes.

        Accelerate calls this. Its own check would also refuse ranks on CPUs.
        """
        if self.total_size != accelerator.num_processes:
            raise RecipeError(
                f"a recipe for {self.total_size} ranks on {accelerator.num_processes}: make the parallelism "
                f"for {accelerator.num_processes} ranks"
            )


def parallelism(
    recipe: str | Recipe, ranks: int, *, model: ModelLike | PreTrainedModel | None = None
) -> SharedSequences | None:
    """Return the ``parallelism_config`` that Accelerate and Trainer need for a recipe.

    Args:
        recipe: The recipe, or the name of one. Its C*R ranks share a sequence, C = ``ulysses`` and
            R = ``ring``.
        ranks: P, all ranks.
        model: The model whose heads decide the degrees of a named recipe: the model itself, its config, or
            what ``lab.plan`` takes.

    Returns:
        The configuration; None where every rank has sequences of its own.

    Raises:
        RecipeError: C*R does not divide P; a name without ``model``.
    """
    if isinstance(recipe, str):
        if model is None:
            raise RecipeError(
                f"recipe={recipe!r} without a model: its degrees derive from the heads; give model, such as "
                "model=AutoConfig.from_pretrained(name)"
            )
        config = model.config if isinstance(model, PreTrainedModel) else model
        # The degrees are the same for every number of tokens.
        recipe = resolve_recipe(recipe, config, ranks, ranks)
    shared = recipe.ulysses * recipe.ring
    if ranks % shared:
        raise RecipeError(
            f"ulysses={recipe.ulysses} x ring={recipe.ring} on {ranks} ranks: their product must divide the "
            "ranks"
        )
    return None if shared == 1 else SharedSequences(dp_shard_size=ranks // shared, cp_size=shared)
