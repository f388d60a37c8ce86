"""One row of ``lab bench gpu``, in a process of its own: ``python -m lab.bench.gpu_row ITEM MACHINE``."""

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
    """What is measured of an item, with the versions of what ran; or "failed", the error's first line.

    Whatever goes wrong is a row: it says what, and the next is measured all the same.
    """
    try:
        found = _MEASURES[item.kind](item, where)
    except Exception as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        found = {"failed": said, "error": type(error).__name__, "trace": traceback.format_exc()[-2000:]}
    return {"failed": None, **found, "versions": versions()}


def _rehearse(item: Item, where: DeviceType) -> dict[str, Any]:
    from lab.rehearsing.rehearse import rehearse

    found = rehearse(
        item.model,
        item.recipe,
        tokens=item.tokens,
        ranks=RANKS,
        layers=item.layers,
        steps=item.steps,
        machine=where,
        **dict(item.knobs),
    ).to_json()
    # The machine's name and the ladder's are the row's own.
    return {name: value for name, value in found.items() if name != "machine"} | {
        "recipe": item.recipe,
        "recipe_knobs": found["recipe"],
    }


def _attention(item: Item, where: DeviceType) -> dict[str, Any]:
    import torch

    from lab.bench.attention import kernel_of, measured

    knobs = dict(item.knobs)
    device = torch.device(where)
    kernel = kernel_of(knobs.pop("kernel"), device)
    return measured(kernel, item.tokens, device, repeats=item.steps, **knobs)


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


def print_machine(asked: str | None) -> None:
    """Print as JSON where rows run if ``asked`` is asked for, and the machine's name; or the error."""
    import torch

    from cluster.errors import ClusterError
    from lab.errors import LabError
    from lab.rehearsing.rehearse import machine_for

    try:
        where = machine_for(asked)
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
    """Measure the item that the command line gives as JSON, and print its figures as one line of JSON."""
    given = json.loads(sys.argv[1])
    item = Item(**given | {"knobs": tuple((name, value) for name, value in given["knobs"])})
    where: DeviceType = "cuda" if sys.argv[2] == "cuda" else "cpu"
    print("\n" + json.dumps(figures(item, where)), flush=True)


if __name__ == "__main__":
    main()
