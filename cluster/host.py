"""The cores and NUMA nodes of this host, and the node of each device."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def own_cores() -> set[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def numa_nodes() -> list[set[int]]:
    """Return the cores that this process may use, by NUMA node. Nodes without such cores are left out."""
    nodes = [
        parse_cores((node / "cpulist").read_text()) & own_cores()
        for node in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    ]
    return [cores for cores in nodes if cores] or [own_cores()]


def parse_cores(text: str) -> set[int]:
    """Return the cores of a list that Linux wrote: {0, 1, 2, 3, 8} for `0-3,8`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def near_cores(devices: list[str], local_ranks: int) -> list[set[int]]:
    """Return the cores that each local rank is bound to: those of the NUMA node of its device.

    Where there are no devices, or where the node of a device is not known, the ranks are spread over the
    nodes in order.

    Args:
        devices: The visible devices of this host, by local rank.
        local_ranks: The number of ranks on this host.
    """
    nodes = numa_nodes()
    spread = [nodes[rank * len(nodes) // local_ranks] for rank in range(local_ranks)]
    near = _device_cores(devices) if devices else {}
    return [near.get(rank) or cores for rank, cores in enumerate(spread)]


def _device_cores(devices: list[str]) -> dict[int, set[int]]:
    """Return the cores near each device, by its index in `devices`, where the node is known."""
    near: dict[int, set[int]] = {}
    for index, uuid, bus in ask_gpus("index", "uuid", "pci.bus_id"):
        for number, name in enumerate(devices):
            # nvidia-smi writes the PCI domain with eight digits, Linux with four.
            cores = _PCI / bus.lower()[4:] / "local_cpulist"
            if is_device(name, index, uuid) and cores.exists():
                near[number] = parse_cores(cores.read_text()) & own_cores()
    return near


def is_device(name: str, index: str, uuid: str) -> bool:
    """Return whether a name in CUDA_VISIBLE_DEVICES is that of the GPU with this index and this UUID."""
    return name == index or uuid.startswith(name)


def ask_gpus(*fields: str) -> list[list[str]]:
    """Ask nvidia-smi for these fields of each GPU of this host.

    Returns:
        A row for each GPU, in the order of `fields`. No rows where nvidia-smi cannot be run.
    """
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        rows = [[part.strip() for part in line.split(",")] for line in output.splitlines()]
        return [row for row in rows if len(row) == len(fields)]
    return []
