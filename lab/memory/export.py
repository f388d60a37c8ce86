"""A timeline in the formats of other viewers: Perfetto, and PyTorch's memory viewer."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.folders import write_whole
from lab.errors import ResultError
from lab.memory.categories import CATEGORIES, HOST, MEMORIES
from lab.memory.timeline import Timeline

_ALIGNMENT = 512
"""Addresses in a snapshot are multiples of this number of bytes, as those of CUDA's allocator are."""


def check_file(path: Path) -> None:
    """Check that a file can be made, before the work for it is done.

    Raises:
        ResultError: There is no such folder, or what has this name is no file, or one that is read-only.
    """
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:
        raise ResultError(f"{path} cannot be written: {error}") from error
    if not target.parent.is_dir():
        raise ResultError(f"{path} cannot be written: there is no folder {target.parent}")
    # A rename would put a file in the place of a device, of a pipe, or of a link to itself.
    if not path.name or (os.path.lexists(target) and not target.is_file()):
        raise ResultError(f"{path} cannot be written: it is no file")
    if target.exists() and not os.access(target, os.W_OK):
        raise ResultError(f"{path} cannot be written: {os.strerror(errno.EACCES)}")


def write_chrome_trace(timelines: Sequence[Timeline], path: Path | str) -> Path:
    """Write timelines as a Chrome trace in JSON, for https://ui.perfetto.dev and ``chrome://tracing``.

    Each timeline is a process, named by its rank. It has a counter with the bytes of each category, one with
    the bytes in host memory and in a mapped file, and a slice for each tensor from when it is made until it
    is freed.

    Args:
        timelines: One for each rank; of a plan, its timeline alone.
        path: The file to write.

    Returns:
        The path of the file.

    Raises:
        ResultError: A timeline has no storages, or the file cannot be written.
    """
    _check(timelines)
    events = [event for rank, timeline in enumerate(timelines) for event in _events(rank, timeline)]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    return write_result(Path(path), json.dumps(document).encode())


