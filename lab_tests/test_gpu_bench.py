"""`lab bench gpu` can be stopped and started again: on CPU, with stand-ins."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import isnan, nan
from pathlib import Path
from types import SimpleNamespace

import platformdirs
import psutil
import pytest
import torch
from click.testing import CliRunner

import lab
from lab.bench import gpu, gpu_items, gpu_row, hidden_copies, hollow, software
from lab.bench import gradients as gradients_bench
from lab.bench.edge_cases import measure_edges
from lab.bench.gpu import measure_gpu, row_text
from lab.bench.gpu_items import FIRST, ITEMS, SECOND, Item
from lab.bench.hidden_copies import hidden_share
from lab.bench.hollow import hollow_attention
from lab.bench.json_lines import read_lines
from lab.commands.cli import main
from lab.errors import LabError
from lab.memory import cuda
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.plan_cache import sources_hash
from lab.rehearsing.rehearsal import seconds_alone
from lab.techniques.attention.flash import flash_backward
from lab.techniques.attention.kernels import KERNELS
from lab.units import GiB, parse_bytes
from lab_tests.support.long_run import mostly_long

FEW = (
    Item("copies", 60, knobs=(("gib", 1),)),
    Item("attention", 60, tokens=64, knobs=(("kernel", "cudnn"), ("heads", 2), ("kv_heads", 1)), steps=0),
)
RUN = """
from pathlib import Path
from lab.bench.gpu import measure_gpu
from lab.bench.gpu_items import Item
for row in measure_gpu(Path({out!r}), 5, print, print, machine="cpu", items={items!r}):
    print("measured", row["name"], flush=True)
