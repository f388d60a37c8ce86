"""``lab bench machine``: measures the rates of a machine, and writes them as a device that plans take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.bench.attention import HEAD_DIM, forward_flops
from lab.bench.copies import PRODUCTS, SIDES
from lab.bench.gpu import measure_gpu
from lab.bench.gpu_items import RATES
from lab.bench.results import software
from lab.bench.table import Say
from lab.errors import LabError
from lab.memory.export import check_file
from lab.planning.costs import BACKWARD_FLOPS
from lab.planning.hardware import DEVICE_FILE, hardware, nearest, of_name
from lab.units import GiB

MINUTES = 6
"""The most minutes of all measurements."""


def measure_machine(file: Path, say: Say, *, machine: str | None) -> Iterator[dict[str, Any]]:
    """Measure the rates of this machine, yield each row, and write the file of a device; see ``device_of``.

    Args:
        file: Where to write it.
        say: Shows what is measured now.
        machine: As that of ``measure_gpu``.

    Raises:
        LabError: As ``measure_gpu`` and ``device_of``; or the file has no name by which ``--device`` knows
            one.
        ResultError: The file cannot be written.
    """
    if not file.name.endswith(DEVICE_FILE):
        raise LabError(f"{file}: give a name that ends in {DEVICE_FILE}, by which --device knows a file")
    check_file(file)
    items = RATES[machine or "cuda"]
    rows = []
    with TemporaryDirectory() as folder:
        for row in measure_gpu(
            Path(folder), MINUTES, say, lambda _: None, machine=machine, items=items, small=False
        ):
            rows.append(row)
            yield row
    write_device(device_of(rows), file)


def write_device(device: dict[str, Any], file: Path) -> None:
    """Write the entries of a device."""
    file.write_text(json.dumps(device, indent=2) + "\n")


def device_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries of a device, in the form of hardware.toml, from rows of ``lab bench gpu``.

    They are the rates of products and of each kernel by length, in FLOP/s, and those of copies, in bytes per
    second. What the rows do not have is that of the device of the same name in the hardware table, or else
    that of the slowest device in it.

    Args:
        rows: Rows of one machine. Those that failed are left out.

    Raises:
        LabError: There is no row of copies, or none of a kernel; or a row has other figures.
    """
    measured = [row for row in rows if not row.get("failed")]
    copies = [row for row in measured if row.get("kind") == "copies"]
    kernels = [row for row in measured if row.get("kind") == "attention"]
    if not (copies and kernels):
        raise LabError("no device is made: the copies, or all kernels, failed or took too long")
    try:
        return _entries(copies[-1], _kernels(kernels))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise LabError(f"the rows have no rates: {error!r}") from error


def _entries(copies: dict[str, Any], kernels: dict[str, dict[int, tuple[float, float]]]) -> dict[str, Any]:
    name = copies["machine"]
    where, known = "cpu" if name == "CPU" else "cuda", of_name(name)
    source = f"lab bench gpu, {name}, {software(copies)}"
    # On a CPU the products are in fp32, which plans count at half the rate of bf16.
    products = (2 if where == "cpu" else 1) * 2 * PRODUCTS * SIDES[where] ** 3 / copies["products s"]
    like = known or nearest(name)
    # If neither slowed the other down, both would take as long as the longer.
    alone = copies["products s"], copies["copies alone s"]
    slower = (copies["products with copies beside s"] - max(alone)) / min(alone)
    figures = {
        **({} if known else {"matmul": products}),
        "matmul_share": products / hardware(known).matmul.value if known else 1,
        "host_link": 1e9 * min(copies["to host GB/s"], copies["from host GB/s"]),
        "host_link_share": 1,
        "pageable_rate": 1e9 * min(copies["to pageable GB/s"], copies["from pageable GB/s"]),
        "copy_slowdown": max(slower, 0),
    }
    if "memory GB/s" in copies:
        figures |= {"memory_rate": 1e9 * copies["memory GB/s"], "memory_share": 1}
        figures |= {"memory": GiB * copies["memory GiB"]}
    longest = {kernel: rates[max(rates)] for kernel, rates in kernels.items()}
    fastest = min(longest, key=lambda kernel: 1 / longest[kernel][0] + BACKWARD_FLOPS / longest[kernel][1])
    forward, backward = longest[fastest]
    figures |= {"attention_forward": forward, "attention_backward": backward}
    return {
        "name": name,
        "like": like,
        "why": "not measured" if known else f"not measured, and assumed from the {hardware(like).name}",
        "kernel": fastest,
        "kernels": {
            kernel: {
                "tokens": sorted(rates),
                "forward": [rates[tokens][0] for tokens in sorted(rates)],
                "backward": [rates[tokens][1] for tokens in sorted(rates)],
                "source": source,
            }
            for kernel, rates in kernels.items()
        },
        **{figure: {"value": value, "source": source} for figure, value in figures.items()},
    }


def _kernels(rows: Iterable[dict[str, Any]]) -> dict[str, dict[int, tuple[float, float]]]:
    """Return the operations per second of forward and of backward, by kernel and by tokens."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for row in rows:
        knobs = row["knobs"]
        if not knobs.get("heads_first"):
            flops = forward_flops(knobs["heads"], row["tokens"], knobs.get("head_dim", HEAD_DIM))
            rates = flops / row["forward s"], BACKWARD_FLOPS * flops / row["backward s"]
            found.setdefault(knobs["kernel"], {})[row["tokens"]] = rates
    return found
