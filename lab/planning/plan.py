"""Plan: the training step on fake tensors, as one rank of N; bytes, operations, seconds, what stops it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from cluster.progress import progress, say
from lab import models
from lab.errors import LabError
from lab.memory.holders import Holders, Memory
from lab.memory.moment import Moment
from lab.memory.timeline import Timeline
from lab.models.lora import Lora
from lab.planning.allocator import count_retries, reserved_bytes
from lab.planning.answers import Answer, Facts, answer, known_answer, shape_of
from lab.planning.bill import Bill, Order, make_bill
from lab.planning.costs import HOST_MEMORY, HOST_MEMORY_SHARE, Costs
from lab.planning.cuda_workspace import matrix_products_note, outside_workspace
from lab.planning.hardware import Hardware, hardware, make_machine
from lab.planning.model_flops import model_flops
from lab.recipe.jobs import MAX_STEP, MAX_TOKENS, Documents, Job, Limit, Machine, make_job, memory_name
from lab.recipe.ladder import ladder
from lab.recipe.recipe import BY_NAME, Recipe, torch_refusal
from lab.shape import WIDTHS, Shape
from lab.techniques.limits import flash_takes
from lab.units import (
    LARGEST,
    format_bytes,
    format_lines,
    format_seconds,
    format_share,
    parse_tokens,
    round_tokens,
)

Fit = Literal["fits", "fits with expandable segments", "does not fit"]
"""How a step fits a machine; see ``Plan.fit``."""

POSITION = 8
"""The bytes of the position of a token."""


@dataclass(frozen=True, eq=False)
class Plan:
    """One training step, planned: the bytes of a rank that holds the most.

    Attributes:
        job: What is planned.
        machine: The hardware that it is planned for.
        shape: The sizes of the job's model.
        state: The dtype of the parameters, of their gradients and of the optimizer state, and where it comes
            from, as text.
        ring_rank: The plan is that of the first rank of this ring rank.
        timeline: The bytes of the step.
        start: The highest moment before the first step.
        host_of_others: The most host bytes that another planned ring rank holds at once: with the optimizer
            on the host, one with a larger shard holds more of its state. 0 if there is no other.
        costs: The step's operations, bytes on links and seconds.
        hardware: The device, with the rates of the attention kernel of these seconds.
        kernel_seconds: With ``kernel="auto"``, the seconds of the step with each other kernel whose rates on
            the device are known, and which takes the dtype and the D of the model; by name.
        notes: Sentences on what the plan does not count, or what a GPU would refuse.
        lengths: The lengths whose plans give this one exactly; empty where its own step was planned.
        planning_seconds: The seconds that it took to make the plan.
    """

    job: Job
    machine: Machine
    shape: Shape
    state: str
    ring_rank: int
    timeline: Timeline
    start: Moment
    host_of_others: int
    costs: Costs
    hardware: Hardware
    kernel_seconds: dict[str, float]
    notes: tuple[str, ...]
    lengths: tuple[int, ...]
    planning_seconds: float

    def __repr__(self) -> str:
        return format_lines(f"Plan of {self.title}", self.description)

    @property
    def description(self) -> dict[str, str]:
        """What a terminal and a notebook show: texts by label."""
        on_device = format_share(self.device_peak, self.machine.device_memory)

        def of_node(memory: Limit, peak: int) -> str:
            needed = self.needed(memory)
            share = format_share(needed, self.available(memory))
            return f"{format_bytes(peak)} per rank, {format_bytes(needed)} per node{share}" if peak else ""

        return {
            "weights": self.shape.weights_text if self.shape.experts else "",
            "recipe": self.recipe.summary,
            "state": self.state,
            "device peak": f"{format_bytes(self.device_peak)} per rank{on_device}",
            "reserved": self.reserved_text,
            "at the peak": str(self.peak),
            "host peak": of_node("host", self.host_peak),
            "disk peak": of_node("disk", self.disk_peak),
            "step": f"{self.seconds_text} on {self.device} (estimate)",
            "note": "; ".join(self.notes),
            "verdict": self.verdict,
        }

    @property
    def title(self) -> str:
        """One line that names the step."""
        return self.job.title

    @property
    def summary(self) -> str:
        """One line with its tokens, its device peak, and whether it fits."""
        peak = f"{format_bytes(self.device_peak)} per device"
        return f"{round_tokens(self.tokens)} tokens, {peak}: {self._fit_text}"

    @property
    def verdict(self) -> str:
        """Whether it fits (see ``fit``), in words, and what is left of the host memory that was given.

        Where the tensors alone would fit a device, it also says what CUDA's allocator would do when it is
        full.
        """
        given, left = self.machine.host_memory, self.available("host")
        host = ""
        if given is not None and left is not None and self.host_peak:
            host = (
                f" ({format_bytes(given)} of host memory, of which the system and the processes leave "
                f"{format_bytes(left)})"
            )
        full = ""
        if self.limit == "device" and self.tensors_fit:
            fails = "; with expandable segments the allocator runs out of memory"
            retries = f"; retries of the allocator with expandable segments: {self.alloc_retries}"
            full = fails if self.alloc_retries is None else retries
        return f"{self._fit_text}{host}{full}"

    @property
    def _fit_text(self) -> str:
        if self.limit is None:
            return self.fit or "no memory was given"
        alone = ", though its tensors alone would" if self.limit == "device" and self.tensors_fit else ""
        return f"does not fit: {memory_name(self.limit)}{alone}"

    @property
    def recipe(self) -> Recipe:
        """The job's recipe."""
        return self.job.recipe

    @property
    def tokens(self) -> int:
        """The tokens of a row."""
        return self.job.tokens

    @property
    def ranks(self) -> int:
        """The ranks of the process group."""
        return self.job.ranks

    @property
    def device(self) -> str:
        """The name of the machine's device."""
        return self.hardware.name

    @property
    def device_peak(self) -> int:
        """The most device bytes the rank holds at once, in the step or at the start."""
        return max(self.timeline.device_peak, self.start.device)

    def reserved_peak(self, *, expandable: bool = True) -> int | None:
        """Return the most device bytes that CUDA's allocator reserves and others take, in the step.

        None without ``workspace``: the bytes are then not those of a GPU. See ``lab/planning/allocator.py``.

        Args:
            expandable: Whether segments are expandable (``expandable_segments:True``).
        """
        if not self.machine.workspace:
            return None
        reserved = reserved_bytes(self.timeline, self.ranks, expandable=expandable)
        return max(reserved, self.start.device)

    @property
    def reserved_text(self) -> str:
        """What is reserved, in words; empty without ``workspace``."""
        expandable, fixed = self.reserved_peak(), self.reserved_peak(expandable=False)
        if expandable is None or fixed is None:
            return ""
        return (
            f"{format_bytes(expandable)} per rank with expandable segments, {format_bytes(fixed)} with fixed "
            f"ones ({format_bytes(outside_workspace(self.ranks))} of it assumed: CUDA's context and NCCL)"
        )

    @cached_property
    def alloc_retries(self) -> int | None:
        """How many times the allocator releases its cache and asks the device again, in expandable segments.

        None if it runs out of memory, if the tensors alone do not fit, and where no allocator is simulated:
        without ``workspace`` or without device memory.
        """
        memory = self.machine.device_memory
        if memory is None or not self.machine.workspace or not self.tensors_fit:
            return None
        if self.device_need <= memory:
            return 0
        return count_retries(self.timeline, self.ranks, memory, expandable=True)

    @cached_property
    def device_need(self) -> int:
        """The device bytes with which the step runs without a retry of the allocator.

        They are what CUDA's allocator reserves in expandable segments, which the lab sets, and what others
        take. Without ``workspace``, or where the tensors alone are too many, they are the device peak.
        """
        if self.machine.device_memory is None or not self.tensors_fit:
            return self.device_peak
        return self.reserved_peak() or self.device_peak

    @property
    def tensors_fit(self) -> bool:
        """Whether the device holds the tensors of the step, where what the allocator keeps is not counted."""
        memory = self.machine.device_memory
        return memory is None or self.device_peak <= memory

    @property
    def host_peak(self) -> int:
        """The most host bytes that a rank holds at once."""
        return max(self.timeline.host_peak, self.host_of_others)

    @property
    def host_peak_per_node(self) -> int:
        """The same of all ranks of a node."""
        return self.host_peak * self.machine.node_ranks(self.ranks)

    @property
    def disk_peak(self) -> int:
        """The most bytes the rank holds at once on the machine's disk."""
        return self.timeline.disk_peak

    @property
    def disk_peak_per_node(self) -> int:
        """The same of all ranks of a node."""
        return self.disk_peak * self.machine.node_ranks(self.ranks)

    @property
    def peak(self) -> Moment:
        """The instant of the device peak: its op names what to do next; of phase "start" if it is there."""
        return self.start if self.start.device > self.timeline.device_peak else self.timeline.peak

    def holders(self, at: float | str = "peak", *, memory: Memory = "device") -> Holders:
        """Return every tensor of the step that is held at an instant, and the knob that would shrink it.

        Args:
            at: Seconds; or ``"peak"``, where this memory holds the most in the step; or a phase's end. The
                start of the training has no tensors here: ``start`` has its bytes.
            memory: Which memory: the device's, the host's or the disk's.

        Raises:
            ResultError: There is no such instant or memory.
        """
        from lab.planning.shrinking import with_job

        return with_job(self.timeline.holders(at, memory=memory), self.timeline, self.job)

    @property
    def limit(self) -> Limit | None:
        """Which memory refuses it; None where it fits what was given."""
        return self.machine.limit(
            self.ranks, device=self.device_need, host=self.host_peak, disk=self.disk_peak
        )

    def available(self, memory: Limit) -> int | None:
        """Return the bytes that the step may take of a memory; see ``Machine.available``."""
        return self.machine.available(memory, self.ranks)

    def needed(self, memory: Limit) -> int:
        """Return the bytes that the step needs of a memory: of a device, or of a node's host or disk."""
        if memory == "device":
            return self.device_need
        return self.host_peak_per_node if memory == "host" else self.disk_peak_per_node

    @property
    def fits(self) -> bool | None:
        """Whether it fits the memory that was given; None where none was."""
        if all(self.available(memory) is None for memory in get_args(Limit)):
            return None
        return self.limit is None

    @property
    def fit(self) -> Fit | None:
        """How it fits the memory that was given; None where none was.

        It "fits with expandable segments" where the device holds what CUDA's allocator reserves in these. It
        "fits" where the device also holds what is reserved by default, in segments of fixed sizes.
        """
        if self.fits is None:
            return None
        if self.limit is not None:
            return "does not fit"
        memory, fixed = self.machine.device_memory, self.reserved_peak(expandable=False)
        is_over = memory is not None and fixed is not None and fixed > memory
        return "fits with expandable segments" if is_over else "fits"

    @property
    def step_seconds(self) -> float:
        """The estimate of a step's time; see ``lab/planning/costs.py`` for what it leaves out."""
        return self.costs.seconds

    @property
    def seconds_text(self) -> str:
        """The step's seconds with its kernel of attention, and with others."""
        by_kernel = {self.hardware.kernel: self.step_seconds, **self.kernel_seconds}
        return ", ".join(f"{format_seconds(seconds)} with {kernel}" for kernel, seconds in by_kernel.items())

    @property
    def model_flops(self) -> int:
        """The operations that the model needs for the step, on all ranks; see ``model_flops.py``."""
        return model_flops(self.shape, self.job)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's operations, of what the GPUs would compute at their peak.

        It is an estimate, as the seconds are.
        """
        peak = self.hardware.matmul.value
        return self.model_flops / (self.step_seconds * self.ranks * peak)

    def bill(self, order: Order) -> Bill:
        """Return the time and the money that an order takes with this step; an estimate.

        Raises:
            LabError: The order has fewer tokens than the step.
        """
        return make_bill(order, self.job, self.machine, self.step_seconds)

    @property
    def longest_layer(self) -> float:
        """Seconds of the layer that takes the longest, in forward or backward; 0.0 where no layer is seen.

        In backward it is with the forward that is computed again. Where copies between device and host take
        longer than computation, a layer takes longer as the step does.
        """
        timeline = self.timeline
        layer = np.array([_layer(name) for name in timeline.modules])[timeline.module]
        edges = np.flatnonzero((np.diff(layer) != 0) | (np.diff(timeline.phase) != 0)) + 1
        starts, ends = np.append(0, edges), np.append(edges, len(timeline) - 1)
        inside = layer[starts] >= 0
        spans = timeline.seconds[ends[inside]] - timeline.seconds[starts[inside]]
        return float(spans.max(initial=0.0)) * self.costs.seconds / self.costs.device_seconds

    def to_json(self) -> dict[str, Any]:
        """The plan's answers as plain values, without the timeline."""
        peak = self.peak
        return {
            "recipe": self.recipe.to_json(),
            "state": self.state,
            "tokens": self.tokens,
            "documents": self.job.documents,
            "ranks": self.ranks,
            "weights": self.shape.weights,
            "active_weights": self.shape.active_weights,
            "device_peak": self.device_peak,
            "start_peak": self.start.device,
            "reserved_peak": self.reserved_peak(),
            "reserved_peak_fixed_segments": self.reserved_peak(expandable=False),
            "alloc_retries": self.alloc_retries,
            "host_peak": self.host_peak,
            "host_peak_per_node": self.host_peak_per_node,
            "disk_peak": self.disk_peak,
            "disk_peak_per_node": self.disk_peak_per_node,
            "fits": self.fits,
            "verdict": self.fit,
            "limit": self.limit,
            "peak": {"op": peak.op, "shapes": peak.shapes, "module": peak.module, "phase": peak.phase},
            "by_category": peak.by_category,
            "flops": self.costs.flops,
            "link_bytes": self.costs.link_bytes,
            "link_seconds": self.costs.link_seconds,
            "host_bytes": self.costs.host_bytes,
            "disk_seconds": self.costs.disk_seconds,
            "step_seconds": self.step_seconds,
            "kernel": self.hardware.kernel,
            "kernel_seconds": self.kernel_seconds,
            "model_flops": self.model_flops,
            "mfu": self.mfu,
            "notes": list(self.notes),
            "planning_seconds": self.planning_seconds,
        }


