"""GPUs, what connects them, and one disk: each figure with its source; and machines that are made of them.

The figures are in ``hardware.toml``. Estimates of time divide work by these rates. No figure is fitted to a
published training run: those are kept to compare with. A source that says *assumed*, or names another device,
is a measurement of something else. The bytes that CUDA takes behind the dispatcher's back are in
``cuda_workspace.py``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from lab.errors import LabError
from lab.recipe.jobs import Disk, Machine
from lab.units import GiB, MiB, check_counts, parse_bytes, parse_disk, parse_rate


@dataclass(frozen=True)
class Figure:
    """A number, its unit ("FLOP/s", "B/s", "B", or "1" for counts and shares), and where it comes from."""

    value: float
    unit: str
    source: str


PAGEABLE_RATE = Figure(
    2.8e9,
    "B/s",
    "assumed for every device: sgl-project/sglang pull request 32032, torch's copies from an H200 to host "
    "memory that is not pinned: 2.8 GB/s",
)
"""The rate of copies between a device and host memory that is not pinned, each direction."""


@dataclass(frozen=True)
class Hardware:
    """One GPU and what connects it. A share is what real software reaches of the figure above it.

    Attributes:
        memory: bytes that torch reports as the device's total, less than the name promises.
        matmul: dense bf16 peak; ``matmul_share`` of large matrices.
        attention_forward, attention_backward: flash attention in half precision, head_dim 128, long causal
            sequences, counting half of the square of scores; no share, because it is measured.
        memory_rate: of the device's own memory; ``memory_share`` of a large copy, reads and writes counted.
        link: to the other GPUs of a node, each direction; ``link_share`` of NCCL, all-reduce left aside.
        network: to other nodes, each GPU, each direction.
        host_link: to host memory, each direction; ``host_link_share`` of pinned copies, one GPU copying.
            Eight at once are also bounded by host memory, which is not modelled. Copies of memory that is not
            pinned have ``PAGEABLE_RATE``.
        disk_write, disk_read: one NVMe drive of the node, which all its GPUs share. It is the same for all
            devices.
    """

    name: str
    memory: Figure
    matmul: Figure
    matmul_share: Figure
    attention_forward: Figure
    attention_backward: Figure
    memory_rate: Figure
    memory_share: Figure
    link: Figure
    link_share: Figure
    network: Figure
    network_share: Figure
    host_link: Figure
    host_link_share: Figure
    disk_write: Figure
    disk_read: Figure


_UNITS = {"memory": "B"} | dict.fromkeys(("matmul", "attention_forward", "attention_backward"), "FLOP/s")
"""The units of figures. Those of shares and of other rates follow from their names."""

_SCALES = {"value": 1, "MiB": MiB, "GiB": GiB}
"""The words of the table by which a value is given, and what it is multiplied by."""


def _read(path: Path) -> dict[str, Hardware]:
    """Return the devices of a table, whose form is described there, by short name."""
    table = tomllib.loads(path.read_text())
    sources: dict[str, str] = {}
    for word, text in table.pop("sources").items():
        sources[word] = text.format(**sources)
    every = table.pop("every")

    def figure(device: str, field: str) -> Figure:
        own = every | table[device]
        given = own.get(field, {"like": f"{own.get('like')}.{field}", "why": own.get("why")})
        if "like" in given:
            other = figure(*given["like"].split("."))
            return replace(other, source=f"{given['why']}: {other.source}")
        [value] = (given[name] * scale for name, scale in _SCALES.items() if name in given)
        value = value * given.get("times", 1) / given["of"] if "of" in given else value
        unit = "1" if field.endswith("_share") else _UNITS.get(field, "B/s")
        return Figure(value, unit, given["source"].format(**sources))

    names = [field.name for field in fields(Hardware) if field.name != "name"]
    return {
        device: Hardware(own["name"], **{name: figure(device, name) for name in names})
        for device, own in table.items()
    }


HARDWARE = _read(Path(__file__).with_suffix(".toml"))
"""The devices by short name."""

_OTHER_CHIPS = {"d", "laptop"}
"""Words after which the name of a GeForce means another chip than without them."""


def hardware(name: str) -> Hardware:
    """The device of this name.

    Raises:
        LabError: a name that is not in the table, and those that are.
    """
    if name not in HARDWARE:
        raise LabError(f"no device named {name!r}: the table has {', '.join(sorted(HARDWARE))}")
    return HARDWARE[name]


def nearest(torch_name: str) -> str:
    """The short name of the device that torch calls ``torch_name``; the slowest device's if it is unknown."""
    return of_name(torch_name) or min(HARDWARE, key=lambda name: HARDWARE[name].matmul.value)


def of_name(torch_name: str) -> str | None:
    """The short name of the device that torch calls ``torch_name``; None if it is not in the table.

    Words are compared, for a part of a name is often the name of another device: GB200 and B200.
    """
    words = torch_name.lower().replace("rtx ", "rtx").replace("-", " ").split()
    if _OTHER_CHIPS & {*words}:
        return None
    return next((name for name in HARDWARE if name in words), None)


def make_machine(
    *,
    device: str = Machine.device,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ranks_per_node: int = 8,
    workspace: bool = True,
    disk: int | str | None = None,
    disk_rate: int | str | None = None,
) -> Machine:
    """Read the sizes, which may be texts such as "80GiB"; that of a disk, "4TB", and its rate, "3GB/s".

    Without ``device_memory``, a device has the memory that the table says.

    Raises:
        LabError: a device that is not in the table; a size that cannot be read, or ranks that are no count; a
            rate of no disk.
    """
    check_counts({"ranks_per_node": ranks_per_node})
    of_table = int(hardware(device).memory.value)
    device_bytes = of_table if device_memory is None else parse_bytes(device_memory)
    host_bytes = None if host_memory is None else parse_bytes(host_memory)
    if disk_rate is not None and disk is None:
        raise LabError(f"disk_rate={disk_rate!r} without a disk: give its size too, such as disk=4TB")
    rate = None if disk_rate is None else parse_rate(disk_rate)
    given = None if disk is None else Disk(parse_disk(disk), rate)
    return Machine(device, device_bytes, host_bytes, ranks_per_node, workspace, given)
