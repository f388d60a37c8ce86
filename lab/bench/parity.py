"""The parity matrix: the gradient error of each technique against plain transformers, for each family."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cluster.ranks import Cluster
from lab import models
from lab.bench import reference
from lab.bench.table import Row, Say
from lab.errors import RecipeError
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.training_step import loss

ROWS, TOKENS = 3, 44
"""Neither the rows nor the tokens divide over the ranks of every recipe below."""

MODELS = (
    ("llama", 24, 6), ("llama", 24, 24), ("llama", 24, 1), ("qwen2", 28, 4), ("qwen3", 24, 2),
    ("mistral", 40, 8), ("ministral", 24, 2), ("arcee", 24, 6), ("granite", 28, 4), ("starcoder2", 24, 2),
    ("mixtral", 24, 6), ("qwen3_moe", 24, 4), ("seed_oss", 40, 8), ("smollm3", 24, 2), ("phi3", 28, 4),
    ("gemma", 24, 1), ("gemma3_text", 24, 6), ("glm4", 28, 4), ("olmo", 24, 6), ("olmo2", 24, 24),
    ("olmo3", 40, 8), ("gpt_oss", 28, 4), ("cohere", 24, 6), ("cohere2", 28, 4),
)  # fmt: skip
"""The family, the query heads and the key/value heads of each model."""

TILES: dict[str, Any] = {"mlp_tile": 5, "norm_tile": 8, "loss_tile": 9}

STREAM: dict[str, Any] = {"checkpoint": True, "offload": "inputs", "stream": 5}

TECHNIQUES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "host": {"fsdp": True, "optimizer": "host"},
    "ulysses": {"ulysses": 2},
    "deepspeed": {"ulysses": 2, "ulysses_backend": "deepspeed"},
    "upipe": {"ulysses": 2, "head_chunk": 2},
    "overlap": {"ulysses": 2, "head_chunk": 2, "overlap": True},
    "pairs": {"ulysses": 2, "head_chunk": 4, "attention_tile": 7},
    "ring": {"ring": 4},
    "hybrid": {"ulysses": 2, "ring": 2, "head_chunk": 4},
    "checkpoint": {"checkpoint": True},
    "offload": {"checkpoint": True, "offload": "inputs"},
    "kept": {"ulysses": 2, "ring": 2, "checkpoint": True, "offload": "attention"},
    "tiling": TILES,
    "streamed": {"ulysses": 2, "head_chunk": 4, **STREAM},
    "segments": {
        "fsdp": True, "ulysses": 2, "ring": 2, "head_chunk": 4, "overlap": True, "segment": 2, **STREAM,
        "offload": "attention",
    },
    "all": {
        "fsdp": True, "ulysses": 2, "ring": 2, "head_chunk": 4, "overlap": True, "attention_tile": 6,
        "checkpoint": True, "offload": "attention", "optimizer": "host",
        **TILES,
    },
}  # fmt: skip


def measure_parity(say: Say) -> list[Row]:
    """Return a row for each technique, with the largest relative gradient error in each model, in fp64.

    The error of a parameter is the Frobenius norm of the difference to plain transformers' gradient, over the
    norm of that gradient. It is measured on four ranks, from a checkpoint that transformers saved. It is None
    if a technique refuses the model.
    """
    with TemporaryDirectory() as folder, Cluster(ranks=4) as cluster:
        rows: list[dict[str, str | None]] = [{"technique": name} for name in TECHNIQUES]
        for family, heads, kv_heads in MODELS:
            say(f"{family}, {heads} query heads and {kv_heads} key/value heads")
            checkpoint = Path(folder) / f"{family}-{heads}-{kv_heads}"
            save_checkpoint(checkpoint, family, heads, kv_heads)
            work = [(str(checkpoint), Recipe(**knobs)) for knobs in TECHNIQUES.values()]
            errors = cluster.apply(relative_errors, work)[0]
            for row, error in zip(rows, errors, strict=True):
                row[f"{family} {heads}/{kv_heads}"] = None if error is None else f"{error[1]:.0e}"
        return [*rows]


def token_ids() -> Tensor:
    """Return the batch of the matrix [ROWS, TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, reference.VOCABULARY, (ROWS, TOKENS), generator=generator)


def save_checkpoint(
    folder: Path, family: str, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, **more: Any
) -> None:
    """Save a checkpoint of transformers, and in its folder the loss and the gradients of the plain model."""
    config = reference.config(family, heads, kv_heads, **more)
    models.save(reference.build(config, dtype), folder)
    torch.save(plain_result(reference.build(config, dtype)), folder / "expected.pt")


@reference.exact_modules()
def plain_result(model: torch.nn.Module) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and the gradients of a plain model on the batch of the matrix."""
    ids = token_ids()
    logits = reference.exact_rotary(model)(input_ids=ids, use_cache=False).logits
    mean = reference.loss_of(logits[:, :-1], ids[:, 1:]) / (ROWS * (TOKENS - 1))
    mean.backward()
    return mean.item(), reference.gradients(model)


@reference.exact_modules()
def relative_errors(work: list[tuple[str, Recipe]]) -> list[tuple[float, float] | None]:
    """Return the relative error of the loss and the largest one of a gradient, for each (checkpoint, recipe).

    It is None if the recipe is refused. Runs on each rank.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors: list[tuple[float, float] | None] = []
    for checkpoint, recipe in work:
        model = models.build(checkpoint)
        try:
            apply_recipe(model, recipe, mesh)
        except RecipeError:
            errors.append(None)
            continue
        value = loss(model, shard_batch(token_ids(), recipe, mesh))
        value.backward()
        expected_value, expected = torch.load(f"{checkpoint}/expected.pt")
        error = reference.error(whole_gradients(model), expected)
        errors.append((abs(value.item() / expected_value - 1), error))
    return errors


def whole_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter, gathered from its shards if it is sharded."""
    grads: dict[str, Any] = reference.gradients(model)
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
