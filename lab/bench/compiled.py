"""The seconds of a tile of a norm and of an MLP, forward and backward, with torch.compile and without."""

from __future__ import annotations

import copy
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lab import models
from lab.bench.software import device_and_versions
from lab.bench.table import Row, Say
from lab.bench.timing import rounds, seconds
from lab.techniques.compiling import apply_compiled

REPEATS = 9


def measure_compiled(say: Say, where: str | None = None) -> list[Row]:
    """Run ``measure_tiles`` with 16K tokens of Llama3-8B in bf16 on CUDA, or with fewer tokens on CPU.

    Args:
        say: Shows what is measured now.
        where: "cuda" or "cpu"; None for CUDA if there is a GPU.
    """
    if where == "cuda" or (where is None and torch.cuda.is_available()):
        return measure_tiles("llama3-8b", say, tile=16384, dtype=torch.bfloat16, device="cuda")
    return measure_tiles("llama3.2-1b", say, tile=512, dtype=torch.float32, device="cpu")


def measure_tiles(
    model: models.ModelLike, say: Say, *, tile: int, dtype: torch.dtype, device: str, repeats: int = REPEATS
) -> list[Row]:
    """Measure a tile of a norm and of an MLP, with torch.compile and without.

    A module runs forward and backward on one tile, outside the loop over tiles. The two variants take turns,
    and the ratio is the median of the ratios of the rounds.

    Returns:
        A row for the norm and one for the MLP: the seconds of the first, compiling call, the seconds of a
        tile without and with torch.compile, and their ratio.

    Raises:
        RecipeError: There is no C++ compiler.
    """
    config = copy.deepcopy(models.config_of(model))
    config.num_hidden_layers, config.vocab_size = 1, 256
    plain: Any = models.build(config)
    plain.to(device, dtype)
    other = copy.deepcopy(plain)
    apply_compiled(other, mlps=True)
    x = torch.randn(1, tile, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    where = device_and_versions(device)
    rows: list[Row] = []
    for name, part in {"norm": "input_layernorm", "MLP": "mlp"}.items():
        say(f"a tile of {name}")
        eager, fused = (partial(_run, getattr(net.model.layers[0], part), x) for net in (plain, other))
        first = seconds(fused)
        eager()
        times = rounds(repeats, eager, fused)
        without, with_it = map(median, zip(*times, strict=True))
        rows.append(
            {
                "tile of": name,
                "tokens": tile,
                "threads": torch.get_num_threads(),
                "first time": first,
                "seconds": without,
                "compiled": with_it,
                "compiled / not": median(with_it / without for without, with_it in times),
                "machine": where,
            }
        )
    return rows


def _run(module: nn.Module, x: Tensor) -> None:
    """Run one forward and one backward."""
    y = module(x)
    torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))
