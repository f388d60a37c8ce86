"""What joins this machine's GPUs to each other and to host memory, and what it means for a long context."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

import psutil
import torch

from cluster.capacity import visible_devices
from cluster.devices import first_line
from cluster.host import ask_gpus, is_device
from lab import models
from lab.errors import LabError
from lab.planning.closed_form import estimate_job
from lab.planning.hardware import HARDWARE, of_name
from lab.recipe.jobs import Job
from lab.recipe.ladder import recipe_for
from lab.techniques.host_memory import pinnable
from lab.units import Ki, Mi, MiB, format_bytes, format_tokens

MODEL, RECIPE = "llama3-8b", "upipe"
"""For which it is said what a finding means."""

LANE_RATES = {3: 8e9 * 128 / 130 / 8, 4: 16e9 * 128 / 130 / 8, 5: 32e9 * 128 / 130 / 8}
"""Bytes a second of one PCIe lane, each direction, by generation: PCI Express Base Specification 5.0."""

COPIED, TIMES = 256 * MiB, 3


def findings(gpus: int) -> Iterator[tuple[str, str]]:
    """What is found on a machine of so many GPUs, at least one: its name, and a line."""
    if gpus > 1:
        yield "links", _links(gpus)
    yield from (("pcie", said) for said in _pcie())
    yield "copies", _copies()
    yield "pinned memory", _pinned(gpus)


def _links(gpus: int) -> str:
    pairs = gpu_pairs(_visible())
    if len(pairs) != gpus * (gpus - 1) // 2:
        return "nvidia-smi topo -m does not say what joins the GPUs"
    kinds = ", ".join(f"{kind} between {count} pairs" for kind, count in Counter(pairs).most_common())
    if all(kind.startswith("NV") for kind in pairs):
        return f"{kinds}: all-to-alls take NVLink, as plans assume"
    return f"{kinds}: without NVLink all-to-alls take longer than planned; the longest context stays the same"


def gpu_pairs(gpus: Collection[str]) -> list[str]:
    """Return what joins each pair of these GPUs, in nvidia-smi's letters (NV18, PIX, SYS).

    Args:
        gpus: The indices of the GPUs on this host.

    Returns:
        A text for each pair. No texts where nvidia-smi does not say it.
    """
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        lines = [[part.strip() for part in line.split("\t")] for line in said.splitlines()]
        rows = [parts for parts in lines if re.fullmatch(r"GPU\d+", parts[0])]
        asked = [number for number, row in enumerate(rows) if row[0].removeprefix("GPU") in gpus]
        # The first column is the row's own name.
        return [rows[one][1 + other] for place, one in enumerate(asked) for other in asked[place + 1 :]]
    return []


def _visible() -> set[str]:
    """Return the indices on this host of the GPUs that this process may use."""
    names = visible_devices()
    return {
        index for index, uuid in ask_gpus("index", "uuid") if any(is_device(n, index, uuid) for n in names)
    }


def _pcie() -> Iterator[str]:
    """A line for all GPUs with the same link; what it can be, for an idle GPU slows its link down."""
    visible = _visible()
    rows = [row for row in ask_gpus("index", "pcie.link.gen.max", "pcie.link.width.max") if row[0] in visible]
    for (generation, width), count in Counter((row[1], row[2]) for row in rows).items():
        if generation.isdigit() and width.isdigit():
            rate = LANE_RATES.get(int(generation), 0.0) * int(width)
            most = f", at most {rate / 1e9:.1f} GB/s each way" if rate else ""
            yield f"generation {generation} x{width} of {count} GPU{'s' * (count > 1)}{most}"


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
    # A layer's input is 2*S*E/P bytes, its causal attention 2*S*S*E/P operations.
    hidden = int(HARDWARE[device].attention_forward.value / to_host)
    return (
        f"{rates}: a layer's attention hides the offload of its input from {format_tokens(hidden)} tokens on"
    )


def copy_rates() -> tuple[float, float]:
    """Bytes a second to the current device and to the host, between it and pinned memory."""
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    return (
        rate(lambda: device.copy_(host, non_blocking=True), torch.cuda.synchronize),
        rate(lambda: host.copy_(device, non_blocking=True), torch.cuda.synchronize),
    )


def rate(copy: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Bytes a second of ``copy``, which moves COPIED bytes: the best of a few times, after one to warm up."""
    seconds = []
    for _ in range(TIMES + 1):
        synchronize()
        start = time.perf_counter()
        copy()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return COPIED / min(seconds[1:])


def _pinned(gpus: int) -> str:
    room = pinnable()
    said = f"{format_bytes(room)} of {format_bytes(psutil.virtual_memory().total)} can be pinned"
    try:
        config = models.config_of(MODEL)
        recipe = recipe_for(RECIPE, MODEL, gpus, Mi, config=config)
        held = estimate_job(config, Job(MODEL, recipe, Mi, gpus)).host_peak * gpus
    except LabError as error:
        return f"{said}; no {RECIPE} on {gpus} ranks: {error}"
    longest = format_tokens(room * Mi // held // Ki * Ki)
    return f"{said}: {MODEL} with {RECIPE} on {gpus} ranks can offload up to {longest} tokens"
