"""What a host has for its ranks: cores, NUMA nodes, and the devices' places among them."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def own_cores() -> set[int]:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def numa_nodes() -> list[set[int]]:
    """Return the cores of each NUMA node that this process may use, leaving out nodes without any."""
    nodes = [
        parse_cores((node / "cpulist").read_text()) & own_cores()
        for node in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    ]
    return [cores for cores in nodes if cores] or [own_cores()]


def parse_cores(text: str) -> set[int]:
    """Return Linux's `0-3,8` as {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def near_cores(devices: list[str], local_ranks: int) -> list[set[int]]:
    """Return, for each local rank, the cores it is bound to: those of its device's NUMA node.

    Without devices, or where a device does not say, the ranks are shared out over the nodes in order.
    """
    nodes = numa_nodes()
    shared = [nodes[rank * len(nodes) // local_ranks] for rank in range(local_ranks)]
    near = _device_cores(devices) if devices else {}
    return [near.get(rank) or cores for rank, cores in enumerate(shared)]


def _device_cores(devices: list[str]) -> dict[int, set[int]]:
    """Return the cores near each device, by its place in `devices`, for those that tell."""
    found: dict[int, set[int]] = {}
    for index, uuid, bus in ask_gpus("index", "uuid", "pci.bus_id"):
        for place, name in enumerate(devices):
            # nvidia-smi writes the PCI domain with eight digits, Linux with four.
            cores = _PCI / bus.lower()[4:] / "local_cpulist"
            if (name == index or uuid.startswith(name)) and cores.exists():
                found[place] = parse_cores(cores.read_text()) & own_cores()
    return found


def ask_gpus(*fields: str) -> list[list[str]]:
    """Return what nvidia-smi says of each GPU of this host, in the order of `fields`; [] without it."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        rows = [[part.strip() for part in line.split(",")] for line in said.splitlines()]
        return [row for row in rows if len(row) == len(fields)]
    return []
