"""`lab bench gpu` can be stopped and started again: on CPU, with stand-ins."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from click.testing import CliRunner

from lab.bench import gpu, gpu_row, software
from lab.bench.gpu import ITEMS, Item, measure_gpu, row_text
from lab.bench.lines import read_lines
from lab.commands.cli import main
from lab.errors import LabError
from lab.planning.plan_cache import sources_hash

FEW = (
    Item("copies", 1, knobs=(("gib", 1),)),
    Item("attention", 1, tokens=64, knobs=(("kernel", "cudnn"), ("heads", 2), ("kv_heads", 1)), steps=0),
)
RUN = """
from pathlib import Path
from types import SimpleNamespace
from lab.bench.gpu import Item, measure_gpu
for row in measure_gpu(Path({out!r}), 5, print, print, machine="cpu", items={items!r}):
    print("measured", row["name"], flush=True)
"""


def quiet(_):
    """Watch nothing."""


def measure(out, minutes=5.0, items=FEW, machine="cpu"):
    """The rows of one run, and its notes."""
    notes = []
    return list(measure_gpu(out, minutes, quiet, notes.append, machine=machine, items=items)), notes


@pytest.fixture
def instant_rows(monkeypatch):
    """Rows without processes: what is asked for, in order; each takes a minute of a clock that stands in."""
    asked, now = [], [0.0]

    def answer(item, where, limit):
        asked.append((item, limit))
        now[0] += min(60, limit)
        return None if limit < 60 else {"failed": None, "seconds": 7.0}

    monkeypatch.setattr(gpu, "_in_a_process", answer)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    return asked


# ---- killed and started again ----------------------------------------------------------------------------


@pytest.mark.slow
def test_measuring_goes_on_after_sigkill_and_after_a_line_that_was_cut_off(tmp_path):
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN.format(out=str(tmp_path), items=FEW)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)
    assert first.stdout is not None
    with first.stdout as said:
        assert any(line.startswith("measured") for line in said)
        children = []
        while not children:
            children = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGKILL)
    first.wait()
    file = tmp_path / "cpu.jsonl"
    before = file.read_bytes()
    assert [row["name"] for row in read_lines(file, pytest.fail)] == [FEW[0].name]
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    file.write_bytes(before + before[: len(before) // 2])

    rows, notes = measure(tmp_path)
    assert [row["name"] for row in rows] == [item.name for item in FEW[1:]]
    assert notes == [f"{file} ends within a line: that line is removed"]
    assert file.read_bytes().startswith(before)
    assert read_lines(file, pytest.fail)[1:] == rows
    for row in rows:
        assert row["failed"] is None
        assert row["machine"] == "CPU"
        assert f"torch {torch.__version__}" in row["versions"]
        assert row["took"] > 0
    assert rows[0]["knobs"] == {"kernel": "torch", "heads": 2, "kv_heads": 1}
    assert rows[0]["worst error"] < 1e-3
    assert measure(tmp_path) == ([], [])


# ---- what is begun, and in which order -------------------------------------------------------------------


def test_nothing_is_begun_that_cannot_end_and_what_is_missing_is_said(tmp_path, monkeypatch, instant_rows):
    monkeypatch.setattr(Item, "small", lambda item: item)
    items = [Item("rehearse", seconds, recipe=name) for name, seconds in (("a", 50), ("b", 500), ("c", 70))]
    rows, notes = measure(tmp_path, minutes=200 / 60, items=items)
    assert [row["recipe"] for row in rows] == ["a", "c"]
    # Three times the seconds, at least two minutes, and no more than what is left.
    assert [limit for _, limit in instant_rows] == [150, 140]
    assert notes == ["1 of 3 are not measured yet and take about 8 min: the same command goes on with them"]
    assert [row["recipe"] for row in measure(tmp_path, items=items, minutes=9)[0]] == ["b"]


def test_a_row_of_another_torch_is_measured_again(tmp_path, monkeypatch, instant_rows):
    assert [row["torch"] for row in measure(tmp_path)[0]] == [torch.__version__] * 2
    assert measure(tmp_path) == ([], [])
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert [row["torch"] for row in measure(tmp_path)[0]] == ["9.0"] * 2
    assert measure(tmp_path) == ([], [])


def test_a_second_run_on_one_folder_is_refused(tmp_path, instant_rows):
    first = measure_gpu(tmp_path, 5.0, quiet, quiet, machine="cpu", items=FEW)
    next(first)
    with pytest.raises(LabError, match=r"another process writes .*cpu.jsonl now"):
        measure(tmp_path)
    assert len([*first]) == 1
    assert measure(tmp_path) == ([], [])


def test_what_the_end_of_the_time_finds_running_stays_missing(tmp_path, monkeypatch, instant_rows):
    monkeypatch.setattr(Item, "small", lambda item: item)
    items = [Item("rehearse", 30, recipe="a")]
    rows, notes = measure(tmp_path, minutes=40 / 60, items=items)
    assert rows == []
    assert notes[0].startswith("1 of 1 are not measured yet")


def test_a_row_that_takes_too_long_is_tried_twice(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(Item, "small", lambda item: item)
    monkeypatch.setattr(gpu, "_in_a_process", lambda item, where, limit: limits.append(limit))
    items = [Item("rehearse", 10, recipe="a")]
    [row], notes = measure(tmp_path, items=items)
    assert row["failed"] == "it took more than 120 s, where 10 s were expected"
    assert notes[0].startswith("1 of 1 are not measured yet")
    [row], notes = measure(tmp_path, items=items)
    assert notes == []
    assert measure(tmp_path, items=items) == ([], [])
    assert limits == [120, 120]


def test_a_gpu_that_is_in_use_is_no_row(tmp_path, monkeypatch):
    taken = {"failed": "NVIDIA X: 61.5 of its 80.0 GiB are taken", "error": "ClusterError"}
    answers = iter([taken, {"failed": None}])
    monkeypatch.setattr(gpu, "_in_a_process", lambda *_: next(answers))
    rows, notes = measure(tmp_path)
    assert [row["name"] for row in rows] == [FEW[1].name]
    assert notes[0] == f"{FEW[0].name} stays missing: NVIDIA X: 61.5 of its 80.0 GiB are taken"
    assert notes[1].startswith("1 of 2 are not measured yet")
    assert [row["name"] for row in read_lines(tmp_path / "cpu.jsonl", pytest.fail)] == [FEW[1].name]


def test_the_process_that_starts_the_rows_asks_cuda_nothing(tmp_path, monkeypatch):
    """Torch's first answer takes a context of GPU memory, for as long as the process lives."""
    for name in ("is_available", "device_count", "mem_get_info", "current_device", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asked"))
    with pytest.raises(LabError, match="machine='cuda', and torch sees no GPU here"):
        measure(tmp_path, machine="cuda")
    answer = json.dumps({"where": "cuda", "name": "NVIDIA X"})
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=f"seen\n{answer}\n"))
    monkeypatch.setattr(gpu, "_in_a_process", lambda *_: {"failed": None})
    assert {row["machine"] for row in measure(tmp_path, machine="cuda")[0]} == {"NVIDIA X"}


