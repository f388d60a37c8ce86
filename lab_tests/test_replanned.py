"""`lab bench results`: what a GPU measured, and plans of the same steps; `lab plan --layers`."""

import json

import pytest

import lab
from lab.bench.gpu_items import ITEMS, Item
from lab.bench.replanned import replan
from lab.bench.results import FOLDER
from lab.errors import LabError
from lab.planning.cuda_workspace import outside_workspace
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
        {"name": HIDDEN.name, "machine": H100, "step s": 5 * seconds_alone(hidden), "timed_steps": 0},
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
        "machine": f"{H100}, unknown versions",
    }
    assert (rows[1]["planned / peak"], rows[1]["planned / reserved"], rows[1]["seconds"]) == (1, 1, None)
    assert (rows[2]["planned / peak"], rows[2]["planned / seconds"]) == (None, 0.2)
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
    bounds |= {"planned / seconds": (0.8, 1.0)}
    for row in rows:
        for name, (least, most) in bounds.items():
            assert row[name] is None or least <= row[name] <= most, (row["step"], name)


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
