"""Fit: of the recipes that fit the memory, the fastest; then the price of each step down in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from lab.errors import LabError
from lab.models import ModelLike
from lab.planning.closed_form import estimate
from lab.planning.plan import Plan, fake_model, plan
from lab.recipe.knobs import BY_NAME
from lab.recipe.ladder import recipe_for
from lab.recipe.recipe import Recipe
from lab.units import format_bytes, format_tokens, parse_bytes, parse_tokens

MARGIN = 1.1
"""A recipe whose closed-form estimate is further than this over the memory is not planned: the two agree to a
twentieth."""


def fit(
    model: ModelLike,
    *,
    tokens: int | str,
    ranks: int,
    rows: int = 1,
    device_memory: int | str = "80GiB",
    host_memory: int | str = "2TiB",
    ranks_per_node: int = 8,
    device: str = "h100",
    workspace: bool = True,
    watch: Callable[[int, int, Plan], None] | None = None,
) -> tuple[Plan, ...]:
    """Plan every recipe that may fit, and return those that do, the fastest first.

    All shard by FSDP and over the largest Ulysses degree; they differ in head chunk, tiles, checkpointing and
    offload. ``device_memory`` is per rank, ``host_memory`` per node; the rest as ``lab.plan``.
    ``watch`` is called with each plan made, its number, and how many there will be.

    Raises:
        LabError: as ``lab.plan``; or none fits, with the leanest and what it needs.
    """
    length, config = parse_tokens(tokens), fake_model(model).config
    of_device, of_host = parse_bytes(device_memory), parse_bytes(host_memory)
    base, heads = recipe_for("tiling", model, ranks, length, config=config), config.num_attention_heads
    recipes = {r: estimate(config, r, tokens=length, ranks=ranks, rows=rows) for r in candidates(base, heads)}
    leanest = min(recipes, key=lambda r: recipes[r].device_peak)
    node = min(ranks, ranks_per_node)
    promising = [
        r
        for r, needs in recipes.items()
        if needs.device_peak <= of_device * MARGIN and needs.host_peak * node <= of_host * MARGIN
    ]
    tried, plans = promising or [leanest], []
    for number, recipe in enumerate(tried, start=1):
        made = plan(
            model,
            recipe,
            tokens=length,
            ranks=ranks,
            rows=rows,
            device_memory=of_device,
            host_memory=of_host,
            ranks_per_node=ranks_per_node,
            device=device,
            workspace=workspace,
        )
        plans.append(made)
        if watch is not None:
            watch(number, len(tried), made)
    fitting = sorted((p for p in plans if p.fits), key=lambda p: (p.step_seconds, p.device_peak))
    if not fitting:
        raise LabError(_none_fits(min(plans, key=lambda p: p.device_peak)))
    return tuple(fitting)


def candidates(base: Recipe, heads: int) -> Iterator[Recipe]:
    """Every head chunk, without checkpointing and with each offload; the loss tiled, or all, or nothing."""
    chunks = [u for u in range(base.ulysses, heads + 1, base.ulysses) if heads % u == 0]
    offloads = BY_NAME["offload"].choices
    keeps = [(False, offloads[0]), *((True, offload) for offload in offloads)]
    tiles = (
        (None, None, None),
        (None, None, base.loss_tile),
        (base.mlp_tile, base.norm_tile, base.loss_tile),
    )
    for chunk, (checkpoint, offload), (mlp, norm, loss) in product([None, *chunks], keeps, tiles):
        yield replace(
            base,
            head_chunk=chunk,
            checkpoint=checkpoint,
            offload=offload,
            mlp_tile=mlp,
            norm_tile=norm,
            loss_tile=loss,
        )


def steps_down(plans: Sequence[Plan]) -> list[Plan]:
    """Of plans sorted by time, those that need less device memory than every faster one."""
    steps: list[Plan] = []
    for made in plans:
        if not steps or made.device_peak < steps[-1].device_peak:
            steps.append(made)
    return steps


def _none_fits(leanest: Plan) -> str:
    assert leanest.device_memory is not None
    assert leanest.host_memory is not None
    return (
        f"no recipe fits {format_tokens(leanest.tokens)} tokens on {leanest.ranks} ranks: the leanest needs "
        f"{format_bytes(leanest.device_peak)} of {format_bytes(leanest.device_memory)} on each device and "
        f"{format_bytes(leanest.host_peak_per_node)} of {format_bytes(leanest.host_memory)} on each host; "
        "more ranks or a shorter context need less"
    )
