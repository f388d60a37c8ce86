"""The table of GPU results, made from notebooks/results, in lab/bench/README.md and in notebook 90."""

import json
from math import inf, nan
from pathlib import Path

import pytest

from lab.bench.gpu_items import ITEMS, Item
from lab.bench.results import GAP, measured_rows, results_text
from lab.bench.table import rows_text

pytestmark = pytest.mark.first

ROOT = Path(__file__).parent.parent
FEW = (Item("copies", 1), Item("compile", 1), Item("rehearse", 1, tokens=64, recipe="upipe"))


def write_results(folder, *rows):
    (folder / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def cells(text, name):
    """Of the line of one item: what stands behind its name."""
    [line] = [line for line in text.splitlines() if line.strip().startswith(name)]
    return line.strip().removeprefix(name).split()


def test_without_a_result_every_line_is_a_gap(tmp_path):
    text = results_text(pytest.fail, folder=tmp_path / "none")
    assert text.count(GAP) == len(ITEMS)
    assert all(item.name in text for item in ITEMS)


def test_a_table_a_gpu_with_its_figures_its_failures_and_its_gaps(tmp_path):
    rehearsed = {"name": FEW[2].name, "seconds": 1.5, "device_peak": 2**31, "plan_over_measured": 1.01}
    write_results(
        tmp_path,
        {"name": "copies", "machine": "GPU A", "failed": None, "to host GB/s": 55.0},
        rehearsed | {"machine": "GPU A", "seconds": 9.0},
        rehearsed | {"machine": "GPU A"},
        {"name": "copies", "machine": "GPU B", "failed": "out of memory"},
        rehearsed | {"machine": "CPU", "seconds": 3.25},
    )
    first, second = results_text(pytest.fail, folder=tmp_path, items=FEW).split("\n\n")
    assert (first.splitlines()[0], second.splitlines()[0]) == ("GPU A", "GPU B")
    assert cells(first, FEW[2].name) == ["1.5", "2", "1.01"]
    assert "to host GB/s 55" in first
    assert cells(first, "compile") == ["-", "-", "-", *GAP.split()]
    assert "failed: out of memory" in second
    assert second.count(GAP) == 2
    assert "3.25" not in first + second


def test_the_later_row_counts_whatever_its_file_is_named(tmp_path):
    old = {"name": "copies", "machine": "GPU A", "to host GB/s": 50.0}
    new = old | {"to host GB/s": 55.0, "time": 1.8e9}
    (tmp_path / "a.jsonl").write_text(json.dumps(new) + "\n" + json.dumps(new | {"time": 1.7e9}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(old) + "\n")
    assert measured_rows(pytest.fail, tmp_path) == {"GPU A": {"copies": new}}
    failed = {"name": "copies", "machine": "GPU A", "failed": "it took too long", "time": 1.9e9}
    (tmp_path / "c.jsonl").write_text(json.dumps(failed) + "\n")
    assert measured_rows(pytest.fail, tmp_path) == {"GPU A": {"copies": new}}


def test_a_name_in_the_first_column_is_in_one_line():
    name = "rehearse " * 8 + "end"
    text = rows_text([{"step": name, **{f"column {n}": n / 7 for n in range(9)}}], as_json=False)
    assert text.count(name) == 2
    assert "…" not in text


def test_a_line_that_was_cut_off_is_a_gap_and_noted(tmp_path):
    (tmp_path / "gpu.jsonl").write_text('{"name": "copies", "machine": "GPU A", "fai')
    notes = []
    assert results_text(notes.append, folder=tmp_path, items=FEW).count(GAP) == 3
    assert len(notes) == 1


def test_json_that_is_no_row_is_left_out(tmp_path):
    write_results(
        tmp_path,
        {"name": "copies", "machine": [1]},
        *({"name": "copies", "machine": "A", "seconds": s} for s in ("3", True, -1, 0, nan, inf, 10**400)),
    )
    notes = []
    assert results_text(notes.append, folder=tmp_path, items=FEW).count(GAP) == 3
    assert [note.partition(" ")[0] for note in notes] == [
        f"{tmp_path / 'gpu.jsonl'}:{n}" for n in range(1, 9)
    ]


def test_brackets_are_no_markup(tmp_path):
    write_results(tmp_path, {"name": "copies", "machine": "GPU A", "failed": "no [/dev/nvidia0] :smile:"})
    assert "no [/dev/nvidia0] :smile:" in results_text(pytest.fail, folder=tmp_path, items=FEW)
    assert "[/dev/nvidia0]" in rows_text([{"device": "[/dev/nvidia0]"}], as_json=False)


def test_the_versions_stand_below_the_table(tmp_path):
    old, new = "torch 2.11, lab aa", "torch 2.13, lab bb"
    first = {"name": "copies", "machine": "GPU A", "seconds": 1.5, "torch": "2.13", "versions": new}
    second = {"name": "compile", "machine": "GPU A", "seconds": 2.5, "torch": "2.13", "versions": new}
    write_results(tmp_path, first, second)
    text = results_text(pytest.fail, folder=tmp_path, items=FEW)
    assert text.splitlines()[-1] == f"  with {new}"
    assert "(1)" not in text
    write_results(tmp_path, first, second | {"versions": old}, {"name": FEW[2].name, "machine": "GPU A"})
    text = results_text(pytest.fail, folder=tmp_path, items=FEW)
    assert text.splitlines()[-3:] == [f"  (1) with {new}", f"  (2) with {old}", "  (3) with unknown versions"]
    assert cells(text, "copies (1)") == ["1.5", "-", "-"]
    assert cells(text, "compile (2)") == ["2.5", "-", "-"]


def test_the_page_of_results_and_notebook_90_have_the_table_of_the_files():
    text = results_text(pytest.fail)
    page = (ROOT / "lab" / "bench" / "README.md").read_text()
    assert text in page, f"the table in lab/bench/README.md should be\n{text}"
    cells = json.loads((ROOT / "notebooks" / "90_reproduce_paper.ipynb").read_text())["cells"]
    [cell] = [cell for cell in cells if "results_text(" in "".join(cell["source"])]
    assert "".join(cell["outputs"][0]["text"]) == text + "\n", "execute the cell of notebook 90 again"