def test_results_of_another_machine_are_not_this_ones(tmp_path, instant_rows):
    (tmp_path / "gpu.jsonl").write_text(json.dumps({"name": FEW[0].name, "machine": "NVIDIA X"}) + "\n")
    done = {"name": FEW[1].name, "machine": "CPU", "torch": torch.__version__}
    (tmp_path / "other.jsonl").write_text(json.dumps(done) + "\n")
    assert [row["name"] for row in measure(tmp_path)[0]] == [FEW[0].name]


def test_the_list_of_items():
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    assert ITEMS[0].name == "copies gib=4"
    assert "rehearse llama3-8b 1M upipe layers=2 kernel=torch" in {item.name for item in ITEMS}
    assert "rehearse llama3-8b 2M upipe layers=1 fixed-segments" in {item.name for item in ITEMS}
    assert max(item.seconds for item in ITEMS) < 600
    for item in ITEMS:
        small = item.small()
        assert (small.model, small.kind, small.recipe, small.steps) == (
            "tiny",
            item.kind,
            item.recipe,
            item.steps,
        )
        assert small.tokens <= 2560
        assert ("kernel", "cudnn") not in small.knobs


# ---- rows that fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its process was killed by signal 9"),
        ("import sys; sys.exit('lost')", "its process ended with code 1"),
    ],
)
def test_a_process_that_crashes_is_a_row(tmp_path, monkeypatch, code, failed):
    monkeypatch.setattr(gpu, "watched", lambda module: [sys.executable, "-c", code])
    rows, _ = measure(tmp_path)
    assert [row["failed"] for row in rows] == [failed] * 2
    assert "trace" in rows[0]
    assert row_text(rows[0]) == f"copies gib=1: failed: {failed}"
    assert measure(tmp_path) == ([], [])


def test_a_process_that_hangs_is_ended(monkeypatch):
    code = "import time; time.sleep(60)"
    monkeypatch.setattr(gpu, "watched", lambda module: [sys.executable, "-c", code])
    start = time.monotonic()
    assert gpu._in_a_process(FEW[0], "cpu", 0.5) is None
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(("end", "how"), [("0", None), ("3", "it ended with code 3")])
def test_figures_stand_whatever_follows_them(monkeypatch, end, how):
    code = f"import sys; print('{{\"seconds\": 7}}'); print('[1]'); print('bye {{'); sys.exit({end})"
    monkeypatch.setattr(gpu, "watched", lambda module: [sys.executable, "-c", code])
    found = gpu._in_a_process(FEW[0], "cpu", 60)
    assert (found["seconds"], found.get("process")) == (7, how)