"""


def quiet(_):
    """Watch nothing."""


def measure(out, minutes=5.0, items=FEW, machine="cpu", **chosen):
    """The rows of one run, and its notes."""
    notes = []
    rows = measure_gpu(out, minutes, quiet, notes.append, machine=machine, items=items, **chosen)
    return list(rows), notes


@pytest.fixture
def on_cpu(monkeypatch):
    """A machine that no process is asked for, and items at their own size."""
    monkeypatch.setattr(gpu, "_find_machine", lambda _: ("cpu", "CPU", torch.__version__))
    monkeypatch.setattr(Item, "small", lambda item: item)


@pytest.fixture
def instant_rows(monkeypatch, on_cpu):
    """Rows without processes: what is asked for, in order; each takes a minute of a clock that stands in."""
    asked, now = [], [0.0]

    def answer(_, item, where, *, limit):
        asked.append((item, limit))
        now[0] += min(60, limit)
        return None if limit < 60 else {"failed": None, "seconds": 7.0}

    monkeypatch.setattr(gpu, "_in_a_process", answer)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    return asked


# ---- killed and started again ----------------------------------------------------------------------------


@pytest.mark.long
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
    _, alive = psutil.wait_procs(children, timeout=60)
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


def test_nothing_is_begun_that_cannot_end_and_what_is_missing_is_said(tmp_path, instant_rows):
    items = [Item("rehearse", seconds, recipe=name) for name, seconds in (("a", 50), ("b", 500), ("c", 70))]
    rows, notes = measure(tmp_path, minutes=200 / 60, items=items)
    assert [row["recipe"] for row in rows] == ["a", "c"]
    # One and a half times the seconds, and no more than what is left.
    assert [limit for _, limit in instant_rows] == [75, 105]
    assert notes == ["1 of 3 are not measured yet and take about 8 min: the same command goes on with them"]
    assert [row["recipe"] for row in measure(tmp_path, items=items, minutes=9)[0]] == ["b"]


def test_a_row_of_another_torch_or_another_machine_is_measured_again(tmp_path, monkeypatch, instant_rows):
    other = {"name": FEW[0].name, "machine": "NVIDIA X", "sources": FEW[0].sources}
    (tmp_path / "gpu.jsonl").write_text(json.dumps(other) + "\n")
    done = {"name": FEW[1].name, "machine": "CPU", "torch": torch.__version__, "sources": FEW[1].sources}
    (tmp_path / "other.jsonl").write_text(json.dumps(done) + "\n")
    assert [(row["name"], row["torch"]) for row in measure(tmp_path)[0]] == [(FEW[0].name, torch.__version__)]
    assert measure(tmp_path) == ([], [])
    monkeypatch.setattr(gpu, "_find_machine", lambda _: ("cpu", "CPU", "9.0"))
    assert [row["torch"] for row in measure(tmp_path)[0]] == ["9.0"] * 2
    assert measure(tmp_path) == ([], [])


def test_a_row_of_other_sources_is_measured_again(tmp_path, monkeypatch, instant_rows):
    """Sources of its own kind alone; a row from before they had a hash is one of other sources."""
    here = {"machine": "CPU", "torch": torch.__version__}
    rows = [here | {"name": item.name} for item in FEW]
    rows[1]["sources"] = "0" * 12
    (tmp_path / "cpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["sources"] for row in measure(tmp_path)[0]] == [item.sources for item in FEW]
    assert measure(tmp_path) == ([], [])
    monkeypatch.setitem(gpu_items._SOURCES, "attention", ("bench/attention.py",))
    assert [row["name"] for row in measure(tmp_path)[0]] == [FEW[1].name]


def test_every_kind_has_sources_and_a_measurement():
    lab_folder = Path(lab.__file__).parent
    assert {*gpu_items._SOURCES} == {*gpu_row._MEASURES} == {item.kind for item in ITEMS}
    for parts in gpu_items._SOURCES.values():
        assert all((lab_folder / part).exists() for part in parts)
    assert len({Item(kind, 1).sources for kind in gpu_items._SOURCES}) == len(gpu_items._SOURCES)


def test_only_items_with_the_words_are_measured(tmp_path, instant_rows):
    items = [
        Item("rehearse", 1, tokens=tokens, recipe=recipe)
        for recipe in ("upipe", "tiling") for tokens in (2**20, 2**21)
    ]  # fmt: skip
    names = [item.name for item in items]
    found, notes = measure(tmp_path, items=items, only=["2M upipe", "rehearse tiling 1M"])
    assert ([row["name"] for row in found], notes) == ([names[1], names[2]], [])
    assert [row["name"] for row in measure(tmp_path, items=items)[0]] == [names[0], names[3]]
    for wrong in ("2M up", " "):
        said = f"no item has the words {wrong!r} in its name: `lab bench results` prints"
        with pytest.raises(LabError, match=said):
            measure(tmp_path, items=items, only=["1M", wrong])


def test_an_item_is_measured_again(tmp_path, instant_rows):
    assert [row["seconds"] for row in measure(tmp_path)[0]] == [7.0, 7.0]
    before = time.time()
    found, notes = measure(tmp_path, only=[FEW[1].name], again=True)
    assert ([row["name"] for row in found], notes) == ([FEW[1].name], [])
    rows = read_lines(tmp_path / "cpu.jsonl", pytest.fail)
    assert [row["name"] for row in rows] == [FEW[0].name, FEW[1].name, FEW[1].name]
    assert rows[1]["time"] <= before <= rows[2]["time"]
    _, notes = measure(tmp_path, minutes=1.5, again=True)
    assert notes == [
        f"1 of 2 are not measured yet and take about 1 min: --again --only '{FEW[1].name}' goes on with them"
    ]


def test_a_second_run_on_one_folder_is_refused(tmp_path, instant_rows):
    first = measure_gpu(tmp_path, 5.0, quiet, quiet, machine="cpu", items=FEW)
    next(first)
    with pytest.raises(LabError, match=r"another process writes .*cpu.jsonl now"):
        measure(tmp_path)
    assert len([*first]) == 1
    assert measure(tmp_path) == ([], [])


def test_what_the_end_of_the_time_finds_running_stays_missing(tmp_path, instant_rows):
    items = [Item("rehearse", 30, recipe="a")]
    rows, notes = measure(tmp_path, minutes=40 / 60, items=items)
    assert rows == []
    assert notes[0] == "rehearse llama3-8b a ran for 40 s when the time was over: it was ended and has no row"
    assert notes[1].startswith("1 of 1 are not measured yet")


def test_an_item_that_takes_too_long_is_a_row_and_can_be_measured_again(tmp_path, monkeypatch, on_cpu):
    limits = []
    monkeypatch.setattr(gpu, "_in_a_process", lambda *_, limit: limits.append(limit))
    items = [Item("rehearse", 10, recipe="a")]
    [row], notes = measure(tmp_path, items=items)
    assert (row["failed"], notes) == ("it took more than 20 s, where 10 s were expected", [])
    assert measure(tmp_path, items=items) == ([], [])
    assert len(measure(tmp_path, items=items, again=True)[0]) == 1
    assert limits == [20, 20]


def test_a_gpu_that_is_in_use_is_no_row(tmp_path, monkeypatch, on_cpu):
    taken = {"failed": "NVIDIA X: 61.5 of its 80.0 GiB are taken", "error": "ClusterError"}
    answers = iter([taken, {"failed": None}])
    monkeypatch.setattr(gpu, "_in_a_process", lambda *_, **__: next(answers))
    rows, notes = measure(tmp_path)
    assert notes[0] == f"{FEW[0].name} stays missing: NVIDIA X: 61.5 of its 80.0 GiB are taken"
    assert notes[1].startswith("1 of 2 are not measured yet")
    of_file = read_lines(tmp_path / "cpu.jsonl", pytest.fail)
    assert [row["name"] for row in rows] == [row["name"] for row in of_file] == [FEW[1].name]


@pytest.mark.long
def test_the_process_that_starts_the_rows_asks_cuda_nothing(tmp_path, monkeypatch):
    """Torch's first answer takes a context of GPU memory, for as long as the process lives."""
    for name in ("is_available", "mem_get_info", "current_device", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("asked"))
    if not torch.cuda.device_count():
        with pytest.raises(LabError, match="machine='cuda', and torch sees no GPU here"):
            measure(tmp_path, machine="cuda")
    answer = {"where": "cuda", "name": "NVIDIA X", "torch": "9.0"}
    monkeypatch.setattr(gpu, "_in_a_process", lambda work, *_, **__: answer | {"failed": None})
    assert {row["machine"] for row in measure(tmp_path, machine="cuda")[0]} == {"NVIDIA X"}


