"""The stubs of the notebooks: what `lab check` says of right and of wrong code; it leaves nothing."""

import re
from importlib import import_module

import nbformat
import psutil
import pytest
from click.testing import CliRunner

from cluster.ranks import Cluster
from lab.commands.cli import main
from lab.errors import NotebookError
from lab.jupyter.copies import make_copies
from lab.jupyter.notebook_files import FOLDER
from lab.jupyter.stubs import head_schedule, process
from lab.jupyter.stubs.check import STUBS, check, find_copy, find_stub, solution_of, stub_of, without_magic
from lab.jupyter.stubs.stub import Wrong, title

EXCHANGE, HEADS = (without_magic(solution_of(name)) for name in ("02_ulysses", "06_untied_ulysses"))

WRONG = [
    ("03", "return layer(x)", "return layer(2 * x)", r"the output differs from layer\(x\)"),
    ("03", "backward(dy)", "backward(2 * dy)", "of x is wrong; its norm is 2 times the right one"),
    ("03", "x.grad", "dy", "the gradient of x is wrong"),
    (
        "03", "ctx.layer(x).backward(dy)", "x.grad = torch.autograd.grad(ctx.layer(x), x, dy)[0]",
        r"up\.weight has no gradient",
    ),
    (
        "03", "(x)\n        with", "(x)\n        ctx.up = layer.up(x).clone()\n        with",
        r"\d+ bytes are kept in addition to x",
    ),
    (
        "03", "with torch.enable_grad():", "ctx.layer(x)\n        with torch.enable_grad():",
        "the layer ran 1 times in forward and 2 times in backward",
    ),
    ("05", "place.copy_(x.grad)", "pass", r"x is wrong for \d+ tokens, the first of which is 0"),
    ("05", "None, None, dx", "None, None, 2 * dx", "the gradient of x is twice the right one"),
    ("03", "torch.enable_grad()", "torch.no_grad()", r"does not require grad.*torch\.enable_grad\(\)"),
    ("05", "None, None, dx", "None, None, dx[:, :60]", r"invalid gradient at index 0 - got \[1, 60, 6\]"),
    (
        "05", "x = x.detach()", "ctx.mlp.zero_grad()\n            x = x.detach()",
        r"the gradient of up\.weight is wrong",
    ),
    (
        "05", "place.copy_(x.grad)", "place.copy_(x.grad); ctx.mlp(x)",
        "backward ran the MLP 26 times; 62 tokens are 13 tiles of 5",
    ),
    (
        "05", "                ctx.mlp(x).backward(dy)",
        "                y = ctx.mlp(x)\n            y.backward(dy, retain_graph=True)\n"
        "            kept = [*locals().get('kept', []), y]",
        "free the graph of a tile before the next one runs",
    ),
    ("06", "return", "return -1, 0\n    return", "there is no query head -1"),
    ("06", "return", "return 0, 0\n    return", "query head 1 has no turn, and head 0 has several"),
    ("06", "return", "return stage * C + rank, key\n    return", "shares key/value head 0, and not 1"),
    (
        "06", "return", "return stage * C + rank, (stage * C + rank) // G\n    return",
        "a head that two ranks have is sent twice",
    ),
    (
        "06", "slot, turn = divmod(stage, G)", "turn, slot = divmod(stage, K // C)",
        "they are sent 8 times, and 2 times suffice",
    ),
    (
        "03", "ctx.layer(x).backward(dy)", "ctx.layer.zero_grad(); ctx.layer(x).backward(dy)",
        "after two backwards the gradient of up.weight is not the sum of both",
    ),
    (
        "05", "        dx = torch", "        ctx.mlp.zero_grad()\n        dx = torch",
        "after two backwards the gradient of up.weight is not the sum of both",
    ),
    ("05", "            x = x.detach().requires_grad_()\n", "", "a tile of x has no gradient, because a"),
    ("03", "return None, x.grad", "dy.zero_()\n        return None, x.grad", "has changed dy"),
    ("05", "ctx.mlp, ctx.tile = mlp, tile", "ctx.mlp, ctx.tile, x = mlp, tile, 2 * x", "output differs"),
    ("06", "return", "raise GeneratorExit\n    return", "line 6 of the cell, `raise GeneratorExit`"),
    ("06", "return", "return '\\ud800', 1\n    return", "must return two ints"),
    ("06", "return", "return None\n    return", "it returned None, and must return two ints"),
    ("06", "return", "return 1 / 0\n    return", "line 6 of the cell, `return 1 / 0`, raised ZeroDivision"),
    ("06", "def stage_heads", "def other", "the cell does not define stage_heads"),
    ("06", "def stage_heads", "def def", "line 1 of the cell is not valid Python"),
]  # fmt: skip
"""The notebook, what is replaced in its solution, by what, and what the reader is told."""

WRONG_IN_A_ROW = [
    ("03", [("ctx.layer", "Checkpointed.layer")], "of layer 0 of 3 is wrong: what forward keeps"),
    ("05", [("ctx.mlp", "TiledMLP.mlp")], "of layer 0 of 3 is wrong: what forward keeps"),
    ("03", [(".detach().requires_grad_()", ""), ("None, x.grad", "None, None")], "must run on a detached x"),
]
"""As ``WRONG``, with several changes, each wherever its text is: right for one call, and not in a row."""

