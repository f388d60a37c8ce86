"""``lab bench gpu``: measures items on a GPU, the most valuable first, and skips those in its files."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal

import torch

from cluster.errors import ClusterError
from cluster.watchdog import watched
from lab.bench.lines import Note, append_lines, read_lines
from lab.bench.table import Say
from lab.errors import LabError
from lab.units import Ki, Mi, format_tokens

if TYPE_CHECKING:
    from lab.rehearsing.rehearse import DeviceType

Kind = Literal["attention", "copies", "compile", "gradients", "rehearse"]

PATIENCE = 3
"""An item is ended when it takes so many times its expected seconds."""

LEAST_SECONDS = 120.0
"""No item is ended earlier, unless the time is over: the import of torch from a slow disk takes so long."""

TRIES = 2
"""How often an item that was ended is tried in all: other work may have slowed the machine."""

START_SECONDS = 20
"""The seconds of a rehearsal before its steps, to import torch and to plan."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Torch reads its allocator's settings from the first, and from the second where the first is not set."""

SMALL_SECONDS = 30.0
"""The expected seconds of an item at the size of ``tiny``, on two busy cores."""


@dataclass(frozen=True)
class Item:
    """Something to measure in a process of its own.

    Attributes:
        kind: What to measure: an attention kernel, copies, torch.compile, gradients, or a rehearsal as one
            rank of 8.
        seconds: The expected seconds of the process on an H100.
        model: The model.
        tokens: The context.
        layers: How many of the first layers to take; None for all.
        recipe: The recipe of a rehearsal.
        knobs: The fields set on the recipe; the kernel and the heads of an attention; the size of copies.
        steps: The timed steps of a rehearsal, after one under the meter; with 0 that one is timed, and its
            seconds include the pinning of host memory, the first call of each kernel, and the meter. For an
            attention, its repeats.
        expandable: Whether the segments of CUDA's allocator can grow.
    """

    kind: Kind
    seconds: float
    model: str = "llama3-8b"
    tokens: int = 0
    layers: int | None = None
    recipe: str = ""
    knobs: tuple[tuple[str, Any], ...] = ()
    steps: int = 1
    expandable: bool = True

    @property
    def name(self) -> str:
        """A name that no other item has, also in the files of results."""
        model = self.model if self.kind in ("gradients", "rehearse") else ""
        layers = f"layers={self.layers}" if self.layers else ""
        tokens = format_tokens(self.tokens) if self.tokens else ""
        knobs = (f"{name}={value}" for name, value in self.knobs)
        segments = "" if self.expandable else "fixed-segments"
        words = (self.kind, model, tokens, self.recipe, layers, *knobs, segments)
        return " ".join(word for word in words if word)

    def small(self) -> Item:
        """Return the same item at a size for a CPU: with ``tiny``, and with torch's kernel."""
        for_cpu = {"kernel": "torch", "gib": 1 / 64}
        return replace(
            self,
            seconds=SMALL_SECONDS,
            model="tiny",
            tokens=max(256, self.tokens // (2 * Ki)),
            layers=self.layers and min(self.layers, 2),
            knobs=tuple((name, for_cpu.get(name, value)) for name, value in self.knobs),
        )


def _attention(seconds: float, kernel: str, heads: int, kv_heads: int, tokens: int, repeats: int) -> Item:
    knobs = (("kernel", kernel), ("heads", heads), ("kv_heads", kv_heads))
    return Item("attention", seconds, tokens=tokens, knobs=knobs, steps=repeats)


def _rehearse(seconds: float, tokens: int, layers: int | None, recipe: str, **more: Any) -> Item:
    settings = {name: more.pop(name) for name in ("model", "steps", "expandable") if name in more}
    return Item(
        "rehearse",
        seconds + START_SECONDS,
        tokens=tokens,
        layers=layers,
        recipe=recipe,
        knobs=tuple(more.items()),
        **settings,
    )


ITEMS = (
    # Copies between device and host, the kernels, and a check that no technique changes a gradient.
    Item("copies", 20, knobs=(("gib", 4),)),
    _attention(15, "cudnn", 4, 1, 64 * Ki, 5),
    _attention(15, "torch", 4, 1, 64 * Ki, 5),
    Item("gradients", 60, tokens=64 * Ki, layers=3),
    # Planned over measured for every rung; UPipe over Ulysses, and streamed and fast over upipe, in seconds.
    *(_rehearse(15, 16 * Ki, 2, rung) for rung in ("plain", "fsdp")),
    *(
        _rehearse(20, 128 * Ki, 2, rung)
        for rung in ("ulysses", "checkpoint", "offload", "tiling", "upipe", "streamed", "long", "fast")
    ),
    *(_rehearse(60, Mi, 2, rung) for rung in ("tiling", "upipe", "streamed", "fast")),
    _rehearse(70, Mi, 2, "upipe", kernel="torch"),
    _rehearse(60, Mi, 2, "upipe", overlap=True),
    # Operations a second by kernel, and kernels past 2^31 elements.
    *(
        _attention(seconds, kernel, 4, 1, tokens, 5)
        for tokens, seconds in ((256 * Ki, 25), (Mi, 70))
        for kernel in ("cudnn", "torch")
    ),
    _attention(80, "cudnn", 1, 1, 5 * Mi, 0),
    _attention(60, "cudnn", 32, 8, 640 * Ki, 0),
    _attention(60, "torch", 32, 8, 640 * Ki, 0),
    _attention(80, "torch", 1, 1, 5 * Mi, 0),
    # 5M tokens at full width, as one rank of 8.
    _rehearse(260, 5 * Mi, 1, "upipe", steps=0),
    _rehearse(270, 5 * Mi, 1, "streamed", steps=0),
    _rehearse(220, 5 * Mi, 1, "fast", steps=0),
    _rehearse(260, 5 * Mi, 1, "tiling", steps=0),
    # All layers: is what two of them are extrapolated to right? And what compiling is worth.
    _rehearse(210, 512 * Ki, None, "upipe"),
    _rehearse(90, 256 * Ki, None, "upipe"),
    _rehearse(80, 256 * Ki, None, "fast"),
    _rehearse(120, 256 * Ki, None, "upipe", compile="tiles"),
    Item("compile", 60),
    # An allocator whose segments cannot grow; a family with QK-norm.
    _rehearse(60, 2 * Mi, 1, "tiling", steps=0, expandable=False),
    _rehearse(60, 2 * Mi, 1, "upipe", steps=0, expandable=False),
    _rehearse(60, Mi, 2, "upipe", model="qwen3-8b", steps=0),
)
"""All items, the most valuable first. Their seconds were estimated before any of them ran."""


def measure_gpu(
    out: Path,
    minutes: float,
    say: Say,
    note: Note,
    *,
    machine: str | None = None,
    items: Sequence[Item] = ITEMS,
) -> Iterator[dict[str, Any]]:
    """Measure the items that the files in ``out`` do not have for this machine and this version of torch.

    A row is appended to gpu.jsonl, or to cpu.jsonl, and yielded when it is on the disk. It has the name of
    the item, the machine, the versions, the recipe and the figures; or the error of the item in "failed".

    An item that failed is measured again when its line is removed from the file, with two exceptions. An item
    that was ended because it took too long is tried once more. An item for which the GPU could not be used,
    because another process fills it, gets no row and is reported to ``note``.

    An item does not start if it is expected to take longer than the time left. An item that runs when the
    time is over is ended and gets no row.

    Args:
        out: The folder of the files.
        minutes: The time for all items.
        say: Shows what is measured now.
        note: Reports incomplete lines of the files, and at the end the items that are missing.
        machine: "cuda", or "cpu" to measure the same items at the size of ``tiny``; None for a GPU.
        items: The items.

    Raises:
        LabError: ``minutes`` is not a positive number; there is no GPU, or it cannot be used; or ``out``
            cannot be written, is written by another process, or is the folder for figures of GPUs only.
    """
    if not (minutes > 0 and math.isfinite(minutes)):
        raise LabError(f"minutes={minutes:g}: it takes a number above 0, for instance 25")
    deadline = time.monotonic() + 60 * minutes
    where, name = _find_machine(machine)
    if machine is None and where == "cpu":
        raise LabError("torch sees no GPU here: --machine cpu runs the same list at the size of tiny")
    if where == "cpu" and out.absolute().parts[-2:] == ("notebooks", "results"):
        raise LabError(f"{out} is for what GPUs measured: give another folder for a CPU's figures")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"{out} cannot be made: {error.strerror}") from error
    with append_lines(out / f"{'gpu' if where == 'cuda' else 'cpu'}.jsonl", note) as append:
        rows = [row for file in sorted(out.glob("*.jsonl")) for row in read_lines(file, note)]
        own = [row for row in rows if row.get("machine") == name and row.get("torch") == torch.__version__]
        done = {row.get("name") for row in own if not row.get("ended")}
        ended = Counter(row.get("name") for row in own if row.get("ended"))
        done |= {name for name, times in ended.items() if times >= TRIES}
        for item in items:
            scaled = item if where == "cuda" else item.small()
            left = deadline - time.monotonic()
            if item.name in done or scaled.seconds > left:
                continue
            say(f"{item.name}, about {scaled.seconds:.0f} s; {left / 60:.1f} min left")
            limit = max(PATIENCE * scaled.seconds, LEAST_SECONDS)
            start = time.monotonic()
            figures = _in_a_process(scaled, where, min(limit, left))
            seconds = time.monotonic() - start
            if figures is None and left < limit:
                break
            if figures is None:
                figures = {
                    "failed": f"it took more than {limit:.0f} s, where {scaled.seconds:.0f} s were expected",
                    "ended": True,
                }
            if figures.get("error") == ClusterError.__name__:
                note(f"{item.name} stays missing: {figures['failed']}")
                continue
            fields = asdict(scaled) | {"name": item.name, "machine": name, "knobs": dict(scaled.knobs)}
            fields["torch"] = torch.__version__
            expected = fields.pop("seconds")
            row = {**fields, "expected": expected, "took": seconds, **figures}
            append(row)
            ended[item.name] += bool(row.get("ended"))
            if not row.get("ended") or ended[item.name] >= TRIES:
                done.add(item.name)
            yield row
    missing = [item for item in items if item.name not in done]
    if missing:
        total = sum((item if where == "cuda" else item.small()).seconds for item in missing)
        note(
            f"{len(missing)} of {len(items)} are not measured yet and take about {total / 60:.0f} min: "
            "the same command goes on with them"
        )