def test_the_list_of_items():
    names = {item.name for item in ITEMS}
    assert len(names) == len(ITEMS)
    assert "rehearse llama3-8b 1M upipe layers=2 kernel=torch" in names
    assert "hollow llama3-8b 2M upipe layers=1 fixed-segments" in names
    assert max(item.seconds for item in ITEMS) < 600
    for item in ITEMS:
        small = item.small()
        assert replace(item, seconds=60, model="tiny", tokens=small.tokens, layers=small.layers,
                       knobs=small.knobs) == small  # fmt: skip
        assert small.tokens <= 2560
        assert ("kernel", "cudnn") not in small.knobs


def test_the_first_two_commands_fit_into_fifteen_minutes():
    assert sum(item.seconds for item in FIRST) <= 520
    assert sum(item.seconds for item in SECOND) <= 260


@pytest.mark.long
def test_the_smaller_gpu_has_a_gibibyte_more_than_the_planned_peak():
    [item] = [item for item in ITEMS if item.device_memory is not None]
    plan = lab.plan(item.model, item.recipe, tokens=item.tokens, ranks=8, layers=item.layers)
    assert parse_bytes(item.device_memory) - plan.device_peak == pytest.approx(GiB, rel=0.05)
    assert plan.reserved_peak() > parse_bytes(item.device_memory), "its allocator has to give its cache back"
    assert item.name.endswith(" upipe layers=2 device_memory=54.6GiB")


# ---- rows that fail --------------------------------------------------------------------------------------


def kill_itself(*_):
    """Measure as a process that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_):
    """Measure as a process that ends."""
    print("lost", flush=True)
    os._exit(1)


def test_the_imports_of_the_server_ignore_ctrl_c():
    """The terminal sends it to the server too. Seen red: a traceback of what was being imported."""
    interrupted = (
        "import builtins, os, signal\n"
        "get = builtins.__import__\n"
        "def sent(name, *rest):\n"
        "    if name == 'lab.bench.gpu_row':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        raise ImportError\n"
        "    return get(name, *rest)\n"
        "builtins.__import__ = sent\n"
        "import lab.bench.gpu_imports\n"
    )
    run = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_process_that_begins_after_an_interrupt_ends_without_a_word(tmp_path, monkeypatch):
    """By stand-ins: its file is gone. Seen red: a traceback."""
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(gpu, "end_after", lambda _: None)
    gpu._run(pytest.fail, (), None, str(tmp_path / "gone"), gpu.this_process())


@pytest.mark.long
def test_a_process_that_has_no_group_yet_is_ended():
    # It would sleep for longer than a test may take.
    assert gpu._in_a_process(time.sleep, 3600, limit=0.0) is None


def hang(*_):
    """Measure as a process that hangs, and has started another one."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "of a row"])
    time.sleep(3600)


def tell(*_):
    """Return the environment that the allocator would read, and that the process is no fork of this one."""
    names = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
    return {
        "conf": [os.environ.get(name) for name in names],
        "parent": os.getppid(),
        "loaded": "torch" in sys.modules,
    }


