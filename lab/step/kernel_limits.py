"""Which attention runs on CUDA under a recipe, and which steps torch's kernel refuses there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from lab.decoder import shape_of
from lab.errors import RecipeError
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.attention.flash import HALF_DTYPES, query_limit_refusal
from lab.techniques.attention.flash_limits import MAX_HEAD_DIM
from lab.techniques.attention.kernels import KernelSupport, choose_kernel


def attention_dtype(recipe: Recipe, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention runs: the recipe's, or that of the model's parameters."""
    return getattr(torch, recipe.compute_dtype) if recipe.compute_dtype else model_dtype


def runs_flash(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a flash kernel on CUDA takes this dtype and D; the others run exact matrix products."""
    return dtype in HALF_DTYPES and head_dim <= MAX_HEAD_DIM


def torch_refusal(recipe: Recipe, shape: Shape, tokens: int) -> str | None:
    """Return why torch's CUDA kernel refuses a step of so many tokens; None where it takes the step."""
    heads = (recipe.head_chunk or shape.H) // recipe.ulysses
    return query_limit_refusal(-(-tokens // recipe.ring), heads, shape.D)


def check_kernel(
    recipe: Recipe,
    config: PretrainedConfig,
    tokens: int,
    device_type: str,
    machine: Callable[[], KernelSupport],
) -> None:
    """Refuse a step for which torch's CUDA kernel would be chosen and which that kernel would refuse.

    Args:
        recipe: The recipe of the step.
        config: The model's config.
        tokens: The tokens of a row.
        device_type: Where the step runs, "cuda" or "cpu"; nothing is refused on CPU.
        machine: Returns what the ranks' machine has. It is called only if the answer depends on it.

    Raises:
        RecipeError: the kernel would refuse it.
    """
    if device_type != "cuda":
        return
    shape = shape_of(config)
    model_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    dtype = attention_dtype(recipe, model_dtype)
    refusal = torch_refusal(recipe, shape, tokens) if runs_flash(dtype, shape.D) else None
    if refusal is None or recipe.kernel not in ("auto", "torch"):
        return
    if recipe.kernel == "torch" or choose_kernel("auto", machine(), shape.D, dtype) == "torch":
        raise RecipeError(refusal)