WRONG_ON_RANKS = [
    ("received.view(C * s, H // C, D)", "received", r"the result is \[4, 5, 6, 3\]; it must be \[20, 6, 3\]"),
    (
        "received.view(C * s, H // C, D)", "received.transpose(0, 1).reshape(C * s, H // C, D)",
        r"rank \d, place \[1, 0\]: it must be token 1 of head (\d+), and it is token 5 of head \1",
    ),
    (
        "x.view(s, C, H // C, D).transpose(0, 1)", "x.view(s, H // C, C, D).permute(2, 0, 1, 3)",
        r"rank \d, place \[0, \d\]: it must be token 0 of head ",
    ),
    (
        "    dist.all_to_all_single(received, sent)\n", "    dist.all_to_all_single(received, sent)\n" * 2,
        r"it called dist\.all_to_all_single 2 times: call it once, and no other collective",
    ),
    ("received.view(C * s, H // C, D)", "received.view(C * s, H // C, D).float()", "is torch.float32"),
    ("    return received", "    x.zero_()\n    return received", "it has changed x"),
    ("received.view(C * s, H // C, D)", "received.view(C * s, H // C, D) * float('nan')", "not finite"),
    ("    s, H", "    if dist.get_rank() == 1:\n        x[99]\n    s, H", r"`x\[99\]`, raised IndexError"),
    ("    s, H", "    if dist.get_rank() == 1:\n        return x\n    s, H", r"\[5, 24, 3\]; it must be"),
    (
        "    s, H", "    if dist.get_rank() == 1:\n        return x.new_ones(20, 6, 3)\n    s, H",
        r"^not all ranks join the collective in line \d of the cell, `dist\.all_to_all_single.*`$",
    ),
]  # fmt: skip


def stub_named(number):
    return import_module(f"lab.jupyter.stubs.{STUBS[find_stub(number)]}").STUB


def broken(right, old, new, count=1):
    assert old in right
    return right.replace(old, new, count)


@pytest.mark.parametrize("number", ["03", "05", "06"])
def test_the_solution_is_right_and_an_unwritten_stub_says_so(number):
    stub = stub_named(number)
    ready = []
    right = list(process.report(stub, without_magic(solution_of(find_stub(number))), lambda: ready.append(1)))
    assert ready == [1]
    assert right == [(title(one), None) for one in stub.checks]
    *_, unwritten = process.report(stub, stub_of(FOLDER / f"{find_stub(number)}.ipynb"), int)
    assert unwritten[1] == f"{stub.name} is not written yet"


@pytest.mark.parametrize(("number", "changes", "said"), WRONG_IN_A_ROW)
def test_code_that_is_right_for_one_call_alone_is_wrong_in_a_row(number, changes, said):
    code = solution_of(find_stub(number))
    for old, new in changes:
        code = broken(code, old, new, -1)
    *before, (where, wrong) = process.report(stub_named(number), code, int)
    assert [one for _, one in before] == [None] * 4
    assert where.startswith("Three ")
    assert re.search(said, wrong), wrong


@pytest.mark.parametrize(("number", "old", "new", "said"), WRONG)
def test_wrong_code_is_told_what_is_wrong(number, old, new, said):
    code = broken(solution_of(find_stub(number)), old, new)
    *before, (_, wrong) = process.report(stub_named(number), code, int)
    assert all(message is None for _, message in before)
    assert re.search(said, wrong)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(ranks=4, timeout=5) as cluster:
        yield cluster


@pytest.mark.long
def test_code_on_ranks_is_told_what_is_wrong_and_on_which_rank(cluster):
    """All in one test, on ranks that are started once."""
    stub = stub_named("02")
    right = [process._on_ranks(cluster, stub, EXCHANGE, number) for number in range(3)]
    assert right == [None, None, None]
    for old, new, said in WRONG_ON_RANKS:
        source = broken(EXCHANGE, old, new)
        found = (process._on_ranks(cluster, stub, source, number) for number in range(3))
        assert re.search(said, next(message for message in found if message is not None))


def test_every_notebook_with_a_stub_has_one_of_at_most_fifteen_lines_and_its_solution_after_it():
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        places = [i for i, cell in enumerate(cells) if "stub" in cell.metadata.get("tags", [])]
        assert len(places) == (path.stem in STUBS)
        for place in places:
            assert len(cells[place].source.splitlines()) <= 15
            assert "NotImplementedError" in cells[place].source
            assert "solution" in cells[place + 1].metadata["tags"]
            assert f"`lab check {path.stem[:2]}`" in cells[place - 1].source


def participant(tmp_path, notebook, source):
    """A participant's copy with this code in its stub."""
    make_copies(tmp_path)
    path = tmp_path / f"{notebook}.ipynb"
    copy = nbformat.read(path, as_version=4)
    [stub] = [cell for cell in copy.cells if "stub" in cell.metadata.get("tags", [])]
    stub.source = source
    nbformat.write(copy, path)
    return path


