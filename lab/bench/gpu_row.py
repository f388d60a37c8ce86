"""What the process of one item of ``lab bench gpu`` measures."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# Modules that a measurement would import. The server from which the processes are forked imports them once.
import transformers.models.llama.modeling_llama  # noqa: F401

from cluster.errors import ClusterError
from lab import models
from lab.bench.attention import kernel_of, measure_kernel
from lab.bench.compiled import measure_compiled
from lab.bench.copies import measure_copies
from lab.bench.edge_cases import measure_edges
from lab.bench.gpu_items import RANKS, Item, Kind
from lab.bench.gradients import measure_gradients
from lab.bench.hidden_copies import measure_hidden_copies
from lab.bench.hollow import hollow_attention
from lab.bench.software import versions
from lab.errors import LabError
from lab.models.small_copies import first_layers
from lab.planning.allocator import simulate
from lab.planning.hardware import make_machine, of_name
from lab.planning.plan import plan_job
from lab.planning.plan_cache import folder
from lab.recipe.jobs import Job, Machine, make_job
from lab.rehearsing.rehearsal import seconds_alone
from lab.rehearsing.rehearse import DeviceType, machine_for, rehearse
from lab.techniques.host_transfer import PINNED_MEMORY
from lab.torch_private import set_expandable_segments
from lab.units import GiB

MEMORY_FIELDS = ("MemTotal", "MemFree", "MemAvailable", "Mlocked", "Unevictable")
"""The fields of /proc/meminfo that a row has."""


def figures(item: Item, where: DeviceType) -> dict[str, Any]:
    """Return the figures of an item, the versions of the software, and the state of the host's memory.

    "plans made in the row" is how many plans were not found in the cache.

    Any error becomes a row: "failed" is its first line, "error" its class, and "trace" the traceback.
    """
    if where == "cuda":
        set_expandable_segments(item.expandable)
        # ``use_expandable_segments`` changes nothing if this variable is set.
        os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{item.expandable}"
    saved = _saved_plans()
    try:
        result = _MEASURES[item.kind](item, where)
    except Exception as error:
        message = str(error).partition("\n")[0] or type(error).__name__
        result = {"failed": message, "error": type(error).__name__, "trace": traceback.format_exc()[-2000:]}
    made = {"plans made in the row": len(_saved_plans() - saved)}
    return {"failed": None, **result, **made, "host": _host_memory(), "versions": versions()}


def find_machine(machine: str | None) -> dict[str, str]:
    """Return where items run with this ``machine``, the device's name and torch's version; or the error."""
    try:
        where = machine_for(machine)
        name = torch.cuda.get_device_name() if where == "cuda" else "CPU"
        return {"where": where, "name": name, "torch": torch.__version__}
    except (ClusterError, LabError) as error:
        return {"error": str(error)}


def make_plans(item: Item, where: DeviceType) -> None:
    """Plan what a rehearsal of this item plans, so that its plans are in the cache."""
    machine = make_machine(workspace=where == "cuda")
    for job in jobs(item):
        plan_job(job, machine)


def _asked(item: Item) -> dict[str, Any]:
    return {"tokens": item.tokens, "ranks": RANKS, **dict(item.knobs)}


def jobs(item: Item) -> tuple[Job, Job]:
    """Return the job of an item's whole model, and that of its layers."""
    job = make_job(item.model, item.recipe, **_asked(item))
    part = first_layers(item.model, item.layers, config=models.config_of(item.model))
    return job, replace(job, model=part)


def _rehearse(item: Item, where: DeviceType) -> dict[str, Any]:
    settings: dict[str, Any] = {"layers": item.layers, "steps": item.steps, "machine": where}
    settings["device_memory"] = item.device_memory
    device = of_name(torch.cuda.get_device_name()) if where == "cuda" else None
    rehearsal = rehearse(item.model, item.recipe, device=device or Machine.device, **settings, **_asked(item))
    row = rehearsal.to_json()
    row["planned_reserved_peak"] = rehearsal.plan.reserved_peak(expandable=item.expandable)
    row["planned_alloc_retries"] = rehearsal.plan.alloc_retries if item.expandable else None
    if where == "cuda":
        pools = simulate(rehearsal.plan.timeline, expandable=item.expandable).pools
        row["planned_reserved_by_pool"] = {
            f"{stream} {'small' if small else 'large'}": pool.reserved
            for (stream, small), pool in pools.items()
        }
    if device is not None:
        # The hardware table has the rates of this GPU.
        row["planned_seconds"] = seconds_alone(rehearsal.plan)
    # The row has the name of the machine already, and the name of the recipe in "recipe".
    del row["machine"]
    return row | {"recipe": item.recipe, "recipe_knobs": row["recipe"]}


def _saved_plans() -> set[Path]:
    return set(folder("plans").glob("*.plan"))


def _hollow(item: Item, where: DeviceType) -> dict[str, Any]:
    with hollow_attention() as tokens:
        row = _rehearse(item, where)
    # Seconds and a loss of an attention that was not computed say nothing.
    for name in [name for name in row if "second" in name or name in ("loss", "timed_steps")]:
        del row[name]
    what = f"hollow: computed for {tokens} tokens, with the planned bytes of its workspace"
    return row | {"attention": what}


def _attention(item: Item, where: DeviceType) -> dict[str, Any]:
    knobs = dict(item.knobs)
    device = torch.device(where)
    kernel = kernel_of(knobs.pop("kernel"), device)
    return measure_kernel(kernel, item.tokens, device, repeats=item.steps, **knobs)


def _compile(_item: Item, where: DeviceType) -> dict[str, Any]:
    rows = measure_compiled(lambda _: None, where)
    return {f"{row['tile of']} compiled / not": row["compiled / not"] for row in rows}


def _host_memory() -> dict[str, float]:
    """Return in GiB what the lab has pinned, what exceeded the limit, and fields of /proc/meminfo."""
    sizes = {"pinned GiB": PINNED_MEMORY.nbytes / GiB, "pageable GiB": PINNED_MEMORY.pageable / GiB}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in MEMORY_FIELDS:
            sizes[f"{name} GiB"] = int(value.split()[0]) * 1024 / GiB
    return sizes


_MEASURES: dict[Kind, Callable[[Item, DeviceType], dict[str, Any]]] = {
    "attention": _attention,
    "compile": _compile,
    "copies": lambda item, where: measure_copies(where, **dict(item.knobs)),
    "edges": lambda _, where: measure_edges(where),
    "gradients": lambda item, where: measure_gradients(item.model, item.tokens, item.layers, RANKS, where),
    "hidden": lambda item, where: measure_hidden_copies(jobs(item)[1], where),
    "hollow": _hollow,
    "rehearse": _rehearse,
}
