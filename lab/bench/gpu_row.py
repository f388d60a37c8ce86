"""The process of one item of ``lab bench gpu``: ``python -m lab.bench.gpu_row ITEM MACHINE``."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from lab.bench.gpu import Item
from lab.bench.software import versions
from lab.rehearsing.rehearse import DeviceType

RANKS = 8


def figures(item: Item, where: DeviceType) -> dict[str, Any]:
    """Return the figures of an item and the versions of the software.

    Any error becomes a row: "failed" is its first line, "error" its class, and "trace" the traceback.
    """
    try:
        result = _MEASURES[item.kind](item, where)
    except Exception as error:
        message = str(error).partition("\n")[0] or type(error).__name__
        result = {"failed": message, "error": type(error).__name__, "trace": traceback.format_exc()[-2000:]}
    return {"failed": None, **result, "versions": versions()}


def _rehearse(item: Item, where: DeviceType) -> dict[str, Any]:
    from lab.rehearsing.rehearse import rehearse

    result = rehearse(
        item.model,
        item.recipe,
        tokens=item.tokens,
        ranks=RANKS,
        layers=item.layers,
        steps=item.steps,
        machine=where,
        **dict(item.knobs),
    ).to_json()
    # The row has the name of the machine already, and the name of the recipe in "recipe".
    return {name: value for name, value in result.items() if name != "machine"} | {
        "recipe": item.recipe,
        "recipe_knobs": result["recipe"],
    }


def _attention(item: Item, where: DeviceType) -> dict[str, Any]:
    import torch

    from lab.bench.attention import kernel_of, measure_kernel

    knobs = dict(item.knobs)
    device = torch.device(where)
    kernel = kernel_of(knobs.pop("kernel"), device)
    return measure_kernel(kernel, item.tokens, device, repeats=item.steps, **knobs)


def _copies(item: Item, where: DeviceType) -> dict[str, Any]:
    from lab.bench.copies import measure_copies

    return measure_copies(where, **dict(item.knobs))


def _gradients(item: Item, where: DeviceType) -> dict[str, Any]:
    from lab.bench.gradients import measure_gradients

    return measure_gradients(item.model, item.tokens, item.layers, RANKS, where)


def _compile(_item: Item, where: DeviceType) -> dict[str, Any]:
    from lab.bench.compiled import measure_compiled

    rows = measure_compiled(lambda _: None, where)
    return {f"{row['tile of']} compiled / not": row["compiled / not"] for row in rows}


def print_machine(machine: str | None) -> None:
    """Print as JSON where items run with this ``machine``, and the name of the device; or the error."""
    import torch

    from cluster.errors import ClusterError
    from lab.errors import LabError
    from lab.rehearsing.rehearse import machine_for

    try:
        where = machine_for(machine)
        answer = {"where": where, "name": torch.cuda.get_device_name() if where == "cuda" else "CPU"}
    except (ClusterError, LabError) as error:
        answer = {"error": str(error)}
    print("\n" + json.dumps(answer), flush=True)


_MEASURES = {
    "attention": _attention,
    "compile": _compile,
    "copies": _copies,
    "gradients": _gradients,
    "rehearse": _rehearse,
}


def main() -> None:
    """Measure the item in the arguments, which is JSON, and print its figures as one line of JSON."""
    fields = json.loads(sys.argv[1])
    item = Item(**fields | {"knobs": tuple((name, value) for name, value in fields["knobs"])})
    where: DeviceType = "cuda" if sys.argv[2] == "cuda" else "cpu"
    print("\n" + json.dumps(figures(item, where)), flush=True)


if __name__ == "__main__":
    main()