@pytest.mark.long
def test_lab_check_reads_the_saved_copy_and_turns_green(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    participant(tmp_path / "my_notebooks", "06_untied_ulysses", HEADS)
    said = CliRunner().invoke(main, ["check", "06"])
    assert said.exit_code == 0, said.output
    first, *lines = said.stdout.splitlines()
    assert re.fullmatch(r"my_notebooks/06_untied_ulysses.ipynb, saved at \d\d:\d\d:\d\d; .*", first)
    assert [line[:2] for line in lines] == ["✓ "] * 4
    red = CliRunner().invoke(main, ["check", "03"])
    assert red.exit_code == 1
    assert red.stdout.splitlines()[1:] == ["✗ The output is the layer's: Checkpointed is not written yet"]
    shown = CliRunner().invoke(main, ["check", "06", "--solution"])
    assert shown.stdout == solution_of("06_untied_ulysses") + "\n"


def test_an_answer_on_ranks_is_right_and_leaves_nothing():
    answers = [*check("02_ulysses", EXCHANGE)]
    assert len(answers) == 3
    assert [answer.wrong for answer in answers] == [None] * 3


def test_ranks_that_cannot_start_are_said_in_a_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    [answer] = check("02_ulysses", EXCHANGE)
    assert answer.title == "The ranks start"
    assert answer.wrong.endswith("Not a directory; set XDG_STATE_HOME to a folder of your own")


ORPHAN = "import subprocess; subprocess.Popen(['sleep', '4321'], start_new_session=True)"


@pytest.mark.parametrize(
    ("code", "seconds", "title", "wrong"),
    [
        ("while True: pass", 8, "The cell returns", "it did not within 8 s, and was ended"),
        (
            "input()", 60, "Every query head has its turn once",
            r"line 7 of the cell, `input\(\)`, raised EOFError: EOF when reading a line",
        ),
        ("import os; os._exit(7)", 60, "The cell returns", "it ended its process, with exit code 7"),
        (ORPHAN, 60, "The cell leaves nothing running", "it left sleep running, now ended"),
        (
            # The process that starts it is gone when this returns, and it is sleep by then.
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ORPHAN!r}])", 60,
            "The cell leaves nothing running", "it left sleep running, now ended",
        ),
    ],
)  # fmt: skip
@pytest.mark.long
def test_a_cell_that_hangs_dies_or_leaves_a_process_is_ended_and_said(code, seconds, title, wrong):
    *_, last = check("06_untied_ulysses", f"{HEADS}\n{code}\n", seconds=seconds)
    assert last.title == title
    assert re.fullmatch(wrong, last.wrong), last.wrong
    assert ["sleep", "4321"] not in [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])]
    commands = [" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "lab.jupyter.stubs.process" in command]


def test_what_cannot_be_checked_is_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotebookError, match=r"'04' is no notebook with a stub; these have one: 02_ulysses, "):
        find_stub("04")
    with pytest.raises(
        NotebookError, match=r"no copy of 02_ulysses in .* or .*/my_notebooks: `lab open` makes"
    ):
        find_copy("02_ulysses", None)
    with pytest.raises(NotebookError, match="no copy of 02_ulysses"):
        find_copy("02_ulysses", FOLDER)
    path = participant(tmp_path, "02_ulysses", EXCHANGE)
    assert find_copy("02_ulysses", None).resolve() == path
    copy = nbformat.read(path, as_version=4)
    copy.cells = [cell for cell in copy.cells if "stub" not in cell.metadata.get("tags", [])]
    nbformat.write(copy, path)
    with pytest.raises(NotebookError, match="0 cells of code are tagged 'stub', and one must be"):
        stub_of(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"no notebook: it is not JSON \(Expecting property name"),
        ("[" * 100_000, r"no notebook: it is not JSON \(maximum recursion"),
        ("[]", "no notebook: its JSON has no 'nbformat'"),
        ('{"cells": []}', "no notebook: its JSON has no 'nbformat'"),
        ('{"nbformat": 3, "nbformat_minor": 0, "worksheets": []}', "of format 3: the lab reads format 4, to"),
        ('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": 3}', "notebook of format 4: 'cells'"),
        ('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}', "'cells' must be a list of o"),
        ('{"nbformat": 4, "nbformat_minor": 5, "cells": []}', "of format 4: 'metadata' is a required"),
    ],
    ids=range(8),
)
def test_a_file_that_is_no_notebook_is_refused_by_what_is_wrong(tmp_path, text, said):
    path = tmp_path / "02_ulysses.ipynb"
    path.write_text(text)
    with pytest.raises(NotebookError, match=rf"02_ulysses\.ipynb is .*{said}"):
        stub_of(path)


def test_a_command_of_ipython_in_a_stub_is_named():
    with pytest.raises(Wrong, match=r"^line 3 of the cell is a command of IPython, not Python: write it in"):
        head_schedule.STUB.check(0, "def f():\n    x = 3\n    %time x\n")