@pytest.mark.parametrize("expandable", [True, False])
def test_a_row_has_the_allocators_setting_of_its_item(monkeypatch, expandable):
    names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
    for name in names:
        monkeypatch.setenv(name, "max_split_size_mb:7")
    code = f"import os, json; print(json.dumps({{'conf': [os.environ.get(name) for name in {names}]}}))"
    monkeypatch.setattr(gpu, "watched", lambda module: [sys.executable, "-c", code])
    found = gpu._in_a_process(Item("copies", 1, expandable=expandable), "cpu", 60)
    assert found == {"conf": ["expandable_segments:True" if expandable else None, None]}


def test_a_row_names_the_driver_and_the_lab(monkeypatch):
    """With a stand-in for what nvidia-smi answers on a host of two GPUs."""
    monkeypatch.setattr(software, "ask_gpus", lambda *fields: [["570.86.15"]] * 2)
    monkeypatch.setitem(gpu_row._MEASURES, "copies", lambda *_: {})
    versions = gpu_row.figures(FEW[0], "cpu")["versions"]
    assert versions.endswith(f", driver 570.86.15, lab {sources_hash()[:12]}")
    monkeypatch.setattr(software, "ask_gpus", lambda *fields: [])
    assert "driver" not in software.versions()


def test_an_error_in_a_row_is_its_text(monkeypatch):
    def full(item, where):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setitem(gpu_row._MEASURES, "copies", full)
    found = gpu_row.figures(FEW[0], "cpu")
    assert found["failed"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert found["error"] == "OutOfMemoryError"
    assert f"torch {torch.__version__}" in found["versions"]


# ---- the other kinds of rows, in this process ------------------------------------------------------------


@pytest.mark.slow
def test_a_rehearsal_and_its_recipe():
    item = Item("rehearse", 1, "tiny", 64, 1, "upipe", (("overlap", True),), steps=0)
    found = gpu_row.figures(item, "cpu")
    assert row_text(found | {"name": "x"}).endswith(" in a first step")
    assert found["failed"] is None
    assert (found["recipe"], found["recipe_knobs"]["overlap"], found["ranks"]) == ("upipe", True, 8)
    assert (found["timed_steps"], found["plan_over_measured"]) == (0, 1)
    assert "machine" not in found


def test_compiling_is_measured_where_the_row_is(monkeypatch):
    """On a machine that has a GPU too, by a stand-in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices = []

    def compiled(*_, device, **__):
        devices.append(device)
        return [{"tile of": "norm", "compiled / not": 0.5}]

    monkeypatch.setattr("lab.bench.compiled.measure_tiles", compiled)
    for where in ("cpu", "cuda"):
        assert gpu_row.figures(Item("compile", 1), where)["norm compiled / not"] == 0.5
    assert devices == ["cpu", "cuda"]


@pytest.mark.slow
def test_no_technique_changes_a_gradient():
    found = gpu_row.figures(Item("gradients", 1, "tiny", 128, 2), "cpu")
    assert found["failed"] is None
    assert len(found["distances"]) == 12
    assert found["distances"]["checkpoint"] == found["distances"]["upipe"] == 0
    assert 0 < found["worst"] < 1e-4


# ---- refused in one line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--minutes 0 --machine cpu", "minutes=0: it takes a number above 0, for instance 25"),
        ("--minutes nan --machine cpu", "minutes=nan: it takes a number above 0, for instance 25"),
        ("--minutes 1", "torch sees no GPU here: --machine cpu runs the same list at the size of tiny"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = CliRunner().invoke(main, ["bench", "gpu", "--out", str(tmp_path / "new"), *words.split()])
    assert (run.exit_code, run.stdout, run.stderr) == (2, "", f"lab: {said}\n")
    assert not (tmp_path / "new").exists()


def test_figures_of_a_cpu_are_not_for_the_results_of_gpus(tmp_path):
    out = tmp_path / "notebooks" / "results"
    run = CliRunner().invoke(main, f"bench gpu --minutes 1 --machine cpu --out {out}".split())
    assert run.exit_code == 2
    assert "is for what GPUs measured: give another folder" in run.stderr
    assert not out.exists()
    (tmp_path / "file").touch()
    run = CliRunner().invoke(main, f"bench gpu --minutes 1 --machine cpu --out {tmp_path}/file".split())
    assert (run.exit_code, "cannot be made: File exists" in run.stderr) == (2, True)
