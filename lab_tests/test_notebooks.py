"""The notebooks as programs: what `lab run` does with them, and how they are stored."""

import json
import re

import nbformat
import pytest
from click.testing import CliRunner

from lab.cli import main
from lab.errors import NotebookError
from lab.notebooks import FOLDER, execute, find, with_parameters

NAMES = [notebook.name for notebook in find([])]
SMALL = {
    "00_memory_wall": {"lengths": "[64, 128]", "tokens": "256", "steps": "2", "ranks": "2"},
    "01_fsdp": {"tokens": "256", "steps": "2", "ranks": "3"},
    "07_profiling": {"ranks": "2", "tokens": "256"},
    "08_road_to_5m": {
        "model": "tiny",
        "ranks": "16",
        "device_memory": "12GiB",
        "host_memory": "64GiB",
        "tokens": "8M",
        "ladder_tokens": "4M",
        "fit_tokens": "10M",
        "stacks": "['checkpoint']",
        "yours": "tiny",
        "your_ranks": "16",
    },
    "09_your_model": {
        "model": "llama3.2-3b",
        "ranks": "2",
        "tokens": "256",
        "your_ranks": "16",
        "your_tokens": "2M",
    },
    "90_reproduce_paper": {
        "models": "['llama3-8b']",
        "methods": "['upipe', 'fpdt']",
        "lengths": "['128K']",
        "stacks": "['upipe']",
        "ablation": "False",
        "searched": "[]",
    },
}
"""Another size than the stored one: a notebook must hold at more than the numbers it was written with."""


def write(path, *sources, tags=("parameters",)):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = list(tags)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_each_notebook_runs_at_another_size(name, tmp_path):
    assert execute([name], SMALL[name], tmp_path) == []
    cells = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4).cells
    assert all(cell.execution_count for cell in cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", NAMES)
def test_each_notebook_is_stored_executed_small_and_without_a_trace_of_the_machine(name):
    path = FOLDER / f"{name}.ipynb"
    text = path.read_text()
    assert len(text) < 2**20
    assert not re.search(r"/(home|root|tmp|work|Users|venv)/", text)
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    assert not [o for cell in code for o in cell["outputs"] if o["output_type"] == "error"]
    assert any("image/png" in o.get("data", {}) for cell in code for o in cell["outputs"])


@pytest.mark.parametrize("name", NAMES)
def test_each_notebook_has_the_shape_of_all(name):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    headings = re.findall(
        r"^##+ (.+)$", "\n".join(c.source for c in cells if c.cell_type == "markdown"), re.M
    )
    order = ["Predict", "Run", "Look", "Explain", "Break it", "Exercise"]
    positions = [headings.index(heading) for heading in order]
    assert positions == sorted(positions)
    assert any("solution" in cell.metadata.get("tags", []) for cell in cells)
    for cell in cells:
        for body in re.findall(r"^def .*\n((?:[ \t]+.*\n?)+)", cell.source, re.M):
            assert len(body.strip().splitlines()) <= 5


def test_an_unknown_notebook_names_the_known_ones():
    with pytest.raises(
        NotebookError, match=r"unknown notebook '00_memory' \(did you mean 00_memory_wall\?\): the"
    ):
        find(["00_memory"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token": "5"}, "01_fsdp has no parameter 'token': it takes model, ranks"),
        ({"tokens": "many"}, "01_fsdp: tokens = 'many' is not a whole number: give a value like 512"),
        ({"tokens": "5.5"}, "01_fsdp: tokens = '5.5' is not a whole number"),
        ({"ranks": "True"}, "01_fsdp: ranks = 'True' is not a whole number"),
    ],
)
def test_an_unknown_or_ill_typed_parameter_is_refused(given, message):
    with pytest.raises(NotebookError, match=re.escape(message)):
        with_parameters(find(["01_fsdp"])[0], given)


def test_parameters_are_read_as_their_defaults_types(tmp_path):
    path = write(tmp_path / "n.ipynb", "a = 1\nb = 0.5\nc = 'x'\nd = [1]")
    [notebook] = find([path])
    assert notebook.defaults == {"a": 1, "b": 0.5, "c": "x", "d": [1]}
    given = {"a": "7", "b": "2", "c": "7", "d": "[3, 4]"}
    assert with_parameters(notebook, given) == {"a": 7, "b": 2.0, "c": "7", "d": [3, 4]}


def test_a_parameter_that_is_no_literal_is_refused(tmp_path):
    for source in ("a = 1 + 1", "import sys", "a = b = 3"):
        with pytest.raises(NotebookError, match=r"n\.ipynb: its parameters are to be literals, .* is none"):
            find([write(tmp_path / "n.ipynb", source)])
    with pytest.raises(NotebookError, match=r"n\.ipynb has no cell tagged 'parameters'"):
        find([write(tmp_path / "n.ipynb", "a = 1", tags=())])


def test_a_failure_names_the_cell_and_the_rank_and_exits_with_1(tmp_path):
    fails = """
import lab

def fail(tokens):
    import torch.distributed as dist
    if dist.get_rank() == 1:
        raise RuntimeError(f"no room for {tokens}")

with lab.Cluster(ranks=2) as cluster:
    cluster.apply(fail, tokens)
"""
    bad = write(tmp_path / "bad.ipynb", "tokens = 7", fails)
    good = write(tmp_path / "good.ipynb", "tokens = 7", "assert tokens == 9")
    out = tmp_path / "out"
    result = CliRunner().invoke(main, ["run", bad, good, "-p", "tokens", "9", "--out", str(out)])
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "failed bad, cell 2: RankError: rank 1 failed" in said
    assert "no room for 9" in said
    assert "passed good" in said
    assert "lab: 1 failed: bad" in said
    assert nbformat.read(out / "good.ipynb", as_version=4).cells[-1].execution_count


def test_the_originals_are_never_written_over():
    result = CliRunner().invoke(main, ["run", "01_fsdp", "--out", str(FOLDER)])
    assert result.exit_code == 2
    assert "is where the notebooks are: name another folder" in result.stderr
