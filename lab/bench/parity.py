"""How far each technique is from plain transformers, for each kind of model: the parity matrix."""

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
    ("mistral", 40, 8), ("arcee", 24, 6), ("granite", 28, 4), ("starcoder2", 24, 2),
)  # fmt: skip
"""Family, query heads H, key/value heads K."""

TILES: dict[str, Any] = {"mlp_tile": 5, "norm_tile": 8, "loss_tile": 9}

TECHNIQUES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "ulysses": {"ulysses": 2},
    "deepspeed": {"ulysses": 2, "ulysses_backend": "deepspeed"},
    "upipe": {"ulysses": 2, "head_chunk": 2},
    "overlap": {"ulysses": 2, "head_chunk": 2, "overlap": True},
    "ring": {"ring": 4},
    "hybrid": {"ulysses": 2, "ring": 2, "head_chunk": 4},
    "checkpoint": {"checkpoint": True},
    "offload": {"checkpoint": True, "offload": "inputs"},
    "kept": {"ulysses": 2, "ring": 2, "checkpoint": True, "offload": "attention"},
    "tiling": TILES,
    "all": {
        "fsdp": True, "ulysses": 2, "ring": 2, "head_chunk": 4, "overlap": True, "checkpoint": True,
        "offload": "attention",
        **TILES,
    },
}  # fmt: skip


def measure_parity(say: Say) -> list[Row]:
    """One row a model, one column a technique: the worst relative gradient error of any parameter, in fp64.

    Frobenius norm of the difference over the norm of plain transformers' gradient, on four ranks, from a
    checkpoint that transformers saved. None where a technique says that it cannot do it here.
    """
    with TemporaryDirectory() as folder, Cluster(ranks=4) as cluster:
        rows: list[Row] = []
        for family, heads, kv_heads in MODELS:
            say(f"{family}, {heads} query heads and {kv_heads} key/value heads")
            place = Path(folder) / f"{family}-{heads}-{kv_heads}"
            save(place, family, heads, kv_heads)
            work = [(str(place), Recipe(**knobs)) for knobs in TECHNIQUES.values()]
            errors = cluster.apply(verdicts, work)[0]
            cells = {
                name: None if verdict is None else f"{verdict[1]:.0e}"
                for name, verdict in zip(TECHNIQUES, errors, strict=True)
            }
            rows.append({"model": f"{family} {heads}/{kv_heads}", **cells})
        return rows


def token_ids() -> Tensor:
    """The one batch of the matrix, [ROWS, TOKENS]."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, reference.VOCABULARY, (ROWS, TOKENS), generator=draw)


def save(
    place: Path, family: str, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, **more: Any
) -> None:
    """Write a checkpoint as transformers saves it, and beside it the plain model's loss and gradients."""
    config = reference.config(family, heads, kv_heads, **more)
    models.save(reference.build(config, dtype), place)
    torch.save(plainly(reference.build(config, dtype)), place / "truth.pt")


def plainly(model: torch.nn.Module) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and the gradients of a plain model on the matrix's batch."""
    ids = token_ids()
    logits = reference.exact_rotary(model)(input_ids=ids, use_cache=False).logits
    mean = reference.loss_of(logits[:, :-1], ids[:, 1:]) / (ROWS * (TOKENS - 1))
    mean.backward()
    return mean.item(), reference.gradients(model)


def verdicts(work: list[tuple[str, Recipe]]) -> list[tuple[float, float] | None]:
    """On each rank: relative errors of the loss and of the worst gradient, for each (place, recipe)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: list[tuple[float, float] | None] = []
    for place, recipe in work:
        model = models.build(place)
        try:
            apply_recipe(model, recipe, mesh)
        except RecipeError:
            found.append(None)
            continue
        value = loss(model, shard_batch(token_ids(), recipe, mesh))
        value.backward()
        right_value, right = torch.load(f"{place}/truth.pt")
        error = reference.error(whole_gradients(model), right)
        found.append((abs(value.item() / right_value - 1), error))
    return found


def whole_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient, put together from its shards where it has any."""
    grads: dict[str, Any] = reference.gradients(model)
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
