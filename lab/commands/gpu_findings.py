"""The lines of ``lab doctor`` on GPUs: their links, their copy rates, and the memory that can be pinned."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress

import torch

from cluster.capacity import visible_devices
from cluster.devices import first_line
from cluster.host import ask_gpus, is_device
from cluster.limits import memory
from lab.bench.copies import copy_rate
from lab.errors import LabError
from lab.planning.hardware import HARDWARE, of_name
from lab.planning.plan import plan_job
from lab.recipe.jobs import Machine, make_job
from lab.techniques.host_memory import pinnable
from lab.units import Ki, Mi, MiB, format_bytes, format_tokens

MODEL, RECIPE = "llama3-8b", "offload"
"""The model and recipe for which a line says what its figures mean. Every rung from this one on offloads as
much, and this one is planned in the least time."""

LANE_RATES = {3: 8e9 * 128 / 130 / 8, 4: 16e9 * 128 / 130 / 8, 5: 32e9 * 128 / 130 / 8}
"""Bytes a second of one PCIe lane, each direction, by generation: PCI Express Base Specification 5.0."""

COPY_BYTES = 256 * MiB


def gpu_findings(gpus: int) -> Iterator[tuple[str, str]]:
    """Yield the subject and the text of each line, for a machine with ``gpus`` GPUs, at least one."""
    if gpus > 1:
        yield "links", _links(gpus)
    yield from (("pcie", text) for text in _pcie())
    yield "copies", _copies()
    yield "pinned memory", _pinned(gpus)


def _links(gpus: int) -> str:
    pairs = gpu_pairs(_visible())
    if len(pairs) != gpus * (gpus - 1) // 2:
        return "nvidia-smi topo -m does not say what joins the GPUs"
    kinds = ", ".join(f"{kind} between {count} pairs" for kind, count in Counter(pairs).most_common())
    if all(kind.startswith("NV") for kind in pairs):
        return f"{kinds}: all-to-alls take NVLink, as plans assume"
    return (
        f"{kinds}: without NVLink all-to-alls take longer than plans for GPUs that have it; the longest "
        "context stays the same"
    )


def gpu_pairs(gpus: Collection[str]) -> list[str]:
    """Return the kind of link between each pair of these GPUs, in nvidia-smi's letters (NV18, PIX, SYS).

    Args:
        gpus: The indices of the GPUs on this host.

    Returns:
        One text for each pair; an empty list if nvidia-smi does not report the links.
    """
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        lines = [[part.strip() for part in line.split("\t")] for line in output.splitlines()]
        rows = [parts for parts in lines if re.fullmatch(r"GPU\d+", parts[0])]
        selected = [number for number, row in enumerate(rows) if row[0].removeprefix("GPU") in gpus]
        # The first column is the row's own name.
        return [rows[one][1 + other] for place, one in enumerate(selected) for other in selected[place + 1 :]]
    return []


def _visible() -> set[str]:
    """Return the indices on this host of the GPUs that this process may use."""
    names = visible_devices()
    return {
        index for index, uuid in ask_gpus("index", "uuid") if any(is_device(n, index, uuid) for n in names)
    }


def _pcie() -> Iterator[str]:
    """Yield a line for all GPUs with the same link: its highest rate, because an idle GPU slows its link."""
    visible = _visible()
    rows = [row for row in ask_gpus("index", "pcie.link.gen.max", "pcie.link.width.max") if row[0] in visible]
    for (generation, width), count in Counter((row[1], row[2]) for row in rows).items():
        if generation.isdigit() and width.isdigit():
            rate = LANE_RATES.get(int(generation), 0.0) * int(width)
            highest = f", at most {rate / 1e9:.1f} GB/s each way" if rate else ""
            yield f"generation {generation} x{width} of {count} GPU{'s' * (count > 1)}{highest}"


def _copies() -> str:
    try:
        to_device, to_host = copy_rates()
    except RuntimeError as error:
        return f"not measured: {first_line(error)}"
    rates = (
        f"{to_device / 1e9:.1f} GB/s to the device, {to_host / 1e9:.1f} GB/s to pinned memory, GPU 0 alone"
    )
    device = of_name(torch.cuda.get_device_name(0))
    if device is None:
        return rates
    # With S tokens, P ranks and E hidden values: a rank's input of a layer is 2*S*E/P bytes, and its causal
    # attention 2*S*S*E/P operations, so both take the same time where S is the ratio of their rates.
    tokens = int(HARDWARE[device].attention_forward.value / to_host)
    return (
        f"{rates}: a layer's attention hides the offload of its input from {format_tokens(tokens)} tokens on"
    )


def copy_rates() -> tuple[float, float]:
    """Return the bytes per second of copies from pinned memory to the current device, and back."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    return copy_rate(device, host), copy_rate(host, device)


def _pinned(gpus: int) -> str:
    available = pinnable()
    text = f"{format_bytes(available)} of {format_bytes(memory().total)} can be pinned"
    try:
        planned = plan_job(make_job(MODEL, RECIPE, tokens=Mi, ranks=gpus), Machine(ranks_per_node=gpus))
    except LabError as error:
        return f"{text}; no {RECIPE} on {gpus} ranks: {error}"
    longest = format_tokens(available * Mi // planned.host_peak_per_node // Ki * Ki)
    return f"{text}: {MODEL} with {RECIPE} on {gpus} ranks can offload up to {longest} tokens"
