"""`lab bench results`: what a GPU measured, and plans of the same steps; `lab plan --layers`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import lab
from lab.bench.gpu_items import ITEMS, RATES, Item
from lab.bench.machine import device_of, measure_machine, write_device
from lab.bench.replanned import replan
from lab.bench.results import FOLDER, measured_rows
from lab.errors import LabError, ResultError
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.hardware import hardware
from lab.rehearsing.rehearsal import seconds_alone
from lab_tests.support.commands import answer

TOKENS = 384
STEP = Item("rehearse", 1, "tiny", TOKENS, 3, "long")
FIXED = Item("hollow", 1, "tiny", TOKENS, 3, "upipe", (("overlap", True),), expandable=False)
HIDDEN = Item("hidden", 1, "tiny", TOKENS, 3, "fast")
H100 = "NVIDIA H100 80GB HBM3"


def planned(item, **settings):
    knobs = dict(item.knobs) | settings
    return lab.plan(item.model, item.recipe, tokens=item.tokens, ranks=8, layers=item.layers, **knobs)


def torchs_own(plan):
    return plan.timeline.device_peak - outside_workspace(8)


def write(folder, *rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_each_measured_step_is_planned_again(tmp_path):
    step, fixed, hidden = map(planned, (STEP, FIXED, HIDDEN))
    assert step.reserved_peak() != step.device_peak
    assert fixed.reserved_peak(expandable=False) != fixed.reserved_peak()
    assert seconds_alone(step) < step.step_seconds
    outside = outside_workspace(8)
    bytes_of_step = {
        "device_peak": 2 * torchs_own(step),
        "reserved_peak": 4 * (step.reserved_peak() - outside),
    }
    fixed_bytes = fixed.reserved_peak(expandable=False) - outside
    write(
        tmp_path,
        {"name": STEP.name, "machine": H100, "seconds": 8 * seconds_alone(step), **bytes_of_step},
        {"name": FIXED.name, "machine": H100, "device_peak": torchs_own(fixed), "reserved_peak": fixed_bytes},
        {"name": HIDDEN.name, "machine": H100, "step s": 4 * seconds_alone(hidden), "timed_steps": 0},
        {"name": HIDDEN.name, "machine": "NVIDIA X", "step s": 1.5, "versions": "torch 9, lab ab"},
        {"name": STEP.name, "machine": "NVIDIA X", "failed": "out of memory", "device_peak": 1},
        {"name": "another", "machine": "NVIDIA X", "seconds": 1},
    )
    said = []
    rows = [*replan(tmp_path, pytest.fail, said.append, items=(STEP, FIXED, HIDDEN))]
    assert said == [STEP.name, FIXED.name, HIDDEN.name, HIDDEN.name]
    assert [row["step"] for row in rows] == [*said[:2], f"{HIDDEN.name}, first step", said[3]]
    assert rows[0] == {
        "step": STEP.name,
        "peak, GiB": 2 * torchs_own(step) / 2**30,
        "planned / peak": 0.5,
        "printed / peak": step.device_peak / (2 * torchs_own(step)),
        "reserved, GiB": bytes_of_step["reserved_peak"] / 2**30,
        "planned / reserved": 0.25,
        "seconds": 8 * seconds_alone(step),
        "planned / seconds": 0.125,
        "own rates / seconds": None,
        "machine": f"{H100}, unknown versions",
    }
    assert (rows[1]["planned / peak"], rows[1]["planned / reserved"], rows[1]["seconds"]) == (1, 1, None)
    assert (rows[2]["planned / peak"], rows[2]["planned / seconds"]) == (None, 0.25)
    # Of a GPU that the hardware table does not have, nothing says how long a step takes.
    assert (rows[3]["seconds"], rows[3]["planned / seconds"]) == (1.5, None)
    assert rows[3]["machine"] == "NVIDIA X, torch 9, lab ab"


def test_a_row_of_another_recipe_is_left_out_with_a_note(tmp_path):
    """A knob that the row does not have was off then, as it is by default."""
    recipe = planned(STEP).recipe.to_json()
    del recipe["overlap"]
    row = {"name": STEP.name, "machine": H100, "seconds": 1.0, "recipe_knobs": recipe}
    write(tmp_path, row)
    assert len([*replan(tmp_path, pytest.fail, lambda _: None, items=(STEP,))]) == 1
    write(tmp_path, row | {"recipe_knobs": recipe | {"segment": 2, "stream": 8}})
    notes = []
    with pytest.raises(LabError, match="has no row of a training step on a GPU"):
        [*replan(tmp_path, notes.append, lambda _: None, items=(STEP,))]
    assert notes == [f"{STEP.name} had another stream, segment: it is left out"]


@pytest.mark.long
def test_the_plan_has_the_bytes_that_a_gpu_measured():
    """Bounds of all rows that come with the lab; the text of the page has each."""
    rows = [*replan(FOLDER, pytest.fail, lambda _: None)]
    assert len(rows) == 19
    bounds = {"planned / peak": (0.999, 1.002), "planned / reserved": (0.98, 1.001)}
    bounds |= {"planned / seconds": (0.8, 1.0), "own rates / seconds": (0.87, 1.03)}
    for row in rows:
        for name, (least, most) in bounds.items():
            assert row[name] is None or least <= row[name] <= most, (row["step"], name)
        # With the rates of this GPU.
        if any(f" {recipe} " in row["step"] for recipe in ("tiling", "upipe", "fast")) and row["seconds"]:
            assert abs(row["own rates / seconds"] - 1) < (0.03 if " 1M " in row["step"] else 0.07)


def test_the_hardware_table_has_the_rates_of_the_rows():
    [(name, rows)] = measured_rows(pytest.fail).items()
    own, h100 = device_of(rows.values()), hardware("h100")
    assert (name, own["like"], own["kernel"]) == (H100, "h100", "cudnn")
    assert own["kernels"].keys() == h100.kernels.keys()
    for kernel, rates in h100.kernels.items():
        found = own["kernels"][kernel]
        assert tuple(found["tokens"]) == rates.tokens
        for direction in ("forward", "backward"):
            assert found[direction] == pytest.approx(getattr(rates, direction), rel=2e-4)
    for figure in ("pageable_rate", "copy_slowdown"):
        assert own[figure]["value"] == pytest.approx(getattr(h100, figure).value, rel=1e-3)


# 200 products of 8192 x 8192 matrices take half a second, and copies beside them a quarter.
OF_COPIES = {
    "kind": "copies", "machine": H100, "torch": "9", "products s": 0.5, "copies alone s": 0.25,
    "products with copies beside s": 0.6, "to host GB/s": 50.0, "from host GB/s": 40.0,
    "to pageable GB/s": 5.0, "from pageable GB/s": 6.0,
}  # fmt: skip


def of_kernel(kernel, tokens, forward, backward):
    knobs = {"kernel": kernel, "heads": 8, "head_dim": 64}
    figures = {"forward s": forward, "backward s": backward}
    return {"kind": "attention", "tokens": tokens, "knobs": knobs, **figures}


def test_a_device_from_rows_by_hand(tmp_path):
    rows = [
        OF_COPIES | {"products s": 9.0}, OF_COPIES,
        of_kernel("torch", 1024, 2.0, 5.0), of_kernel("cudnn", 1024, 1.0, 5.0),
        of_kernel("torch", 4096, 16.0, 80.0), of_kernel("cudnn", 2048, 4.0, 10.0),
        of_kernel("cudnn", 4096, 1.0, 1.0) | {"failed": "out of memory"},
        of_kernel("cudnn", 8192, 1.0, 1.0) | {"knobs": {"kernel": "cudnn", "heads": 8, "heads_first": True}},
    ]  # fmt: skip
    flops = 2 * 8 * 64 * 1024**2
    device, h100 = written(tmp_path, rows), hardware("h100")
    assert (device.name, device.kernel, device.memory.value) == (H100, "cudnn", h100.memory.value)
    cudnn, torch = (device.kernels[name] for name in ("cudnn", "torch"))
    assert (cudnn.tokens, cudnn.forward) == ((1024, 2048), (flops, flops))
    assert (cudnn.backward, torch.tokens) == ((flops / 2, flops), (1024, 4096))
    assert torch.forward == (flops / 2, flops)
    assert device.matmul == replace(h100.matmul, source=f"not measured: {h100.matmul.source}")
    assert device.matmul_share.value == 2 * 200 * 8192**3 / 0.5 / h100.matmul.value
    assert (device.host_link.value, device.host_link_share.value) == (40e9, 1)
    assert (device.pageable_rate.value, device.copy_slowdown.value) == (5e9, pytest.approx(0.4))
    assert device.link == replace(h100.link, source=f"not measured: {h100.link.source}")
    assert device.memory_rate.value == h100.memory_rate.value
    more = {"machine": "NVIDIA X", "memory GB/s": 900.0, "memory GiB": 40.0}
    unknown = written(tmp_path, [*rows[2:], OF_COPIES | more])
    assert (unknown.memory.value, unknown.memory_rate.value) == (40 * 2**30, 900e9)
    assert unknown.matmul.value == 2 * 200 * 8192**3 / 0.5
    assert unknown.link.source.startswith("not measured, and assumed from the NVIDIA GeForce RTX 4090 24GB: ")
    # Copies that take longer than products, and products in fp32, at half the rate of bf16.
    more = {"machine": "CPU", "copies alone s": 2.0, "products with copies beside s": 2.1}
    cpu = written(tmp_path, [*rows[2:], OF_COPIES | more])
    assert cpu.matmul.value == 2 * 2 * 200 * 256**3 / 0.5
    assert cpu.copy_slowdown.value == pytest.approx(0.2)
    more = {"products with copies beside s": 0.49}
    assert written(tmp_path, [*rows[2:], OF_COPIES | more]).copy_slowdown.value == 0


def test_a_backward_counts_more_than_a_forward(tmp_path):
    """Seen red with the sum of the seconds per operation of both."""
    quick, slow = of_kernel("cudnn", 64, 5.0, 10.0), of_kernel("torch", 64, 3.0, 13.0)
    assert written(tmp_path, [OF_COPIES, quick, slow]).kernel == "cudnn"
    assert written(tmp_path, [OF_COPIES, slow, quick | {"backward s": 12.0}]).kernel == "torch"


def written(folder, rows):
    write_device(device_of(rows), folder / "own.json")
    return hardware(str(folder / "own.json"))


@pytest.mark.parametrize(
    "rows",
    [
        [], [OF_COPIES], [of_kernel("torch", 64, 1.0, 1.0)], [OF_COPIES, {"kind": "attention"}],
        [OF_COPIES, of_kernel("torch", 64, 0, 1.0)], [OF_COPIES, of_kernel("torch", 64, None, 1.0)],
        [{"kind": "copies"}, of_kernel("torch", 64, 1.0, 1.0)], [OF_COPIES, of_kernel([], 64, 1.0, 1.0)],
        [OF_COPIES, of_kernel("torch", 64, 1.0, 1.0) | {"knobs": None}],
    ],
)  # fmt: skip
def test_rows_without_rates_are_refused(tmp_path, rows):
    with pytest.raises(LabError, match=r"^no device is made: the copies, or all|^the rows have no rates: "):
        device_of(rows)
    write(
        tmp_path,
        {"name": STEP.name, "machine": H100, "seconds": 1.0},
        *({"machine": H100, **r} for r in rows),
    )
    [row] = replan(tmp_path, lambda _: None, lambda _: None, items=(STEP,))
    assert (row["seconds"], row["own rates / seconds"]) == (1.0, None)


@pytest.mark.long
def test_lab_bench_machine_writes_a_device_of_this_cpu(tmp_path):
    """Its rates give the seconds of a rehearsal, and another file of this name gives others."""
    file = str(tmp_path / "cpu.json")
    said = answer(["bench", "machine", file, "--machine", "cpu"])
    assert [line.split(":")[0] for line in said.splitlines()] == [item.name for item in RATES["cpu"]]
    device = hardware(file)
    assert (device.name, device.kernel, device.host_link_share.value) == ("CPU", "torch", 1)
    asked = ["tiny", "--tokens", "2K", "--ranks", "4", "--recipe", "plain"]
    plan = ["plan", *asked, "--no-workspace", "--device", file, "--json"]
    measured = json.loads(answer(["rehearse", *asked, "--machine", "cpu", "--json"]))["seconds"]
    planned_seconds = json.loads(answer(plan))["step_seconds"]
    assert 0.2 < planned_seconds / measured < 5
    entries = json.loads(Path(file).read_text())
    for direction in ("forward", "backward"):
        entries["kernels"]["torch"][direction] = [1e6] * 3
    Path(file).write_text(json.dumps(entries))
    assert json.loads(answer(plan))["step_seconds"] > 100 * planned_seconds


@pytest.mark.parametrize(
    ("name", "why"), [("cpu.txt", "give a name that ends in .json"), ("no/x.json", "no folder")]
)
def test_where_lab_bench_machine_cannot_write_nothing_is_measured(tmp_path, name, why):
    with pytest.raises((LabError, ResultError), match=why):
        next(measure_machine(tmp_path / name, pytest.fail, machine="cpu"))


def test_a_gpu_has_its_own_rates(tmp_path):
    write(tmp_path, {"name": STEP.name, "machine": "NVIDIA L40S", "seconds": 1.0})
    [row] = replan(tmp_path, pytest.fail, lambda _: None, items=(STEP,))
    assert row["planned / seconds"] == seconds_alone(planned(STEP, device="l40s"))
    assert row["planned / seconds"] > 1.5 * seconds_alone(planned(STEP))


def test_a_folder_without_steps_is_refused(tmp_path):
    write(tmp_path, {"name": "copies", "machine": H100}, {"name": STEP.name, "machine": "CPU", "seconds": 1})
    with pytest.raises(LabError, match=r"has no row of a training step on a GPU: `lab bench gpu --minutes 9"):
        [*replan(tmp_path, pytest.fail, pytest.fail, items=(STEP,))]
    with pytest.raises(LabError, match=r"rows\.jsonl is not a folder: give one in which"):
        [*replan(tmp_path / "rows.jsonl", pytest.fail, pytest.fail, items=(STEP,))]


def test_the_command_reads_a_folder(tmp_path):
    item = next(item for item in ITEMS if item.kind == "rehearse")
    write(tmp_path, {"name": item.name, "machine": H100, "seconds": 2.0})
    [row] = json.loads(answer(["bench", "results", str(tmp_path), "--json"]))
    assert (row["step"], row["seconds"], row["peak, GiB"]) == (item.name, 2.0, None)
    write(tmp_path, *({"name": item.name, "machine": name, "seconds": 2.0} for name in (H100, "NVIDIA X")))
    tables = answer(["bench", "results", str(tmp_path)]).rstrip().split("\n\n")
    assert [table.splitlines()[0] for table in tables[:2]] == [H100, "NVIDIA X"]
    assert [item.name in table for table in tables] == [True] * 4
    on = [table.splitlines()[-1] for table in tables[2:]]
    assert on == [f"  on {name}, unknown versions" for name in (H100, "NVIDIA X")]


# ---- the first layers of a model -------------------------------------------------------------------------


def test_the_first_layers_are_planned_as_a_rehearsal_plans_them():
    rehearsed = lab.rehearse("tiny", "long", tokens=TOKENS, ranks=8, layers=3, machine="cpu").plan
    plan = lab.plan("tiny", "long", tokens=TOKENS, ranks=8, layers=3, workspace=False)
    rest = {"planning_seconds": 0, "device_memory": 0, "notes": []}
    said = [made.to_json() | rest for made in (plan, rehearsed)]
    assert said[0] == said[1]
    assert (plan.timeline.total == rehearsed.timeline.total).all()
    assert plan.shape.L == 3
    assert plan.notes[0] == "the first 3 of 4 layers of tiny · long · 8 ranks · 384 tokens"
    assert plan.host_peak < lab.plan("tiny", "long", tokens=TOKENS, ranks=8, workspace=False).host_peak


def test_the_command_plans_the_first_layers():
    asked = ["plan", "tiny", "--tokens", str(TOKENS), "--ranks", "8", "--json"]
    whole, part = (json.loads(answer([*asked, *more])) for more in ([], ["--layers", "3"]))
    expected = lab.plan("tiny", "upipe", tokens=TOKENS, ranks=8, layers=3)
    assert part["host_peak"] == expected.host_peak < whole["host_peak"]


def test_more_layers_than_the_model_has_are_refused():
    with pytest.raises(LabError, match="layers=5: the model has 4; give a whole number from 1 to 4"):
        lab.plan("tiny", tokens=TOKENS, ranks=8, layers=5)