@progress("planning")
def plan(
    model: models.ModelLike,
    recipe: str | Recipe = "upipe",
    *,
    tokens: int | str,
    ranks: int,
    layers: int | None = None,
    rows: int = 1,
    accumulate: int = 1,
    lora: Lora | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ranks_per_node: int = 8,
    device: str = "h100",
    workspace: bool = True,
    disk: int | str | None = None,
    disk_rate: int | str | None = None,
    documents: Documents = None,
    dtype: str | None = None,
    **knobs: Any,
) -> Plan:
    """Plan one training step of ``rows`` rows of ``tokens`` tokens on ``ranks`` ranks; nothing is allocated.

    ``workspace`` adds what CUDA takes outside torch's view (``lab/planning/cuda_workspace.py``); off, the
    bytes are those that CPU ranks measure. ``device`` names the hardware: it has the rates of the time
    estimate, and the device memory if ``device_memory`` is not given. ``host_memory`` is that of a node; what
    the system and the processes take of it is left to them (``lab.techniques.host_memory.reserve``). With
    ``disk``, bytes of a node such as "4TB", the long tensors of streamed layers are on it and not in host
    memory; ``disk_rate`` is its rate, such as "3GB/s", in place of that of the hardware table. ``knobs`` are
    set on a ladder's recipe by hand.

    ``layers`` takes the model's first layers alone, with the recipe that the whole model has; this is what
    ``lab.rehearse`` plans for them.

    The step has ``accumulate`` micro-batches of so many rows each, whose gradients are summed. In the
    timeline of many, the third stands for all but the two first and the last (``planning/micro_batches.py``).

    With ``lora``, such as "r=16", PEFT's adapters are trained, and all parameters of the model are frozen:
    they have no gradients and no optimizer state. See ``lab.models.Lora``.

    With ``documents``, such as "1M,512K,512K", each row has several documents of these lengths, which add up
    to ``tokens``: attention to other documents is neither computed nor counted. See ``lab.shard_batch``.

    With ``dtype``, such as "bfloat16", the parameters have this dtype, and with them their gradients and the
    optimizer state; without, that of the config, and fp32 if it has none. A config that says that its weights
    are quantized, in a directory without weights, is planned as if they were dequantized to ``dtype``.

    Raises:
        LabError: a model, recipe, size, dtype, device, adapters or documents that cannot work.
    """
    machine = make_machine(
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        ranks_per_node=ranks_per_node,
        workspace=workspace,
        disk=disk,
        disk_rate=disk_rate,
    )
    job = make_job(
        model,
        recipe,
        tokens=tokens,
        ranks=ranks,
        rows=rows,
        accumulate=accumulate,
        lora=lora,
        documents=documents,
        dtype=dtype,
        shape=shape_of(model, dtype),
        **knobs,
    )
    if layers is None:
        return plan_job(job, machine)
    # Its import is that of transformers, which a known answer does not need.
    from lab.models.small_copies import first_layers

    config = models.config_of(model, dtype)
    part = plan_job(replace(job, model=first_layers(model, layers, config=config)), machine)
    note = f"the first {layers} of {config.num_hidden_layers} layers of {job.title}"
    return replace(part, notes=(note, *part.notes))