@pytest.mark.parametrize(
    ("work", "failed"),
    mostly_long(
        [(kill_itself, "its process was killed by signal 9"), (fail, "its process ended with code 1")], 1
    ),
)
def test_a_process_that_crashes_is_a_row(tmp_path, monkeypatch, on_cpu, work, failed):
    monkeypatch.setattr(gpu, "_measure", work)
    rows, _ = measure(tmp_path)
    assert [row["failed"] for row in rows] == [failed] * 2
    assert not {"seconds"} & rows[0].keys(), "those that were expected are not measured"
    assert rows[0]["trace"] == ("lost\n" if work is fail else "")
    assert row_text(rows[0]) == f"copies gib=1: failed: {failed}"
    assert measure(tmp_path) == ([], [])


def test_a_process_that_hangs_is_ended_with_those_that_it_started():
    assert gpu._in_a_process(hang, limit=5) is None
    assert not [p for p in psutil.process_iter(["cmdline"]) if "of a row" in (p.info["cmdline"] or ())]


def test_a_row_reads_no_setting_of_the_allocator_and_waits_for_no_import(monkeypatch):
    for name in gpu.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "max_split_size_mb:7")
    told = gpu._in_a_process(tell, limit=60)
    assert told is not None
    assert told.pop("parent") != os.getpid()
    assert told == {"conf": [None, None], "loaded": True}


@pytest.mark.parametrize("expandable", [True, False])
def test_a_row_has_the_allocators_setting_of_its_item(monkeypatch, expandable):
    given = []
    monkeypatch.setattr(gpu_row, "set_expandable_segments", given.append)
    monkeypatch.setitem(gpu_row._MEASURES, "copies", lambda *_: {})
    # Both, so that the variable is afterwards as it was before.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    gpu_row.figures(Item("copies", 1, expandable=expandable), "cuda")
    assert given == [expandable]
    # Seen red: a rehearsal in this process would let segments of fixed sizes grow.
    monkeypatch.setattr(cuda, "set_expandable_segments", given.append)
    cuda.use_expandable_segments()
    assert given == [expandable]


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


@pytest.mark.long
def test_a_rehearsal_and_its_recipe_and_its_plans_are_found_by_the_row(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path)
    item = Item("rehearse", 1, "tiny", 64, 1, "upipe", (("overlap", True),), steps=0)
    found = gpu_row.figures(item, "cpu")
    assert row_text(found | {"name": "x"}).endswith(" in a first step")
    assert (found["failed"], found["plans made in the row"]) == (None, 2)
    assert (found["recipe"], found["recipe_knobs"]["overlap"], found["ranks"]) == ("upipe", True, 8)
    assert (found["timed_steps"], found["plan_over_measured"]) == (0, 1)
    assert "machine" not in found
    for file in (tmp_path / "plans").iterdir():
        file.unlink()
    gpu_row.make_plans(item, "cpu")
    assert gpu_row.figures(item, "cpu")["plans made in the row"] == 0


