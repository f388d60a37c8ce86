"""Which attention runs on CUDA under a recipe, and which steps torch's kernel refuses there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from lab.decoder import shape_of
from lab.errors import RecipeError
from lab.recipe.jobs import Job
from lab.recipe.recipe import Recipe, torch_refusal
from lab.techniques.attention.kernels import KernelSupport, choose_kernel
from lab.techniques.limits import flash_takes


def attention_dtype(recipe: Recipe, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention runs: the recipe's, or that of the model's parameters."""
    return getattr(torch, recipe.compute_dtype) if recipe.compute_dtype else model_dtype


def check_kernel(
    job: Job, config: PretrainedConfig, device_type: str, machine: Callable[[], KernelSupport]
) -> None:
    """Refuse a step for which torch's CUDA kernel would be chosen and which that kernel would refuse.

    Args:
        job: What is trained.
        config: The model's config.
        device_type: Where the step runs, "cuda" or "cpu"; nothing is refused on CPU.
        machine: Returns what the ranks' machine has. It is called only if the answer depends on it.

    Raises:
        RecipeError: the kernel would refuse it.
    """
    if device_type != "cuda":
        return
    recipe, shape = job.recipe, shape_of(config)
    model_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    dtype = attention_dtype(recipe, model_dtype)
    taken = flash_takes(dtype.itemsize, shape.D)
    refusal = torch_refusal(recipe, shape, job.tokens) if taken else None
    if refusal is None or recipe.kernel not in ("auto", "torch"):
        return
    if recipe.kernel == "torch" or choose_kernel("auto", machine(), shape.D, dtype) == "torch":
        raise RecipeError(refusal)
