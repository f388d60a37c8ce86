"""A timeline in other viewers' formats: what they would draw is what was counted."""

import errno
import json
import os
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import lab
from cluster.folders import write_whole
from lab.errors import ResultError
from lab.memory import write_chrome_trace, write_memory_snapshot
from lab.memory.categories import OTHER
from lab.memory.export import check_file
from lab.memory.timeline import Timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return lab.plan("tiny", "offload", tokens=48, ranks=2, workspace=False).timeline


def test_a_chrome_trace_has_the_bytes_of_each_row_and_a_slice_for_each_tensor(timeline, tmp_path) -> None:
    path = write_chrome_trace([timeline, timeline], tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert len({e["id"] for e in events if e["ph"] == "b"}) == 2 * len(timeline.storages)
    events = [e for e in events if e["pid"] == 1]
    counted = [sum(e["args"].values()) for e in events if e["name"] == "device bytes"]
    assert counted == timeline.total.tolist()
    host = [e["args"]["host"] for e in events if e["name"] == "host bytes"]
    assert host == timeline.host.tolist()
    assert max(host) > 0
    begun = {e["id"]: e for e in events if e["ph"] == "b"}
    ended = {e["id"]: e for e in events if e["ph"] == "e"}
    assert len(begun) == len(ended) == len(timeline.storages)
    middle = float(timeline.seconds[len(timeline) // 2]) * 1e6 + 1e-3
    held = [e["args"]["bytes"] for i, e in begun.items() if e["ts"] <= middle < ended[i]["ts"]]
    moment = timeline.holders(middle / 1e6).moment
    assert sum(held) == moment.device + moment.host


def test_a_snapshot_adds_up_to_the_timeline_and_no_two_tensors_overlap(timeline, tmp_path) -> None:
    path = write_memory_snapshot([timeline], tmp_path / "snapshot.pickle")
    snapshot = pickle.loads(path.read_bytes())
    held: dict[int, int] = {}
    sums, times = [], []
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            held[entry["addr"]] = entry["size"]
        else:
            assert held.pop(entry["addr"]) == entry["size"]
        if len(sums) % 97 == 0:
            blocks = sorted(held.items())
            assert all(start + size <= after for (start, size), (after, _) in pairwise(blocks))
        sums.append(sum(held.values()))
        times.append(entry["time_us"])
    assert max(sums) == timeline.device_peak
    assert times == sorted(times)
    [segment] = snapshot["segments"]
    assert {b["address"]: b["size"] for b in segment["blocks"]} == held
    assert sum(held.values()) == timeline.total[-1] - timeline.device[-1, OTHER]
    names = [frame["name"] for frame in snapshot["device_traces"][0][0]["frames"]]
    assert names[0].startswith("model.embed_tokens.weight float32 ")


def test_what_cannot_be_exported_is_refused(timeline, tmp_path) -> None:
    with pytest.raises(ResultError, match=r"^a timeline without storages"):
        write_chrome_trace([timeline.take(np.arange(4))], tmp_path / "trace.json")
    with pytest.raises(ResultError, match=r"missing/x.json cannot be written: there is no folder "):
        write_chrome_trace([timeline], tmp_path / "missing" / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_left_as_it_is(timeline, tmp_path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    (loop := tmp_path / "loop").symlink_to("loop")
    for path in (pipe, loop, tmp_path, Path("/"), Path()):
        with pytest.raises(ResultError, match=r" cannot be written: it is no file$"):
            write_chrome_trace([timeline], path)
    assert pipe.is_fifo()
    assert loop.is_symlink()
    with pytest.raises(ResultError, match=r"cannot be written: .*null"):
        check_file(tmp_path / "a\0b")
    (away := tmp_path / "away").symlink_to("none/file")
    with pytest.raises(ResultError, match=r"away cannot be written: there is no folder .*/none$"):
        write_chrome_trace([timeline], away)
    assert write_chrome_trace([timeline], tmp_path / ("x" * 250)).exists()


def test_a_file_that_is_only_read_is_refused_before_the_work(tmp_path, monkeypatch) -> None:
    (path := tmp_path / "trace.json").touch()
    check_file(path)
    monkeypatch.setattr(os, "access", lambda file, mode: (file, mode) != (path, os.W_OK))
    with pytest.raises(ResultError, match=r"trace\.json cannot be written: Permission denied$"):
        check_file(path)


def test_a_private_file_is_private_while_it_is_written(tmp_path, monkeypatch) -> None:
    """And a file is whole or as it was."""
    (path := tmp_path / "key").write_text("before")
    path.chmod(0o600)
    modes = []

    def full(self, content):
        modes.append(self.stat().st_mode & 0o777)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"after")
    assert modes == [0o600]
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