@pytest.mark.parametrize("expandable", [True, False])
def test_a_row_has_the_reserved_bytes_of_its_segments_and_the_seconds_of_its_gpu(monkeypatch, expandable):
    item = Item("rehearse", 1, "tiny", 64, 1, "upipe", (), 0, expandable, "3GiB")
    plan = lab.plan("tiny", "upipe", tokens=64, ranks=8, layers=1)
    asked = []

    def rehearse(*_, device, device_memory, **__):
        asked.append(device)
        assert device_memory == "3GiB"
        return SimpleNamespace(plan=plan, to_json=lambda: {"machine": "", "recipe": {}})

    monkeypatch.setattr(gpu_row, "rehearse", rehearse)
    row = gpu_row.figures(item, "cpu")
    assert row["planned_reserved_peak"] == plan.reserved_peak(expandable=expandable)
    assert not {"planned_seconds", "planned_reserved_by_pool"} & {*row}, (
        "nothing says what a step takes on this CPU"
    )
    for name, device in (("NVIDIA L40S", "l40s"), ("NVIDIA X", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        asked.clear()
        row = gpu_row._rehearse(item, "cuda")
        assert asked == [device or "h100"]
        assert row.get("planned_seconds") == (device and seconds_alone(plan))
        pools = row["planned_reserved_by_pool"]
        assert {"compute large", "compute small"} <= {*pools}
        assert sum(pools.values()) == plan.reserved_peak(expandable=expandable) - outside_workspace(8)
    assert plan.reserved_peak(expandable=True) != plan.reserved_peak(expandable=False)


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


def test_a_hollow_attention_has_the_bytes_and_the_strides_of_the_whole(monkeypatch):
    monkeypatch.setattr(hollow, "TOKENS", 8)
    q, k, v, dout = (torch.randn(2, 40, heads, 16).transpose(1, 2) for heads in (6, 2, 2, 6))
    whole = KERNELS["torch"]
    expected = whole.forward(q, k, v)
    expected = (*expected, *whole.backward(dout, q, k, v, *expected))
    with hollow_attention():
        kernel = KERNELS["torch"]
        assert kernel is not whole
        out, lse = kernel.forward(q, k, v)
        found = (out, lse, *kernel.backward(dout, q, k, v, out, lse))
    assert KERNELS["torch"] is whole
    assert [(x.shape, x.stride(), x.dtype) for x in found] == [
        (x.shape, x.stride(), x.dtype) for x in expected
    ]
    for x, y in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(x[:, :, :8], y[:, :, :8])
        assert not x[:, :, 8:].any()


def test_a_hollow_attention_has_freed_the_small_gradients_when_it_takes_the_kernels_own_bytes(monkeypatch):
    monkeypatch.setattr(hollow, "TOKENS", 8)
    whole, small, taken = KERNELS["torch"], [], []

    def backward(*tensors, **settings):
        gradients = whole.backward(*tensors, **settings)
        small.extend(map(weakref.ref, gradients))
        return gradients

    empty = torch.empty

    def own_bytes(*size, **settings):
        taken.append([gradient() for gradient in small])
        return empty(*size, **settings)

    monkeypatch.setitem(KERNELS, "torch", whole._replace(backward=backward))
    q, k, v, dout = (torch.randn(1, heads, 40, 16) for heads in (6, 2, 2, 6))
    with hollow_attention():
        out, lse = KERNELS["torch"].forward(q, k, v)
        monkeypatch.setattr(hollow.torch, "empty", own_bytes)
        KERNELS["torch"].backward(dout, q, k, v, out, lse)
    assert taken[-1] == [None] * 3


@pytest.mark.long
def test_a_plan_within_a_hollow_row_is_that_of_the_whole_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: tmp_path)
    monkeypatch.setattr(hollow, "TOKENS", 8)
    plan = partial(lab.plan, "tiny", "upipe", tokens=4096, ranks=8)
    with hollow_attention():
        within = plan()
    for file in (tmp_path / "plans").iterdir():
        file.unlink()
    assert within.to_json() | {"planning_seconds": 0} == plan().to_json() | {"planning_seconds": 0}


@pytest.mark.long
def test_a_hollow_row_has_bytes_and_no_seconds():
    found = gpu_row.figures(Item("hollow", 1, "tiny", 256, 2, "upipe", steps=0), "cpu")
    assert (found["failed"], found["plan_over_measured"]) == (None, 1)
    assert found["attention"].startswith("hollow: computed for")
    assert not [name for name in found if "second" in name or name == "loss"]


def test_the_share_of_copies_behind_kernels():
    kernels = {
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": (0, 10), "nvjet_tst_128x256": (5, 12),
        "void at::native::vectorized_elementwise_kernel": (22, 30),
    }  # fmt: skip
    to_host, from_host = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
    copies = [(to_host, 8, 16, 3), (from_host, 20, 24, 5), (from_host, 29, 31, 2), ("Memcpy DtoD", 0, 99, 9)]
    events = [
        {"ph": "M", "name": "process_name"},
        {"cat": "gpu_user_annotation", "name": to_host, "ts": 0, "dur": 99},
        {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 0, "dur": 9, "args": {"bytes": 7}},
        *({"cat": "kernel", "name": name, "ts": a, "dur": b - a} for name, (a, b) in kernels.items()),
        *(
            {"cat": "gpu_memcpy", "name": name, "ts": a, "dur": b - a, "args": {"bytes": size * 2**28}}
            for name, a, b, size in copies
        ),
    ]
    assert hidden_share(events) == pytest.approx({
        "step s": 31e-6, "kernel s": 20e-6,
        "attention s": 10e-6, "products s": 7e-6, "other kernels s": 8e-6,
        "copies to host": 1, "to host GiB": 0.75, "to host s": 8e-6, "to host hidden": 0.5,
        "copies from host": 2, "from host GiB": 1.75, "from host s": 6e-6, "from host hidden": 0.5,
    })  # fmt: skip
    assert hidden_share([])["to host hidden"] is None


def test_a_row_of_a_profile_without_events_is_read(tmp_path):
    """A CPU's; otherwise it is measured again at each run."""
    row = {"name": "hidden", "machine": "CPU", **hidden_share([])}
    (tmp_path / "cpu.jsonl").write_text(json.dumps(row) + "\n")
    assert read_lines(tmp_path / "cpu.jsonl", pytest.fail) == [row]


def test_a_profile_without_kernels_on_a_gpu_is_no_result(monkeypatch):
    """With a stand-in for the GPU: a container in which CUPTI may not be used has no events, and no error."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(hidden_copies, "one_rank", lambda *_: nullcontext())
    state = SimpleNamespace(train_step=lambda *_: 0.0, close=lambda: None)
    monkeypatch.setattr(hidden_copies, "make_rank_state", lambda *_: state)
    trace = '{"traceEvents": [{"ph": "M", "name": "process\x01name"}]}'
    profiler = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(trace))
    monkeypatch.setattr(hidden_copies, "profile", lambda **_: nullcontext(profiler))
    found = gpu_row.figures(Item("hidden", 1, "tiny", 256, 2, "fast"), "cuda")
    assert found["failed"].startswith("the profiler saw 1 events, and no kernel of the GPU")


@pytest.mark.long
def test_a_step_is_profiled_where_no_copy_can_be_hidden():
    item = Item("hidden", 1, "tiny", 256, 2, "fast")
    found = gpu_row.figures(item, "cpu")
    assert (found["failed"], found["copies to host"]) == (None, 0)


@pytest.mark.long
def test_kernels_are_right_at_their_edges(monkeypatch):
    found = measure_edges("cpu")
    assert found["failed cases"] == {}
    assert len(found["errors"]) == 43
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert len(found["operators"]) == 42
    of = {name.removeprefix("torch D=64 "): operators for name, operators in found["operators"].items()}
    assert of["1 query of 129 keys"] == "aten::bmm"
    assert of["64 queries of 129 keys"] == f"{flash}, {flash}_backward"
    assert of["documents of (1, 5, 1, 2, 120)"] == f"{flash}, {flash}_backward, aten::bmm"
    assert 0 < found["worst"] < 1e-6
    monkeypatch.setitem(KERNELS, "torch", KERNELS["torch"]._replace(backward=swapped_backward))
    assert measure_edges("cpu")["worst"] > 0.1


def swapped_backward(*arguments, **settings):
    """Return dk for dv."""
    dq, dk, dv = flash_backward(*arguments, **settings)
    return dq, dv, dk


@pytest.mark.long
def test_no_technique_changes_a_gradient():
    found = gpu_row.figures(Item("gradients", 1, "tiny", 128, 2), "cpu")
    assert found["failed"] is None
    assert len(found["distances"]) == 10
    assert not {"checkpoint", "upipe"} & {*found["distances"]}, "a run is not compared with itself"
    assert 0 < found["worst"] == max(found["distances"].values()) < 1e-4
    assert found["floor"] == 0, "on a CPU, sums have one order"
    assert found["floors"] == {"checkpoint": 0, "upipe": 0}


def test_the_worst_gradient_has_its_name_and_the_floor_is_that_of_equal_recipes(monkeypatch):
    """By stand-ins: a gradient of `tiling` is NaN, and one of the second run of `upipe` is another one."""
    seen = Counter()

    def gradients(job, _):
        name = "upipe" if job.recipe.head_chunk is not None else "other"
        seen[name] += 1
        values = {"first": torch.ones(3), "second": torch.ones(3)}
        if (name, seen[name]) == ("upipe", 2):
            values["first"] = torch.full((3,), 1.25)
        if (name, seen[name]) == ("other", 4):
            values["second"] = torch.full((3,), nan)
        return values

    monkeypatch.setattr(gradients_bench, "_gradients", gradients)
    found = gradients_bench.measure_gradients("tiny", 128, 2, 8, "cpu")
    assert (found["floors"], found["floor"]) == ({"checkpoint": 0, "upipe": 0.25}, 0.25)
    assert isnan(found["worst"])
    assert found["worst parameter"] == "tiling: second"


# ---- refused in one line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--minutes 0 --machine cpu", "minutes=0: it takes a number above 0, for instance 25"),
        ("--minutes nan --machine cpu", "minutes=nan: it takes a number above 0, for instance 25"),
        ("--minutes 1", "torch sees no GPU here: --machine cpu measures the CPU, at a small size"),
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