def plan_job(job: Job, machine: Machine) -> Plan:
    """Plan a job whose recipe has been checked.

    Raises:
        LabError: a model that cannot be made; no such device; more tokens of a rank than can be planned.
    """
    began = time.perf_counter()
    if job.tokens > (most := most_tokens(job)):
        raise LabError(
            f"tokens={job.tokens}, rows={job.rows}: a plan needs a matrix of all pairs of the tokens that a "
            f"rank holds of a row, of more bytes than torch can count; up to {most} tokens work with these "
            "rows and ranks"
        )
    return _plan_of(answer(job, workspace=machine.workspace), job, machine, began)


def known_plan(job: Job, machine: Machine) -> Plan | None:
    """Return the plan of a job where its step is known without running its code.

    Returns None where it is not known, and where ``plan_job`` refuses the job.
    """
    began = time.perf_counter()
    found = known_answer(job, workspace=machine.workspace) if job.tokens <= most_tokens(job) else None
    return None if found is None else _plan_of(found, job, machine, began)


def _plan_of(found: Answer, job: Job, machine: Machine, began: float) -> Plan:
    facts, named, kernel = found.facts, hardware(machine.device), job.recipe.kernel
    # The tokens of a call; tiles of attention and shorter documents are left out.
    length = max(job.longest_document // job.recipe.ring, 1)
    device = named.with_kernel(kernel, length)
    steps = [step.priced(device, machine, job.ranks) for step in found.steps]
    if machine.disk is not None:
        steps = [(timeline.with_tiles_on_disk(), costs) for timeline, costs in steps]
    # Of equal ones, the first.
    fullest = max(range(len(steps)), key=lambda number: steps[number][0].device_peak)
    timeline, costs = steps.pop(fullest)
    host_of_others = max((other.host_peak for other, _ in steps), default=0)
    pageable = _pageable_share(job, machine, facts, max(timeline.host_peak, host_of_others))

    def with_host(costs: Costs) -> Costs:
        if machine.disk is not None:
            costs = costs.with_disk(named, machine.disk.rate, machine.node_ranks(job.ranks))
        return costs.with_pageable(named, pageable)

    def seconds_with(other: str) -> float:
        rates = named.with_kernel(other, length)
        return with_host(found.steps[fullest].priced(rates, machine, job.ranks)[1]).seconds

    width, head_dim = WIDTHS[facts.attention_dtype], facts.shape.D
    others = [
        name
        for name in named.kernels
        if kernel == "auto" and name != device.kernel and flash_takes(width, head_dim, name)
    ]
    return Plan(
        job=job,
        machine=machine,
        shape=facts.shape,
        state=facts.state,
        ring_rank=facts.ring_ranks[fullest],
        timeline=timeline,
        start=facts.start,
        host_of_others=host_of_others,
        costs=with_host(costs),
        hardware=device,
        kernel_seconds={name: seconds_with(name) for name in others},
        notes=(*_rate_notes(job, device), *(_notes(job, facts) if machine.workspace else ())),
        lengths=found.lengths,
        planning_seconds=time.perf_counter() - began,
    )


def most_tokens(job: Job) -> int:
    """Return the most tokens of a row that the lab plans with a job's rows, micro-batches and ranks.

    They are at most ``MAX_TOKENS``, and ``MAX_STEP`` in all rows of a step. transformers sums over the
    positions of each row. Of fake tensors, torch sums by a matrix of pairs, which takes no memory, and whose
    bytes torch has to count.
    """
    ranks = job.recipe.ulysses * job.recipe.ring
    rows = -(-job.rows * ranks // job.ranks)
    pairs = math.isqrt(LARGEST // POSITION // rows) * ranks
    return min(MAX_TOKENS, MAX_STEP // (job.rows * job.accumulate), pairs)


@progress("planning the ladder")
def plan_ladder(
    model: models.ModelLike,
    *,
    tokens: int | str,
    ranks: int,
    watch: Callable[[str, Plan], None] | None = None,
    **settings: Any,
) -> dict[str, Plan]:
    """Plan every rung of the ladder, by name; ``settings`` are those of ``plan``, knobs as in ``ladder``.

    Raises:
        LabError: as ``plan``, and as ``lab.ladder``.
    """
    length, dtype = parse_tokens(tokens), settings.pop("dtype", None)
    asked = {name: settings.pop(name) for name in ("rows", "accumulate", "lora") if name in settings}
    knobs = {name: settings.pop(name) for name in BY_NAME if name in settings}
    machine, shape = make_machine(**settings), shape_of(model, dtype)
    plans = {}
    for rung, recipe in ladder(model, ranks, length, shape=shape, **knobs).items():
        job = make_job(model, recipe, tokens=length, ranks=ranks, dtype=dtype, shape=shape, **asked)
        say(f"planning the ladder: {rung}")
        plans[rung] = plan_job(replace(job, recipe_name=rung), machine)
        if watch is not None:
            watch(rung, plans[rung])
    return plans


def _pageable_share(job: Job, machine: Machine, facts: Facts, host_peak: int) -> float:
    """The share of what a rank copies to the host that may not be pinned.

    Adam's state on the host is neither copied nor pinned.
    """
    pinnable, on_host = machine.pinnable(job.ranks), job.recipe.optimizer == "host"
    copied = host_peak - (facts.adam if on_host else 0)
    return 0.0 if pinnable is None or copied <= pinnable else 1 - pinnable / copied


def _rate_notes(job: Job, device: Hardware) -> Iterator[str]:
    if job.recipe.kernel not in ("auto", device.kernel):
        unknown = f"no rate of {job.recipe.kernel} on {device.name} is known"
        yield f"{unknown}: the seconds are with {device.kernel}"


def _notes(job: Job, facts: Facts) -> Iterator[str]:
    """What is to be known before this job runs on a GPU."""
    if job.recipe.optimizer == "host":
        rate = HOST_MEMORY.value * HOST_MEMORY_SHARE.value / 1e9
        yield f"clipping and Adam on the host are estimated at {rate:.0f} GB/s per node, which is assumed"
    recipe, shape, dtype = job.recipe, facts.shape, facts.attention_dtype
    if not flash_takes(WIDTHS[dtype], shape.D):
        yield matrix_products_note(dtype, shape.D)
        return
    yield f"the workspace of attention is that of torch's kernel; kernel={recipe.kernel!r} may take another"
    if recipe.kernel in ("auto", "torch"):
        refusal = torch_refusal(recipe, shape, job.tokens, job.longest_document)
        if refusal is not None:
            yield refusal


def _layer(path: str) -> int:
    """The number of the layer that a module is or lies in; -1 outside of all."""
    match = re.match(r"model\.layers\.(\d+)", path)
    return int(match[1]) if match else -1
