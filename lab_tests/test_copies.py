"""A reader's own copies: what they contain, and that nothing in them is ever written over."""

import os
import shutil
import socket
import subprocess
import sys

import nbformat
import pytest
from click.testing import CliRunner

from lab.commands.cli import main
from lab.errors import NotebookError
from lab.jupyter import serving
from lab.jupyter.copies import make_copies
from lab.jupyter.notebook_files import FOLDER

NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def cells(path, kind="code"):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    return {teacher: make_copies(folder / str(teacher), teacher=teacher) for teacher in (False, True)}


def test_a_participants_copy_has_no_outputs_and_no_solutions(copies):
    assert copies[False].made == tuple(NAMES)
    for name in NAMES:
        solutions = {
            cell.source
            for cell in cells(FOLDER / f"{name}.ipynb")
            if "solution" in cell.metadata.get("tags", [])
        }
        copied = cells(copies[False].folder / f"{name}.ipynb")
        assert solutions
        assert not [cell for cell in copied if cell.outputs or cell.execution_count]
        assert not solutions & {cell.source for cell in copied}
        assert not [cell for cell in copied if cell.metadata.get("jupyter", {}).get("source_hidden")]
    assert "!lab check 02" in [cell.source for cell in cells(copies[False].folder / "02_ulysses.ipynb")]


def test_a_teachers_copy_has_outputs_and_solutions(copies):
    assert copies[True].made == tuple(NAMES)
    for name in NAMES:
        assert cells(copies[True].folder / f"{name}.ipynb") == cells(FOLDER / f"{name}.ipynb")


def test_what_a_notebook_links_to_is_copied_too(copies):
    for path in (FOLDER / "README.md", *(FOLDER / "images").iterdir()):
        assert (copies[False].folder / path.relative_to(FOLDER)).read_bytes() == path.read_bytes()


def test_no_cell_needs_a_solution(copies):
    """A participant's copy runs to its end: what a solution defines is used in solutions alone."""
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", copies[False].folder]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "All checks passed!\n"), done.stdout


def test_nothing_is_written_over_and_another_version_is_said(tmp_path):
    make_copies(tmp_path)
    mine, old, broken = (tmp_path / f"{name}.ipynb" for name in NAMES[:3])
    notebook = nbformat.read(mine, as_version=4)
    notebook.cells[0].source = "my notes"
    nbformat.write(notebook, mine)
    notebook = nbformat.read(old, as_version=4)
    notebook.metadata.lab.version = "of another time"
    nbformat.write(notebook, old)
    broken.write_text("{")
    (tmp_path / f"{NAMES[3]}.ipynb").unlink()
    before = [path.read_bytes() for path in (mine, old, broken)]
    again = make_copies(tmp_path)
    assert again.made == (NAMES[3],)
    assert again.outdated == (NAMES[1], NAMES[2])
    assert [path.read_bytes() for path in (mine, old, broken)] == before


def test_lab_open_says_where_the_copies_are_and_serves_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    served = []
    monkeypatch.setattr(serving, "serve", lambda folder, **options: served.append((folder, options)))
    said = CliRunner().invoke(main, ["open", "--no-browser", "--port", "8931"])
    assert said.exit_code == 0, said.output
    folder = tmp_path / "my_notebooks"
    assert said.stderr == f"lab: your notebooks are in {folder}; {len(NAMES)} are new\n"
    (folder / f"{NAMES[0]}.ipynb").write_text("{")
    said = CliRunner().invoke(main, ["open", "--no-browser", "--port", "8931"])
    assert said.stderr.splitlines()[0].endswith("; 0 are new")
    assert f"lab: kept, though the lab has another version: {NAMES[0]}; move a file away" in said.stderr
    CliRunner().invoke(main, ["open", "--no-browser", "--port", "8931", "--teacher"])
    assert served == [
        (tmp_path / name, {"port": 8931, "browser": False, "ip": "127.0.0.1"})
        for name in ("my_notebooks", "my_notebooks", "teacher_notebooks")
    ]


def test_the_address_is_printed_where_the_token_is_the_users(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lab", "open", "--no-browser", "--port", str(port)]
    variables = {**os.environ, "JUPYTER_TOKEN": "secret", "JUPYTER_CONFIG_DIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as server:
        line = server.stdout.readline()
        server.terminate()
    address = f"http://127.0.0.1:{port}/lab/tree/{NAMES[0]}.ipynb"
    assert line == f"JupyterLab runs at {address}, with the token or password that you have configured\n"


@pytest.mark.long
def test_a_wheel_has_the_notebooks(tmp_path):
    """Built of the files that git knows, and used where the clone is not on the path."""
    root, clone, site = FOLDER.parent, tmp_path / "clone", tmp_path / "site"
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, clone / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, clone], check=True)
    [wheel] = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    code = """
from pathlib import Path
from lab.bench import results
from lab.jupyter.copies import make_copies
from lab.jupyter.notebook_files import FOLDER
print(FOLDER, len(make_copies(Path("copies")).made), len([*results.FOLDER.iterdir()]))
"""
    variables = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    many = len([*(FOLDER / "results").iterdir()])
    assert done.stdout == f"{site}/lab/jupyter/notebooks {len(NAMES)} {many}\n", done.stderr
    book = [sys.executable, "-P", "-m", "lab", "book"]
    said = subprocess.run(book, cwd=tmp_path, env=variables, capture_output=True, text=True).stderr
    assert said.startswith("lab: the book has pages of the lab's clone: install the lab there")
    copied = {path.relative_to(tmp_path / "copies") for path in (tmp_path / "copies").rglob("*")}
    assert {path.relative_to(FOLDER) for path in (FOLDER / "images").iterdir()} < copied


def test_a_folder_that_cannot_have_copies_is_refused(tmp_path):
    with pytest.raises(NotebookError, match="is where the lab's own notebooks are: give another folder"):
        make_copies(FOLDER)
    (tmp_path / "file").touch()
    with pytest.raises(NotebookError, match=r"file cannot be written to: .*; give another folder"):
        make_copies(tmp_path / "file")