def row_text(row: dict[str, Any]) -> str:
    """Return a row in one line: its name, and its error or its most important figures."""
    if row.get("failed"):
        return f"{row['name']}: failed: {row['failed']}"
    columns = (
        "seconds",
        "plan_over_measured",
        "TFLOP/s",
        "/ matmul",
        "worst error",
        "worst",
        "to host GB/s",
    )
    figures = (f"{name} {row[name]:.4g}" for name in columns if isinstance(row.get(name), int | float))
    first = " in a first step" if row.get("timed_steps") == 0 else ""
    return f"{row['name']}: {', '.join(figures) or 'done'}{first}"


def _find_machine(machine: str | None) -> tuple[DeviceType, str]:
    """Return where the items run, and the name of the machine.

    Another process asks CUDA, because a CUDA context in this process would take about 0.5 GiB of the GPU.

    Raises:
        LabError: There is no such machine, or it cannot be used.
    """
    if machine == "cpu":
        return "cpu", "CPU"
    code = f"from lab.bench.gpu_row import print_machine; print_machine({machine!r})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    answer = _last_object(process.stdout)
    if answer is None:
        raise LabError(f"the GPU cannot be used: {(process.stderr.splitlines() or ['no reason given'])[-1]}")
    if "error" in answer:
        raise LabError(answer["error"])
    return answer["where"], answer["name"]


def _last_object(text: str) -> dict[str, Any] | None:
    """Return the last line of ``text`` that is a JSON object; None if there is none."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    return None


def _in_a_process(item: Item, where: DeviceType, limit: float) -> dict[str, Any] | None:
    """Return the figures of an item from a process of its own, or how that process ended.

    The result is None if the process was ended after ``limit`` seconds. If this process is killed, the other
    one ends too.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    if item.expandable:
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    command = [*watched("lab.bench.gpu_row"), json.dumps(asdict(item)), where]
    with TemporaryFile() as answers, TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=answers,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # End the process and the processes that it started. If it has ended, there is none.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answers.seek(0)
        errors.seek(0)
        figures = _last_object(answers.read().decode(errors="replace"))
        trace = errors.read().decode(errors="replace")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    if figures is None:
        return {"failed": f"its process {how}", "trace": trace[-2000:]}
    # Figures are kept if the process fails after its measurement, for instance in the clean-up of CUDA.
    return figures if code == 0 else figures | {"process": f"it {how}", "trace": trace[-2000:]}
