"""Scalings as bytes: the integers of all steps in columns, and the texts beside them, compressed.

Columns hold differences, so that the layers of a model are the same bytes again and again.
"""

from __future__ import annotations

import io
import json
import lzma
import zlib
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lab.memory.categories import HOST, OTHER
from lab.memory.moment import Op
from lab.memory.storages import Integers, TensorKind
from lab.memory.timeline import Timeline
from lab.planning.costs import Peers, Work
from lab.planning.scaling import Scaling, Step

_XZ = b"\xfd7zXZ"


def encode(scaling: Scaling, facts: dict[str, Any], *, small: bool) -> bytes:
    """Return the bytes of a scaling, and of plain values; ``small`` ones take longer to make."""
    one, *_ = scaling.steps
    timeline, storages, work = one.timeline, one.timeline.storages, one.work
    moved, rows, written = storages.moves.T
    columns: dict[str, Any] = {
        **{name: _differences(getattr(timeline, name)) for name in ("phase", "module", "step")},
        "row_ends": _differences(timeline.seconds.astype(np.int64)),
        "first": _differences(storages.first),
        "held": storages.end - storages.first,
        "category": storages.category,
        "moves": np.stack((_differences(moved), rows - storages.first[moved], written), axis=1),
        "work_kind": work.kind,
        "work_other": work.other,
    }
    for number, step in enumerate(scaling.steps):
        t = step.timeline
        columns |= {
            f"op{number}": _differences(t.op),
            f"inside{number}": t.device[:, OTHER],
            f"kind{number}": _differences(t.storages.kind),
            f"size{number}": t.storages.size,
            f"flops{number}": step.work.flops,
            f"nbytes{number}": step.work.nbytes,
        }
    header = {
        "tokens": scaling.tokens,
        **({"closed": True} if scaling.closed else {}),
        "facts": facts,
        "phases": timeline.phases,
        "modules": timeline.modules,
        "peers": work.peers,
        "ops": [[[op.name, op.shapes] for op in step.timeline.ops] for step in scaling.steps],
        "kinds": [step.timeline.storages.kinds for step in scaling.steps],
    }
    columns["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    file = io.BytesIO()
    np.savez(file, **{name: _narrowest(column) for name, column in columns.items()})
    data = file.getvalue()
    return lzma.compress(data, preset=6) if small else zlib.compress(data, 1)


def decode(data: bytes) -> tuple[Scaling, dict[str, Any]]:
    """Return what ``encode`` was given.

    Raises:
        ValueError, KeyError, TypeError, EOFError: The bytes are not its.
    """
    try:
        data = lzma.decompress(data) if data.startswith(_XZ) else zlib.decompress(data)
    except (lzma.LZMAError, zlib.error) as error:
        raise ValueError("these are no compressed bytes") from error
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (BadZipFile, UnpicklingError) as error:
        raise ValueError("these are no columns") from error
    header = json.loads(columns.pop("header").tobytes())
    columns = {
        name: column if column.dtype == np.float64 else column.astype(np.int64)
        for name, column in columns.items()
    }
    steps = tuple(_step(header, columns, number) for number in range(len(header["tokens"])))
    return Scaling(tuple(header["tokens"]), steps, closed="closed" in header), header["facts"]


def _step(header: dict[str, Any], columns: dict[str, Any], number: int) -> Step:
    first = columns["first"].cumsum()
    moved, rows, written = columns["moves"].T
    moved = moved.cumsum()
    inside = columns[f"inside{number}"]
    device, nothing = np.zeros((len(inside), HOST), dtype=np.int64), np.zeros_like(inside)
    device[:, OTHER] = inside
    timeline = Timeline(
        seconds=columns["row_ends"].cumsum().astype(np.float64),
        device=device,
        host=nothing,
        disk=nothing,
        **{name: columns[name].cumsum() for name in ("phase", "module", "step")},
        op=columns[f"op{number}"].cumsum(),
        phases=tuple(header["phases"]),
        modules=tuple(header["modules"]),
        ops=tuple(Op(*op) for op in header["ops"][number]),
    ).with_storages(
        first=first,
        end=first + columns["held"],
        size=columns[f"size{number}"],
        category=columns["category"],
        kind=columns[f"kind{number}"].cumsum(),
        kinds=tuple(TensorKind(tuple(shape), *texts) for shape, *texts in header["kinds"][number]),
        moves=np.stack((moved, rows + first[moved], written), axis=1),
    )
    peers = tuple(Peers(tuple(ranks), me, tuple(to), exchange) for ranks, me, to, exchange in header["peers"])
    work = Work(
        columns["work_kind"],
        columns[f"flops{number}"],
        columns[f"nbytes{number}"],
        columns["work_other"],
        peers,
    )
    return Step(timeline, work)


def _differences(column: Integers) -> Integers:
    return np.diff(column, prepend=0)


def _narrowest(column: Any) -> Any:
    """Return integers in the narrowest type that has them; whole floats as they are."""
    if column.dtype != np.int64:
        return column
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    kinds = (np.int8, np.int16, np.int32)
    return column.astype(
        next((k for k in kinds if np.iinfo(k).min <= least and most <= np.iinfo(k).max), np.int64)
    )
