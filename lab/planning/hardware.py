"""GPUs, what connects them, and one disk: each figure with its source; and machines that are made of them.

The figures are in ``hardware.toml``. Estimates of time divide work by these rates. No figure is fitted to a
published training run: those are kept to compare with. A source that says *assumed*, or names another device,
is a measurement of something else. The bytes that CUDA takes behind the dispatcher's back are in
``cuda_workspace.py``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lab.errors import LabError
from lab.recipe.jobs import Disk, Machine
from lab.recipe.knobs import KernelName
from lab.units import GiB, MiB, check_counts, parse_bytes, parse_disk, parse_rate


@dataclass(frozen=True)
class Figure:
    """A number, its unit ("FLOP/s", "B/s", "B", or "1" for counts and shares), and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class KernelRates:
    """What an attention kernel reaches in calls of n lengths, operations counted as in ``Hardware``.

    Attributes:
        tokens: The lengths, rising [n].
        forward, backward: FLOP/s [n].
        source: Where they come from.
    """

    tokens: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class Hardware:
    """One GPU and what connects it. A share is what real software reaches of the figure above it.

    Attributes:
        memory: bytes that torch reports as the device's total, less than the name promises.
        matmul: dense bf16 peak; ``matmul_share`` of large matrices.
        attention_forward, attention_backward: flash attention in half precision, head_dim 128, long causal
            sequences, counting half of the square of scores; no share, because it is measured.
        kernel: the kernel that has these rates. Plans assume it for ``kernel="auto"``.
        kernels: the rates of kernels by length, by their names in a recipe; of some devices only.
        memory_rate: of the device's own memory; ``memory_share`` of a large copy, reads and writes counted.
        link: to the other GPUs of a node, each direction; ``link_share`` of NCCL, all-reduce left aside.
        network: to other nodes, each GPU, each direction.
        host_link: to host memory, each direction; ``host_link_share`` of pinned copies, one GPU copying.
            Eight at once are also bounded by host memory, which is not modelled.
        pageable_rate: of copies of host memory that is not pinned, the slower direction.
        copy_slowdown: seconds that computation takes longer, for each second of pinned copies beside it.
        disk_write, disk_read: one NVMe drive of the node, which all its GPUs share. It is the same for all
            devices.
    """

    name: str
    memory: Figure
    matmul: Figure
    matmul_share: Figure
    attention_forward: Figure
    attention_backward: Figure
    kernel: str
    kernels: Mapping[str, KernelRates]
    memory_rate: Figure
    memory_share: Figure
    link: Figure
    link_share: Figure
    network: Figure
    network_share: Figure
    host_link: Figure
    host_link_share: Figure
    pageable_rate: Figure
    copy_slowdown: Figure
    disk_write: Figure
    disk_read: Figure

    def with_kernel(self, name: str, tokens: int) -> Hardware:
        """Return this device with the rates of attention that a kernel reaches at a length.

        Between two lengths that were measured, the rates are interpolated over the logarithm of the length;
        beyond them they are those of the nearest one.

        Args:
            name: A kernel; "auto" for ``kernel``. Of one that is not in ``kernels`` the device is returned as
                it is.
            tokens: The tokens of a call.
        """
        name = self.kernel if name == "auto" else name
        rates = self.kernels.get(name)
        if rates is None:
            return self
        at = np.log2([tokens, *rates.tokens])
        forward, backward = (
            Figure(float(np.interp(at[0], at[1:], values)), "FLOP/s", rates.source)
            for values in (rates.forward, rates.backward)
        )
        return replace(self, kernel=name, attention_forward=forward, attention_backward=backward)


_UNITS = {"memory": "B", "copy_slowdown": "1"} | dict.fromkeys(
    ("matmul", "attention_forward", "attention_backward"), "FLOP/s"
)
"""The units of figures. Those of shares and of other rates follow from their names."""

_SCALES = {"value": 1, "MiB": MiB, "GiB": GiB}
"""The words of the table by which a value is given, and what it is multiplied by."""


_TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""The table, whose form is described there."""

_EVERY: dict[str, Any] = _TABLE.pop("every")

_SOURCES: dict[str, str] = {}
for _word, _text in _TABLE.pop("sources").items():
    _SOURCES[_word] = _text.format(**_SOURCES)

_FIGURES = [field.name for field in fields(Hardware) if field.type == "Figure"]


def _figure(own: Mapping[str, Any], field: str) -> Figure:
    """Return a figure of the device with these entries."""
    given = {**_EVERY, **own}.get(field, {"like": f"{own.get('like')}.{field}", "why": own.get("why")})
    if "like" in given:
        device, like = given["like"].split(".")
        other = _figure(_TABLE[device], like)
        return replace(other, source=f"{given['why']}: {other.source}")
    [value] = (given[name] * scale for name, scale in _SCALES.items() if name in given)
    value = value * given.get("times", 1) / given["of"] if "of" in given else value
    unit = "1" if field.endswith("_share") else _UNITS.get(field, "B/s")
    return Figure(value, unit, given["source"].format(**_SOURCES))


def _hardware(own: Mapping[str, Any]) -> Hardware:
    """Return the device with these entries of the table."""
    figures = {name: _figure(own, name) for name in _FIGURES}
    if "kernel" not in own:
        other = _hardware(_TABLE[own["like"]])
        kernels = {
            name: replace(rates, source=f"{own['why']}: {rates.source}")
            for name, rates in other.kernels.items()
        }
        return Hardware(name=own["name"], kernel=other.kernel, kernels=kernels, **figures)
    kernels = {
        name: KernelRates(tuple(given["tokens"]), tuple(given["forward"]), tuple(given["backward"]), source)
        for name, given in own.get("kernels", {}).items()
        for source in [given["source"].format(**_SOURCES)]
    }
    return Hardware(name=own["name"], kernel=own["kernel"], kernels=kernels, **figures)


HARDWARE = {device: _hardware(own) for device, own in _TABLE.items()}
"""The devices by short name."""

_OTHER_CHIPS = {"d", "laptop"}
"""Words after which the name of a GeForce means another chip than without them."""


DEVICE_FILE = ".json"
"""How the name of a file ends that has a device."""

MOST = 1e18
"""The largest rate, size or length that a file may have."""


def hardware(name: str) -> Hardware:
    """The device of this name; or of a file that `lab bench machine` wrote, by its path.

    Raises:
        LabError: a name that is not in the table, and those that are; a file that cannot be read, or that has
            no device.
    """
    if name.endswith(DEVICE_FILE):
        return _of_file(Path(name))
    if name not in HARDWARE:
        raise LabError(
            f"no device named {name!r}: the table has {', '.join(sorted(HARDWARE))}; a file of "
            f"`lab bench machine` has a name that ends in {DEVICE_FILE}"
        )
    return HARDWARE[name]


def _of_file(path: Path) -> Hardware:
    """Return the device of a file: entries of the table, as JSON."""
    try:
        own: Any = json.loads(path.read_bytes()) if path.is_file() else None
        wrong = _wrong(own)
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError):
        wrong = "it is not JSON"
    except KeyError as error:
        wrong = f"an entry lacks {error.args[0]}"
    except (AttributeError, TypeError):
        wrong = "an entry has another form"
    if wrong:
        raise LabError(f"{path} has no device, because {wrong}: `lab bench machine {path}` writes one")
    return _hardware(own)


def _wrong(own: Any) -> str:
    """Return what is wrong with the entries of a file, whose form is that of `lab bench machine`."""
    if own is None:
        return "there is no such file"
    texts, known = ("name", "like", "why", "kernel"), {"name", "like", "why", "kernel", "kernels", *_FIGURES}
    if other := sorted(own.keys() - known):
        return f"it has {', '.join(other)}"
    for word in texts:
        if not (isinstance(own.get(word), str) and own[word] and own[word].isprintable()):
            return f"{word} is no text"
    if own["like"] not in _TABLE:
        return f"like is not one of {', '.join(sorted(_TABLE))}"
    if own["kernel"] not in own["kernels"] or not own["kernels"].keys() <= {*get_args(KernelName)}:
        return "kernels have other names than those of a recipe, or lack that of kernel"
    for name, rates in own["kernels"].items():
        lists = [rates[field] for field in ("tokens", "forward", "backward")]
        rising = all(type(n) is int for n in lists[0]) and lists[0] == sorted({*lists[0]})
        if len(rates) != 4 or len({*map(len, lists)}) != 1 or not (lists[0] and rising):
            return f"{name} has no lengths that rise, with a rate of forward and of backward for each"
        numbers = all(_is_between(1, number, MOST) for values in lists for number in values)
        if not numbers or "{" in rates["source"]:
            return f"{name} has a number that is no rate or length, or a source with a brace"
    for name in own.keys() & _FIGURES:
        least = 0 if name == "copy_slowdown" else 1e-6 if name.endswith("_share") else 1
        most = 100 if least < 1 else MOST
        if (
            len(own[name]) != 2
            or not _is_between(least, own[name]["value"], most)
            or "{" in own[name]["source"]
        ):
            return f"{name} has no value from {least:g} to {most:g}, with its source"
    return ""


def _is_between(least: float, number: object, most: float) -> bool:
    return type(number) in (int, float) and least <= number <= most  # type: ignore[operator]


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

    Without ``device_memory``, a device has the memory that the table says. A CPU, which a file can describe,
    has no workspace.

    Raises:
        LabError: a device as of ``hardware``; a size that cannot be read, or ranks that are no count; a
            rate of no disk.
    """
    check_counts({"ranks_per_node": ranks_per_node})
    named = hardware(device)
    device_bytes = int(named.memory.value) if device_memory is None else parse_bytes(device_memory)
    host_bytes = None if host_memory is None else parse_bytes(host_memory)
    if disk_rate is not None and disk is None:
        raise LabError(f"disk_rate={disk_rate!r} without a disk: give its size too, such as disk=4TB")
    rate = None if disk_rate is None else parse_rate(disk_rate)
    given = None if disk is None else Disk(parse_disk(disk), rate)
    workspace = workspace and named.name != "CPU"
    return Machine(device, device_bytes, host_bytes, ranks_per_node, workspace, given)
