"""The notebooks as programs: `lab execute`, and how notebooks are stored."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from click.testing import CliRunner
from nbval.plugin import IPyNbFile, coalesce_streams

from cluster import limits
from cluster.processes import wait_for_end
from lab import models
from lab.commands.cli import main
from lab.errors import NotebookError
from lab.jupyter import executing
from lab.jupyter.executing import (
    execute,
    execute_one,
    find_notebooks,
    folder_for_sockets,
    known_seconds,
    parse_parameters,
)
from lab.jupyter.notebook_files import FOLDER, code_cells, read_notebook, source_hash, write_notebook
from lab.jupyter.storing import find_stale
from lab_tests.proofs.notebooks import FACT, changed_facts, measure_notebooks
from lab_tests.support.commands import refusal
from lab_tests.support.warm_kernels import warm_kernels

NAMES = [notebook.name for notebook in find_notebooks([])]
SMALL = {
    "00_memory_wall": "model={model} tokens=128 lengths=[32,64,128] ranks=2 steps=2",
    "01_fsdp": "model={model} tokens=128 ranks=2 steps=2",
    "02_ulysses": "model={model} tokens=128 ranks=2",
    "03_activation_checkpointing": "model={model} tokens=1024 ranks=2",
    "04_cpu_offload": "model={model} tokens=384 ranks=2",
    "05_sequence_tiling": "model={model} tokens=384 layers=1 ranks=2 big={model} big_tokens=64K",
    "06_untied_ulysses": (
        "model={model} tokens=512 layer_tokens=1024 lessons=70 ranks=2 big={model} big_ranks=4 "
        "big_tokens=64K exercise_tokens=32K"
    ),
    "07_profiling": "model={model} tokens=80 ranks=2 steps=2",
    "08_road_to_5m": (
        "model={model} ranks=2 yours={model} your_ranks=2 tokens=64K ladder_tokens=64K fit_tokens=64K "
        "stacks=['offload']"
    ),
    "09_your_model": (
        "model={model} tokens=128 ranks=2 your_ranks=2 your_tokens=64K lengths=['64K','128K'] "
        "device_memory=4GiB"
    ),
    "10_past_five_million": (
        "model={model} tokens=64K segment=2 further=96K further_ranks=8 further_ulysses=8 tiny_tokens=128 "
        "tiny_tiles=4 chunks=[32] yours={model} your_tokens=64K your_ranks=8 your_ulysses=8"
    ),
    "11_your_trainer": "model={model} tokens=256 big={model} big_tokens=4K big_lora=4",
    "12_stages_and_overlap": "model={model} layer_tokens=1024 ranks=2 big=tiny planned=[[8,'64K']]",
    "13_ring": (
        "model={model} tokens=256 ranks=2 big={model} big_tokens=64K exercise={model} exercise_ranks=16 "
        "exercise_tokens=64K"
    ),
    "90_reproduce_paper": (
        "models=['llama3-8b'] methods=['upipe','fpdt'] lengths=['128K'] stacks=['upipe'] ablation=False "
        "searched=[] others=False trl_ranks=[] stages=[1,2] stage_tokens=128K"
    ),
}
"""Another size than the stored one: a notebook must hold at more than the numbers it was written with."""


@pytest.fixture(scope="session")
def kernels():
    with warm_kernels() as folder:
        yield folder


@pytest.fixture
def warm(kernels, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "")
    monkeypatch.setattr(executing, "KERNELS", kernels)


def of_eight_heads():
    config = models.config_of("tiny")
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 8, 8
    return config


def write(path, *sources, tags=("parameters",)):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = list(tags)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return str(path)


def differences(session, stored, copy):
    """What nbval finds between a notebook's stored facts and its executed copy's; how many facts."""
    reference = IPyNbFile.from_parent(session, path=stored)
    reference.compare_outputs = False  # but for cells that say so
    executed = [cell for cell in nbformat.read(copy, as_version=4).cells if cell.cell_type == "code"]
    found, facts = [], 0
    for fact, cell in zip(reference.collect(), executed, strict=True):
        assert fact.cell.source == cell.source
        if fact.options["check"]:
            facts += 1
            # What a cell prints comes in as many pieces as time has it. A wait says on stderr what goes on.
            printed, stored_print = (
                coalesce_streams([output for output in outputs if output.get("name") != "stderr"])
                for outputs in (cell.outputs, fact.cell.outputs)
            )
            if not fact.compare_outputs(printed, stored_print):
                found += fact.comparison_traceback
    return found, facts


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_each_notebook_runs_to_its_end_and_its_facts_are_the_stored_ones(name, tmp_path, request):
    """nbval alone would execute it, and papermill once more: here papermill executes and nbval compares."""
    [notebook] = find_notebooks([name])
    done = execute_one(notebook, {}, tmp_path)
    assert done.failure is None
    found, facts = differences(request.session, notebook.path, done.copy)
    assert changed_facts(notebook.path, done.copy) == []
    assert not found, "\n".join(found)
    assert facts > 1


@pytest.mark.long
def test_a_fact_that_changed_is_found(tmp_path, request):
    path = write(tmp_path / "n.ipynb", "a = 7", "print(a)", "print(id(a))")
    marked = nbformat.read(path, as_version=4)
    marked.cells[1].metadata["tags"] = [FACT]
    nbformat.write(marked, path)
    [notebook] = find_notebooks([path])
    notebook.path.write_bytes(execute_one(notebook, {}, tmp_path / "first").copy.read_bytes())
    again = execute_one(notebook, {}, tmp_path / "again").copy
    assert differences(request.session, notebook.path, again) == ([], 1)
    again.write_text(again.read_text().replace('"7\\n"', '"8\\n"'))
    found, _ = differences(request.session, notebook.path, again)
    assert changed_facts(notebook.path, again) == ["cell of code 1: '8', stored '7'"]
    assert "7" in "".join(found)
    assert "8" in "".join(found)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_at_another_size(name, tmp_path):
    models.save(models.build(of_eight_heads()), tmp_path / "model")
    given = dict(pair.split("=", 1) for pair in SMALL[name].format(model=tmp_path / "model").split())
    assert execute([name], given, tmp_path) == []
    cells = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)


@pytest.mark.first
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
    assert sum(FACT in cell["metadata"].get("tags", []) for cell in code) > 1


@pytest.mark.first
@pytest.mark.parametrize("name", NAMES)
def test_each_notebook_has_the_shape_of_all(name):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    headings = re.findall(
        r"^##+ (.+)$", "\n".join(c.source for c in cells if c.cell_type == "markdown"), re.M
    )
    order = ["Predict", "Run", "Look", "Explain", "Break it", "Exercise"]
    positions = [headings.index(heading) for heading in order]
    assert positions == sorted(positions)
    tags = [tag for cell in cells for tag in cell.metadata.get("tags", [])]
    assert "solution" in tags
    assert tags.count(FACT) > 1
    assert cells[-1].source == f'lab.show.questions("{name}")'
    assert "(README.md#letters-terms-and-colours)" in cells[0].source
    for cell in cells:
        if {"stub", "solution"} & {*cell.metadata.get("tags", [])}:
            continue
        for body in re.findall(r"^def .*\n((?:[ \t]+.*\n?)+)", cell.source, re.M):
            assert len(body.strip().splitlines()) <= 5


def test_an_unknown_notebook_names_the_known_ones():
    with pytest.raises(
        NotebookError, match=r"unknown notebook '00_memory' \(did you mean 00_memory_wall\?\): the"
    ):
        find_notebooks(["00_memory"])


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
        parse_parameters(find_notebooks(["01_fsdp"])[0], given)


def test_parameters_are_read_as_their_defaults_types(tmp_path):
    path = write(tmp_path / "n.ipynb", "a = 1\nb = 0.5\nc = 'x'\nd = [1]")
    [notebook] = find_notebooks([path])
    assert notebook.defaults == {"a": 1, "b": 0.5, "c": "x", "d": [1]}
    given = {"a": "7", "b": "2", "c": "7", "d": "[3, 4]"}
    assert parse_parameters(notebook, given) == {"a": 7, "b": 2.0, "c": "7", "d": [3, 4]}


def test_an_annotated_parameter_has_the_type_that_it_says(tmp_path):
    cell = (
        "a: int = 1\nb: float = 1\nc: 'str | None' = None\nd: int | None = 2\ne: list[int] = []\nf = None\n"
        "g = (1, 2)"
    )
    [notebook] = find_notebooks([write(tmp_path / "n.ipynb", cell)])
    for name, text, value in (
        ("a", "7", 7), ("b", "0.5", 0.5), ("b", "3", 3.0), ("c", "5", "5"), ("c", "1e3", "1e3"),
        ("c", "None", None),
        ("d", "None", None), ("d", "3", 3), ("e", "[4]", [4]), ("f", "x", "x"), ("f", "3", 3),
    ):  # fmt: skip
        [found] = parse_parameters(notebook, {name: text}).values()
        assert (found, type(found)) == (value, type(value))
    for name, text, said in (
        ("a", "0.5", "a whole number"),
        ("d", "1.5", "a whole number or None"),
        ("g", "3", "tuple"),
    ):
        with pytest.raises(NotebookError, match=f"{name} = '{text}' is not {said}: give a value like"):
            parse_parameters(notebook, {name: text})
    with pytest.raises(NotebookError, match=r"a: Path is no type of a parameter: give some of int, float, "):
        find_notebooks([write(tmp_path / "n.ipynb", "a: Path = 'x'")])


@pytest.mark.usefixtures("warm")
def test_a_copy_keeps_the_values_with_which_it_was_executed_and_a_name_is_given_once(tmp_path, capsys):
    path = write(tmp_path / "n.ipynb", "a: float | None = 1.0\nb = 2", "print(a, b)")
    (tmp_path / "n.ipynb").write_text(Path(path).read_text(), encoding="utf-8-sig")
    copy = tmp_path / "one" / "n.ipynb"
    for source, parameters, printed in ((path, {"a": "1e999"}, "inf 2"), (str(copy), {"b": "7"}, "inf 7")):
        assert execute([source], parameters, tmp_path / ("one" if source == path else "two")) == []
        last = nbformat.read(tmp_path / ("one" if source == path else "two") / "n.ipynb", as_version=4)
        assert last.metadata.papermill.input_path == source
        assert last.cells[-1].outputs[0].text == f"{printed}\n"
    said = capsys.readouterr().err
    assert "n is a copy that was executed with a=inf: that still holds" in said
    assert "unknown parameter" not in said
    said = refusal(f"execute {path} -p a 2 -p a 3")
    assert said == "Invalid value for '-p': a is given 2 times: give it once."


@pytest.mark.usefixtures("warm")
def test_a_kernel_that_dies_is_said_with_its_cell_and_what_ended_it(tmp_path, monkeypatch):
    [notebook] = find_notebooks([write(tmp_path / "n.ipynb", "a = 0", "1", "import os; os._exit(9)", "2")])
    assert execute_one(notebook, {}, tmp_path / "out").failure == "cell 2: the kernel died"
    monkeypatch.setattr(limits, "killed_for_memory", iter([3, 4]).__next__)
    said = execute_one(notebook, {}, tmp_path / "out").failure
    assert said == "cell 2: the kernel died: memory was used up; a smaller size needs less"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("_interruptible")
def test_a_signal(number, tmp_path):
    notebook = write(tmp_path / "n.ipynb", "a = 0", "open('started', 'w'); import time; time.sleep(600)")
    command = [sys.executable, "-m", "lab", "execute", notebook, "--out", str(tmp_path / "out")]
    variables = {**os.environ, "TMPDIR": str(tmp_path / "t")}
    (tmp_path / "t").mkdir()
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=variables) as process:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.1)
        assert [*(tmp_path / "t").glob("lab-*")]
        kernels = psutil.Process(process.pid).children()
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    lines = [line for line in said.splitlines() if line and "cell/s" not in line and "s/cell" not in line]
    assert lines == ["lab: interrupted"]
    assert kernels
    assert wait_for_end(kernels, 10) == []
    assert not [*(tmp_path / "t").iterdir()]


def test_the_kernel_is_the_python_of_the_lab(tmp_path, monkeypatch):
    """Whatever other Python has a kernel of this name, in the place that Jupyter prefers."""
    other = tmp_path / "share" / "kernels" / "python3"
    other.mkdir(parents=True)
    spec = {"argv": ["/usr/bin/false"], "display_name": "Python 3", "language": "python"}
    (other / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    write(tmp_path / "n.ipynb", "a = 0", "import sys; print(sys.executable)")
    [notebook] = find_notebooks([str(tmp_path / "n.ipynb")])
    done = execute_one(notebook, {}, tmp_path / "out")
    assert done.failure is None
    [output] = nbformat.read(done.copy, as_version=4).cells[-1].outputs
    assert Path(output.text.strip()).samefile(sys.executable)


def test_a_parameter_that_is_no_literal_is_refused(tmp_path):
    for cell in ("a = 1 + 1", "import sys", "a = b = 3", "a: int"):
        with pytest.raises(
            NotebookError, match=r"n\.ipynb: its parameters must be literals, and .* is not one"
        ):
            find_notebooks([write(tmp_path / "n.ipynb", cell)])
    with pytest.raises(NotebookError, match=r"n\.ipynb has no cell tagged 'parameters'"):
        find_notebooks([write(tmp_path / "n.ipynb", "a = 1", tags=())])


@pytest.mark.long
@pytest.mark.usefixtures("warm")
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
    result = CliRunner().invoke(main, ["execute", bad, good, "-p", "tokens", "9", "--out", str(out)])
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "failed bad, cell 2: RankError: rank 1 failed" in said
    assert "no room for 9" in said
    assert "passed good" in said
    assert "lab: 1 failed: bad" in said
    assert nbformat.read(out / "good.ipynb", as_version=4).cells[-1].execution_count


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_failures_and_seconds_are_counted(tmp_path):
    bad = write(tmp_path / "bad.ipynb", "a = 0", "1 / a")
    good = write(tmp_path / "good.ipynb", "a = 0")
    dead = write(tmp_path / "dead.ipynb", "a = 0", "import os\nos._exit(3)")
    failed, gone, fine = measure_notebooks([bad, dead, good], 2, print)
    assert gone["failed"] == 2
    assert gone["first failure"] == "cell 1: the kernel died"
    assert (failed["notebook"], failed["executed"], failed["failed"]) == ("bad", 2, 2)
    assert failed["first failure"] == "cell 1: ZeroDivisionError: division by zero"
    assert (fine["failed"], fine["first failure"]) == (0, None)
    assert 0 < fine["seconds, median"] <= fine["worst"]


@pytest.mark.usefixtures("warm")
def test_a_notebook_is_stored_in_place_without_papermills_traces(tmp_path):
    """And executed once more it is the same file: the widget keeps its random ids."""
    shown = "from ipywidgets import HBox, IntSlider\ndisplay(HBox([IntSlider(n), IntSlider(8)]))\nn"
    path = Path(write(tmp_path / "n.ipynb", "n = 7", shown))
    assert execute([str(path)], {}, tmp_path / "copies", in_place=True) == []
    stored = path.read_text()
    cells = nbformat.reads(stored, as_version=4).cells
    assert [cell.execution_count for cell in cells] == [1, 2]
    assert [output.output_type for output in cells[1].outputs] == ["display_data", "execute_result"]
    assert "papermill" not in stored
    assert execute([str(path)], {}, tmp_path / "copies", in_place=True) == []
    assert path.read_text() == stored
    with pytest.raises(NotebookError, match=r"--in-place stores .*: leave out -p"):
        execute([str(path)], {"n": "8"}, tmp_path / "copies", in_place=True)


@pytest.mark.usefixtures("warm")
def test_what_the_system_refuses_to_write_fails_one_notebook_alone(tmp_path):
    """A limit on the size of files, in place of a disk that is full."""
    big = write(tmp_path / "big.ipynb", "a = 0", "print('x' * 400_000)")
    small = write(tmp_path / "[small].ipynb", "a = 0")
    out = tmp_path / "out"
    out.mkdir()
    (out / "big.ipynb").write_text("of an earlier time")
    lab = [sys.executable, "-m", "lab", "execute", big, small, "--out", str(out)]
    limited = ["prlimit", "--fsize=200000", *lab]
    # A compiled module that is cut short would stay.
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(limited, capture_output=True, text=True, timeout=300, env=variables)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith(("failed", "passed", "lab"))]
    assert lines[0] == f"failed big, {out / 'big.ipynb'}: File too large"
    assert lines[1].startswith("passed [small] in")
    assert "Traceback" not in done.stderr
    assert [path.name for path in out.iterdir()] == ["[small].ipynb"]


def test_a_notebook_is_not_started_where_it_cannot_have_its_threads(tmp_path, monkeypatch):
    """ZeroMQ would end this process."""
    [notebook] = find_notebooks([write(tmp_path / "n.ipynb", "a = 0")])
    monkeypatch.setattr(limits, "free_threads", lambda: 12)
    done = execute_one(notebook, {}, tmp_path / "out")
    assert "a kernel needs about 20 threads, and 12 can be started here" in done.failure
    assert not done.copy.exists()


def test_a_notebook_is_written_through_a_link_and_keeps_its_mode(tmp_path):
    path, link = tmp_path / ("n" * 240 + ".ipynb"), tmp_path / "link.ipynb"
    write(path, "a = 0")
    path.chmod(0o600)
    link.symlink_to(path)
    write_notebook(nbformat.v4.new_notebook(), link)
    assert link.is_symlink()
    assert nbformat.read(path, as_version=4).cells == []
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [link, path]


@pytest.mark.usefixtures("warm")
def test_a_line_of_four_million_letters_and_a_long_folder_for_temporary_files(tmp_path, monkeypatch):
    longest = tmp_path / ("x" * 120)
    longest.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longest))
    cell = "print('x' * 4_000_000)\nprint('  7 %\\r 99 %\\r100 %')"
    assert execute([write(tmp_path / "n.ipynb", "a = 0", cell)], {}, tmp_path / "out") == []
    [output] = nbformat.read(tmp_path / "out" / "n.ipynb", as_version=4).cells[1].outputs
    assert output.text == "x" * 4_000_000 + "\n100 %\n"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(longest))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NotebookError, match="at most 77 bytes: set TMPDIR to one"):
        folder_for_sockets()


def test_the_originals_are_never_written_over(tmp_path):
    mine = write(tmp_path / "mine.ipynb", "a = 0")
    before = Path(mine).read_bytes()
    for name, folder in (("01_fsdp", FOLDER), (mine, tmp_path), (mine, tmp_path / "x" / "..")):
        result = CliRunner().invoke(main, ["execute", name, "--out", str(folder)])
        assert result.exit_code == 2
        assert f"is where {Path(name).stem}.ipynb is: name another folder" in result.stderr
    assert Path(mine).read_bytes() == before


def test_the_seconds_of_each_notebook_are_known():
    assert list(known_seconds()) == [name[:2] for name in NAMES]


@pytest.mark.first
@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_of_a_notebook_and_the_sources_that_it_shows_are_the_current_ones(name):
    assert find_stale(FOLDER / f"{name}.ipynb") is None, "lab execute --stale --in-place"


@pytest.mark.usefixtures("warm")
def test_stale_notebooks_alone_are_executed_in_place_and_are_current_then(tmp_path):
    imports = "import lab\nfrom lab.errors import NotebookError"
    edited = Path(write(tmp_path / "edited.ipynb", "n = 7"))
    shows = Path(write(tmp_path / "shows.ipynb", "n = 7", imports, "lab.show.source(NotebookError)"))

    def run(*paths):
        given = ["execute", "--stale", "--in-place", "--out", str(tmp_path / "out"), *map(str, paths)]
        result = CliRunner().invoke(main, given)
        assert result.exit_code == 0, result.output
        return [line for line in result.stderr.splitlines() if line.startswith(("stale", "no notebook"))]

    new, changed = "lab execute --in-place has not stored its outputs", "its code has changed"
    assert run(edited, shows) == [f"stale: edited, {new}", f"stale: shows, {new}"]
    assert run(edited, shows) == ["no notebook is stale"]
    current = shows.read_text()
    shows.write_text(current.replace("class NotebookError(", "class OldError("))
    edited.write_text(edited.read_text().replace("n = 7", "n = 8"))
    older = "lab.show.source(NotebookError) does not show the current code"
    assert run(edited, shows) == [f"stale: edited, {changed}", f"stale: shows, {older}"]
    assert shows.read_text() == current
    assert run(edited, shows) == ["no notebook is stale"]
    document = json.loads(current)
    document["cells"][-1]["outputs"] = []
    shows.write_text(json.dumps(document))
    assert find_stale(shows) == older
    document["metadata"]["lab"] = "mine"
    shows.write_text(json.dumps(document))
    assert find_stale(shows) == new


def test_code_that_a_notebook_shows_and_that_is_gone_is_one_clear_line(tmp_path):
    path = Path(write(tmp_path / "gone.ipynb", "n = 7", "import lab_of_before", "lab.show.source(n)"))
    notebook = read_notebook(path)
    notebook.metadata.lab = {"executed": source_hash(code_cells(notebook))}
    nbformat.write(notebook, path)
    said = "gone.ipynb: the code that it shows cannot be found: No module named 'lab_of_before'"
    with pytest.raises(NotebookError, match=said):
        find_stale(path)