def write_memory_snapshot(timelines: Sequence[Timeline], path: Path | str) -> Path:
    """Write timelines as a snapshot, a pickle, for PyTorch's memory viewer (https://pytorch.org/memory_viz).

    Each timeline is a device. The viewer shows a stack of frames for each allocation; here they are the
    tensor, the operator, the module and the category. Addresses are made up: no two tensors that are held at
    one time overlap. Host memory and mapped files are left out, and so are bytes that no tensor holds.

    Args:
        timelines: One for each rank; of a plan, its timeline alone.
        path: The file to write.

    Returns:
        The path of the file.

    Raises:
        ResultError: A timeline has no storages, or the file cannot be written.
    """
    _check(timelines)
    devices = [_device(rank, timeline) for rank, timeline in enumerate(timelines)]
    snapshot = {
        "segments": [segment for segment, _ in devices],
        "device_traces": [trace for _, trace in devices],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return write_result(Path(path), pickle.dumps(snapshot))


def _check(timelines: Sequence[Timeline]) -> None:
    if not timelines or not all(len(timeline.storages) for timeline in timelines):
        raise ResultError("a timeline without storages cannot be exported; that of a complete run has them")


def _events(rank: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace; times are in microseconds."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    times = (timeline.seconds * 1e6).tolist()
    columns = (timeline.device.tolist(), timeline.host.tolist(), timeline.disk.tolist())
    for time, device, host, disk in zip(times, *columns, strict=True):
        sizes = dict(zip(CATEGORIES, device, strict=True))
        yield {"ph": "C", "name": "device bytes", "pid": rank, "ts": time, "args": sizes}
        yield {"ph": "C", "name": "host bytes", "pid": rank, "ts": time, "args": {"host": host, "disk": disk}}
    storages = timeline.storages
    for index in range(len(storages)):
        facts = _facts(timeline, index)
        # On CUDA a storage may be made later than the allocator's last event, where the timeline ends.
        made = float(storages.made[index])
        ends = {"b": made, "e": max(made, min(float(storages.freed[index]), times[-1] / 1e6))}
        for phase, seconds in ends.items():
            yield {
                "ph": phase,
                "cat": MEMORIES[storages.category[index]],
                "name": f"{facts['op']} {facts['tensor']}",
                # Viewers join the slices of one number, also those of two processes.
                "id": f"{rank}.{index}",
                "pid": rank,
                "ts": seconds * 1e6,
                "args": facts,
            }


def _facts(timeline: Timeline, index: int) -> dict[str, Any]:
    """Return what a storage is, which is given by its index."""
    storages = timeline.storages
    kind = storages.kinds[storages.kind[index]]
    return {
        "tensor": f"{kind.dtype} {'x'.join(map(str, kind.shape)) or 'scalar'}",
        "bytes": int(storages.size[index]),
        "name": kind.name,
        "op": kind.op,
        "module": timeline.modules[storages.module[index]],
        "phase": timeline.phases[storages.phase[index]],
        "step": int(storages.step[index]),
    }


def _device(rank: int, timeline: Timeline) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the segment of a device, with the tensors held at the end, and its trace."""
    storages = timeline.storages
    on_device = np.flatnonzero(storages.category < HOST).tolist()
    changes = [(int(storages.first[index]), 1, index) for index in on_device]
    changes += [(int(storages.end[index]), 0, index) for index in on_device]
    addresses, memory = {}, _Memory()
    trace = []
    # At a row, what is freed is freed before anything is made.
    for row, made, index in sorted(changes):
        if row == len(timeline):
            break
        size = int(storages.size[index])
        if made:
            address = addresses[index] = memory.take(size)
        else:
            memory.give_back(address := addresses.pop(index), size)
        trace.append(
            {
                "action": "alloc" if made else "free_completed",
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": int(timeline.seconds[row] * 1e6),
                "frames": _frames(timeline, index),
            }
        )
    held = int(storages.size[list(addresses)].sum())
    segment = {
        "device": rank,
        "address": _ALIGNMENT,
        "total_size": memory.top - _ALIGNMENT,
        "stream": 0,
        "segment_type": "large",
        "allocated_size": held,
        "active_size": held,
        "blocks": [
            {
                "address": address,
                "size": int(storages.size[index]),
                "requested_size": int(storages.size[index]),
                "state": "active_allocated",
                "frames": _frames(timeline, index),
            }
            for index, address in sorted(addresses.items(), key=lambda item: item[1])
        ],
    }
    return segment, trace


def _frames(timeline: Timeline, index: int) -> list[dict[str, Any]]:
    facts, category = _facts(timeline, index), MEMORIES[timeline.storages.category[index]]
    lines = (f"{facts['name'] or facts['op']} {facts['tensor']}", facts["op"], facts["module"], category)
    return [{"name": line, "filename": facts["phase"], "line": facts["step"]} for line in lines if line]


class _Memory:
    """Addresses of blocks, each the first gap that is large enough."""

    def __init__(self) -> None:
        self.top = _ALIGNMENT
        """The end of the highest block so far."""
        self._gaps: dict[int, int] = {}

    def take(self, size: int) -> int:
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        for start, length in sorted(self._gaps.items()):
            if length >= size:
                del self._gaps[start]
                if length > size:
                    self._gaps[start + size] = length - size
                return start
        self.top += size
        return self.top - size

    def give_back(self, start: int, size: int) -> None:
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        after = self._gaps.pop(start + size, 0)
        before = next((at for at, length in self._gaps.items() if at + length == start), None)
        if before is None:
            self._gaps[start] = size + after
        else:
            self._gaps[before] += size + after


def write_result(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all, and return its path.

    Raises:
        ResultError: It cannot be written; see `check_file`, too.
    """
    check_file(path)
    try:
        write_whole(path, content)
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error
    return path
