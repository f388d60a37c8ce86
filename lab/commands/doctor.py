"""The reports of ``lab doctor``: on this machine, and on a model.

That on a machine says what it has, what the lab would use of it, and what is missing.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cluster import limits
from cluster.capacity import people
from cluster.devices import check_driver, first_line
from cluster.errors import ClusterError
from cluster.profiles import PROFILES
from lab import models
from lab.bench.table import table_text
from lab.commands.gpu_findings import gpu_findings
from lab.decoder import FAMILIES
from lab.errors import LabError, ModelError
from lab.models.unread import left_out, wrapper_of
from lab.techniques.attention.kernels import FASTEST_FIRST, choose_kernel, kernel_support, missing_requirement
from lab.techniques.deepspeed import warm_operator
from lab.units import format_bytes, format_seconds

_PACKAGES = (
    "torch", "transformers", "deepspeed", "ipyparallel", "jupyterlab", "ipywidgets", "anywidget",
    "papermill", "matplotlib",
)  # fmt: skip
HEAD_DIM = 128
"""The head_dim of Llama, Mistral, Qwen2 and Qwen3 in most sizes."""

_OPTIONAL = {
    "flash-attn": ("flash-attn-2", "another attention kernel is used instead"),
    "flash-attn-4": ("gpu", "on a B200, B300 or GB200 another attention kernel is used instead"),
    "liger-kernel": ("gpu", "only loss_kernel='liger' needs it"),
}
"""The extra in which a package is, and what is without it."""


def report() -> str:
    """Return the report as text, one line for each finding."""
    return "\n".join(f"{subject:<14} {finding}" for subject, finding in _findings())


def warm_up(say: Callable[[str], None]) -> Iterator[str]:
    """Make what notebooks would make at its first use, and yield a line on each: DeepSpeed's operator, and
    matplotlib's list of fonts.

    Args:
        say: Shows what is made now.
    """

    def fonts() -> None:
        from lab.show import picture  # noqa: F401

    def operator() -> None:
        warm_operator(torch.device("cuda" if torch.cuda.device_count() else "cpu"))

    for subject, make in (("fonts", fonts), ("operator", operator)):
        say(f"making {subject}")
        began = time.perf_counter()
        try:
            make()
            yield f"{subject:<14} ready after {format_seconds(time.perf_counter() - began)}"
        except LabError as error:
            yield f"{subject:<14} {error}"


def model_report(model: models.ModelLike, dtype_name: str | None = None) -> str:
    """Return what a model does differently from Llama as text: its family, and a table.

    Raises:
        LabError: See ``lab.models.differences``. The message says why the model is refused.
    """
    config = models.config_of(model, dtype_name)
    found = models.differences(config)
    family, shape, wrapper = FAMILIES[config.model_type].name, models.shape_of(config), wrapper_of(model)
    family += f" ({left_out(wrapper)})" if wrapper else ""
    dtype = config.dtype or torch.float32
    assert isinstance(dtype, torch.dtype)
    name = f"{str(dtype).removeprefix('torch.')} ({models.dtype_source(model, dtype_name)})"
    state = (
        f"A weight has {4 * dtype.itemsize} bytes of state in training in {name}, which FSDP2 divides over "
        "the ranks."
    )
    try:
        weights = models.weights_note(model, dtype_name)
    except ModelError as error:
        weights = str(error)
    state = "\n".join(filter(None, (state, weights)))
    many = f"{len(found)} difference{'s' * (len(found) != 1)}" if found else "no difference"
    title = f"{family}, {shape.L} layers, {shape.weights:,} weights, {many} from Llama"
    if not found:
        return f"{title}: each technique computes it as it computes Llama\n{state}"
    columns = {"what this model does differently": 3, "for which techniques": 2, "what it costs": 6}
    table = Table(box=SIMPLE_HEAD, expand=True)
    for name, share in columns.items():
        table.add_column(name, ratio=share)
    for difference in found:
        table.add_row(difference.what, difference.techniques, difference.cost)
    return f"{title}\n{table_text(table)}\nOther bytes are those of bf16. {state}"


def _findings() -> Iterator[tuple[str, str]]:
    memory = limits.memory()
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "cores", f"{limits.cores()}"
    yield "memory", f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available"
    many = {ranks: people(ranks) for ranks in (2, 4, 8)}
    rooms = (f"{count} with {ranks} ranks ({format_bytes(each)})" for ranks, (count, each) in many.items())
    yield "participants", f"{', '.join(rooms)}: each with JupyterLab, a kernel, and ranks on the CPU"
    gpus = torch.cuda.device_count()
    refusal = _driver_error()
    if refusal is not None:
        yield "gpu", refusal
        gpus = 0
    for index in range(gpus):
        yield f"gpu {index}", _gpu(index)
    yield from gpu_findings(gpus) if gpus else ()
    if not gpus and refusal is None:
        yield "gpu", "none: ranks run on the CPU"
    yield "ranks", "one a GPU, joined by nccl" if gpus else "CPU processes, joined by gloo"
    yield from _attention(torch.device("cuda" if gpus else "cpu"))
    for package in _PACKAGES:
        yield package, _version(package) or "MISSING: pip install longcontext-lab"
    for package, (extra, instead) in _OPTIONAL.items():
        yield (
            package,
            _version(package) or f"not installed (optional, for GPUs: the extra {extra}): {instead}",
        )
    for profile in PROFILES.values():
        if profile.program:
            path = shutil.which(profile.program)
            yield f"profile {profile.name}", path or f"not installed (optional): Debian's {profile.package}"
    if _version("jupyterlab"):
        from lab.jupyter.security import find_exposures

        yield from (("OPEN", exposure) for exposure in find_exposures())
    # This is so on every machine: the lab cannot see whether another user is one to trust.
    yield (
        "shared machine",
        "others can connect to the sockets of gloo and NCCL, which are neither authenticated nor encrypted; "
        "cluster/README.md says what to do",
    )
    compiler = shutil.which("c++") or shutil.which("g++")
    yield "compiler", compiler or "MISSING: DeepSpeed's Ulysses compiles its communication operator with one"


def _gpu(index: int) -> str:
    """Return the name and memory of a GPU, or CUDA's error if the GPU is full or in exclusive use."""
    try:
        name = torch.cuda.get_device_properties(index).name
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return f"cannot be used: {first_line(error)}; nvidia-smi lists the processes that use it"
    return f"{name}, {format_bytes(total)}, {format_bytes(free)} free"


def _driver_error() -> str | None:
    """Return why torch cannot use the GPUs of this machine; None if it can, or if there are none."""
    try:
        check_driver()
    except ClusterError as error:
        return str(error)
    return None


def _attention(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the kernel that "auto" chooses here for ``HEAD_DIM``, and what each kernel lacks."""
    try:
        machine = kernel_support(device)
    except RuntimeError as error:
        yield "attention", f"the fastest kernel is not known: {first_line(error)}"
        return
    yield "attention", f"kernel={choose_kernel('auto', machine, HEAD_DIM)!r} is the fastest here"
    for name in FASTEST_FIRST:
        yield f"  {name}", missing_requirement(name, machine, HEAD_DIM) or "there"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
