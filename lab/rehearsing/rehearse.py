"""Rehearse: the real step as one rank of N, its peers stood in for by the rank itself; bytes and seconds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from cluster.devices import FREE_SECONDS, check_driver, check_free
from cluster.limits import memory
from cluster.progress import hide_progress, progress
from cluster.progress import say as say_in_notebook
from lab import models
from lab.errors import LabError
from lab.memory.cuda import CudaAllocator, CudaMeter, History, limit_memory
from lab.memory.meter import Meter
from lab.memory.out_of_memory import OutOfMemory, unmetered_out_of_memory
from lab.memory.stopwatch import Stopwatch
from lab.models.lora import Lora
from lab.models.small_copies import first_layers
from lab.planning.cuda_workspace import nccl_workspace
from lab.planning.hardware import make_machine
from lab.planning.host_folder import check_host_dir
from lab.planning.plan import Plan, plan_job
from lab.recipe.jobs import Disk, Machine, TrainSettings
from lab.recipe.recipe import Recipe
from lab.rehearsing.rehearsal import Measured, Rehearsal, RehearsalOutOfMemory, RehearsalTooLarge
from lab.step.kernel_limits import check_kernel
from lab.step.loopback import bytes_sent
from lab.step.on_ranks import Training, check_finite, make_rank_state, make_training
from lab.step.one_rank import one_rank
from lab.step.training_step import NoMeter
from lab.techniques.attention.kernels import kernel_support
from lab.techniques.host_file import HostFolder
from lab.units import GiB, format_bytes, parse_bytes

DeviceType = Literal["cuda", "cpu"]
Say = Callable[[str], None]

PART = "random weights: a part of the layers is rehearsed"
MISSING = 2 * GiB
"""How much less a GPU may report than its name says: an H100 of 80 GiB has 79.19."""


@progress("rehearsing")
def rehearse(
    model: models.ModelLike = "tiny",
    recipe: str | Recipe = "upipe",
    *,
    tokens: int | str,
    ranks: int,
    rows: int = 1,
    accumulate: int = 1,
    lora: Lora | str | None = None,
    dtype: str | None = None,
    layers: int | None = None,
    steps: int = 1,
    text: str | Path | None = None,
    tokenizer: str | Path | None = None,
    device_memory: int | str | None = None,
    machine: DeviceType | None = None,
    device: str = "h100",
    ranks_per_node: int = 8,
    host_dir: str | Path | None = None,
    watch: Say | None = None,
    **knobs: Any,
) -> Rehearsal:
    """Train as one rank of ``ranks`` on this machine's GPU or, at a small size, on its CPU.

    One step is measured in bytes, then ``steps`` more in seconds. With ``steps=0`` the one that is measured
    is timed too: its seconds include the pinning of host memory, the first call of each kernel, and the
    meter. Where the recipe compiles, the step that compiles is not timed. ``layers`` takes the model's first
    layers alone: what is said of the whole model is then extrapolated. ``text`` and ``tokenizer`` are those
    of ``lab.run``. ``machine`` is where it runs, CUDA where there is any; ``device`` names the hardware of
    the plan and of the links. ``watch`` is told what goes on. ``knobs`` are set on a ladder's recipe by hand.
    Parameters are random unless the model is a directory with weights, in whole. ``accumulate``, ``lora`` and
    ``dtype`` are those of ``lab.plan``.

    ``host_dir`` is as in ``lab.run``: a folder for the long tensors of streamed layers. The plan then has the
    rates of one disk.

    ``device_memory`` stands for a smaller GPU, for all that it has: on CUDA the step gets what the context,
    the libraries and NCCL's buffers (by the workspace model, for no peer is there) leave of it. A GPU reports
    less than its name says, so up to 2 GiB more than it reports are the whole GPU.

    Raises:
        RehearsalOutOfMemory: it does not fit; the process can go on.
        RehearsalTooLarge: this machine's memory does not hold it, on CPU; nothing was made.
        LabError: a model, recipe, size or machine that cannot work, before anything is made.
        HostFileError: a folder in memory, or on a disk that is too small; a recipe that streams nothing.
        ClusterError: a GPU that torch cannot use, or that other processes fill.
        DivergedError: the loss is not finite.
    """
    hide_progress(watch)
    if type(steps) is not int or steps < 0:
        raise LabError(
            f"steps={steps!r}: it takes a whole number, 0 or more; with 0 the step under the meter is timed"
        )
    where, asked = machine_for(machine), None if device_memory is None else parse_bytes(device_memory)
    settings = TrainSettings(1 + steps, text, tokenizer)
    sizes: dict[str, Any] = {"tokens": tokens, "ranks": ranks, "rows": rows, "accumulate": accumulate}
    how: dict[str, Any] = {"lora": lora, "dtype": dtype, "weights": False}
    training = make_training(model, recipe, settings, **how, **sizes, **knobs)
    planned_for = make_machine(device=device, ranks_per_node=ranks_per_node, workspace=where == "cuda")
    folder, say = check_host_dir(training.job, host_dir), watch or say_in_notebook
    return rehearse_job(training, planned_for, where, layers=layers, asked=asked, host_path=folder, say=say)


def rehearse_job(
    training: Training,
    machine: Machine,
    where: DeviceType,
    *,
    layers: int | None,
    asked: int | None,
    host_path: Path | None,
    say: Say,
) -> Rehearsal:
    """Train as one rank, as ``rehearse`` does with what it has read and checked.

    Args:
        training: What is trained, and how.
        machine: What is planned for, with the memory that is asked for or that this machine has.
        where: Where it runs.
        layers: As that of ``rehearse``.
        asked: The bytes that the device is to have; None for as many as it has.
        host_path: The folder for the long tensors of streamed layers, see ``check_host_dir``.
        say: Is told what goes on.
    """
    job, config = training.job, training.config
    part = replace(job, model=first_layers(job.model, layers, config=config))
    uses_own = part.model is job.model or callable(job.model)
    weights = models.weights_note(job.model, job.dtype) if uses_own else PART
    check_kernel(job, config, where, lambda: kernel_support(torch.device(where)))
    limit, disk = _limit(where, asked), None if host_path is None else Disk()
    total = torch.cuda.get_device_properties(0).total_memory if where == "cuda" else machine.device_memory
    machine = replace(machine, device_memory=limit or total, disk=disk)
    say("planning")
    whole = plan_job(job, machine)
    planned = whole if part.model is job.model else plan_job(part, machine)
    if where == "cpu":
        _check_room(planned, limit)
    folder = None if host_path is None else HostFolder(host_path, planned.disk_peak)
    measured = _measured(training.settings, planned, where, limit, folder, say)
    # What a failure or FSDP leaves in reference cycles is to be free for the next rehearsal.
    gc.collect()
    if where == "cuda":
        torch.cuda.empty_cache()
    if isinstance(measured, OutOfMemory):
        raise RehearsalOutOfMemory(str(measured), measured.moment, planned)
    return Rehearsal(
        **vars(measured),
        layers=layers or config.num_hidden_layers,
        of_layers=config.num_hidden_layers,
        machine=torch.cuda.get_device_name() if where == "cuda" else "CPU",
        device_memory=limit,
        device_memory_asked=asked,
        plan=planned,
        whole=whole,
        weights=weights,
    )


class _SendingStopwatch(Stopwatch):
    """A stopwatch that also counts the bytes that a step sends.

    What ranks send to agree on a batch is not in them.
    """

    sent = 0

    @contextmanager
    def measure(self, *step: Any) -> Iterator[None]:
        before = bytes_sent()
        with super().measure(*step):
            yield
        self.sent = (bytes_sent() - before).total()


def _measured(
    settings: TrainSettings,
    planned: Plan,
    where: DeviceType,
    limit: int | None,
    host_folder: HostFolder | None,
    say: Say,
) -> Measured | OutOfMemory:
    """Train as the rank of the plan: the first step under the meter, all others by the clock alone.

    Out of memory is returned, for an exception that is raised holds the model by its frames.
    """
    meter = CudaMeter(CudaAllocator()) if where == "cuda" else Meter(limit=limit)
    metered, timed = _SendingStopwatch(meter), Stopwatch()
    try:
        with (
            _capped(where, limit, planned.ranks),
            one_rank(planned.recipe, planned.ranks, "loopback", where, ring_rank=planned.ring_rank) as mesh,
        ):
            say("making the model")
            state = make_rank_state(planned.job, settings, mesh, host_folder=host_folder)
            say("a step under the meter")
            loss = float(state.train_step(0, metered))
            check_finite(settings, 1, loss)
            if settings.steps > 1 and planned.recipe.compile != "none":
                # Nothing is compiled under the meter, so the next step compiles.
                say("a step that compiles")
                state.train_step(1, NoMeter())
            for step in range(1, settings.steps):
                say(f"step {step} of {settings.steps - 1} by the clock")
                state.train_step(step, timed)
            state.close()
    except OutOfMemory as error:
        return OutOfMemory(error.moment, error.limit, error.reason)
    except torch.OutOfMemoryError as error:
        return unmetered_out_of_memory(error, "setup")
    timeline = meter.timeline()
    steps = timed.seconds or metered.seconds
    seconds = {phase: median(step[phase] for step in steps) for phase in steps[0]}
    of_allocator: tuple[int | None, int | None, int | None, Mapping[str, int] | None] = (None,) * 4
    device_peak = timeline.device_peak
    if isinstance(meter, CudaMeter):
        history = meter.history
        device_peak = history.device_peak
        of_allocator = history.reserved_peak, history.retries, history.outside_torch, history.reserved
        beyond = _beyond(history, limit, planned.ranks)
        if beyond:
            return OutOfMemory(timeline.peak, None, beyond)
    return Measured(timeline, device_peak, *of_allocator, seconds, len(timed.seconds), loss, metered.sent)


# ---- where -----------------------------------------------------------------------------------------------


def machine_for(asked: str | None) -> DeviceType:
    """Return where to run: on CUDA where there is any, unless the other one is asked for.

    Raises:
        LabError: CUDA where there is none; no machine of this name.
        ClusterError: a GPU that torch cannot use, or that other processes fill.
    """
    if asked not in (None, "cuda", "cpu"):
        raise LabError(f"machine={asked!r}: it takes 'cuda', 'cpu', or None for the GPU where there is one")
    if asked == "cuda" and not torch.cuda.device_count():
        raise LabError("machine='cuda', and torch sees no GPU here: machine='cpu' rehearses a small size")
    if asked != "cpu":
        check_driver()
    if asked == "cpu" or not torch.cuda.is_available():
        return "cpu"
    check_free(FREE_SECONDS)
    return "cuda"


def _limit(where: DeviceType, asked: int | None) -> int | None:
    """The bytes that the device is taken to have; None: as many as it has.

    Raises:
        LabError: more than 2 GiB above what the GPU has.
    """
    if where == "cpu" or asked is None:
        return asked
    total = torch.cuda.get_device_properties(0).total_memory
    if asked > total + MISSING:
        raise LabError(
            f"device_memory={format_bytes(asked)}: the GPU has {format_bytes(total)}; give at most that, or "
            "leave it out"
        )
    return min(asked, total)


def _check_room(planned: Plan, limit: int | None) -> None:
    """Refuse what this machine's memory does not hold: it would be swapped, or the process be killed."""
    needed = min(planned.device_peak, limit or planned.device_peak) + planned.host_peak
    has = memory().available
    if needed > has:
        raise RehearsalTooLarge(
            f"{planned.title} on CPU takes {format_bytes(needed)}, and {format_bytes(has)} are available "
            "here: fewer tokens, more ranks or fewer layers take less"
        )


def _capped(where: DeviceType, limit: int | None, ranks: int) -> AbstractContextManager[None]:
    """A smaller GPU as one of ``ranks``; on CPU the meter keeps the limit."""
    return nullcontext() if where == "cpu" or limit is None else limit_memory(limit, nccl_workspace(ranks))


def _beyond(history: History, limit: int | None, ranks: int) -> str:
    """Why the step of one of ``ranks`` does not fit, though the allocator kept its cap; "" if it fits.

    Kernels that were loaded in the step lie outside torch too, and the cap was set before it.
    """
    outside = history.outside_torch + nccl_workspace(ranks)
    if limit is None or history.device_peak + outside <= limit:
        return ""
    return f"{format_bytes(outside)} outside torch, the limit is {format_bytes(limit)}"
