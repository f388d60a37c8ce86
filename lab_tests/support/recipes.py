"""Recipes that several tests use."""

from lab.recipe.recipe import Recipe

EVERYTHING = Recipe(
    fsdp=True, ulysses=2, ring=2, head_chunk=4, checkpoint=True, offload="inputs", mlp_tile=5, norm_tile=8,
    loss_tile=7,
)  # fmt: skip
