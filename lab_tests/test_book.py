"""The book: the stored notebooks and the public functions as HTML pages, without a network."""

import os
import re
import subprocess
import sys
from importlib import import_module

import nbformat
import pytest
from bs4 import BeautifulSoup
from click.testing import CliRunner

from lab.commands.cli import main
from lab.jupyter.book import build, sources
from lab.jupyter.notebook_files import FOLDER, code_cells

NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in sorted(FOLDER.glob("*.ipynb"))}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The pages by their path. Sphinx runs once, in a process of its own, for about 15 seconds."""
    out = tmp_path_factory.mktemp("book") / "pages"
    command = [sys.executable, "-m", "lab", "book", "--out", str(out)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, env=dict(os.environ))
    # Each warning of Sphinx is a line on stderr, and an exit code that is not 0.
    assert (said.returncode, said.stderr, said.stdout) == (0, "", f"{out / 'index.html'}\n")
    return {
        path.relative_to(out).as_posix(): BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        for path in out.rglob("*.html")
    } | {"": out}


@pytest.mark.long
def test_each_notebook_has_a_page_and_the_first_page_links_to_it(book):
    links = {link["href"] for link in book["index.html"].find("article").find_all("a", href=True)}
    sidebar = {link["href"] for link in book["index.html"].select(".sidebar-tree a")}
    for name, notebook in NOTEBOOKS.items():
        page = book[f"notebooks/{name}.html"]
        assert page.h1.text.startswith(notebook.cells[0].source.splitlines()[0].removeprefix("# "))
        assert len(page.select("div.cell")) == len(code_cells(notebook))
        assert f"notebooks/{name}.html" in links & sidebar


@pytest.mark.long
def test_solutions_are_folded_and_nothing_else_is(book):
    for name, notebook in NOTEBOOKS.items():
        page = book[f"notebooks/{name}.html"]
        solutions = page.select("div.cell.tag_solution")
        assert len(solutions) == len(page.select("details.hide")) == len(code_cells(notebook, "solution")) > 0
        for cell in solutions:
            inside = cell.select("details.hide .cell_input, details.hide .cell_output")
            assert inside == cell.select(".cell_input, .cell_output") != []
            assert "open" not in cell.details.attrs


@pytest.mark.long
def test_a_picture_or_a_text_is_in_place_of_each_widget(book):
    for name, notebook in NOTEBOOKS.items():
        page = book[f"notebooks/{name}.html"]
        outputs = [output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs]
        pictures = [" ".join(data["text/plain"].split()) for data in outputs if "image/png" in data]
        shown = [picture["alt"] for picture in page.select(".cell_output img")]
        assert all(picture in text for picture, text in zip(pictures, shown, strict=True))
        text = " ".join(page.text.split())
        guesses = [
            data["text/plain"] for data in outputs if sources.WIDGET in data and "image/png" not in data
        ]
        assert guesses
        assert all(guess in text for guess in guesses)
        assert "NBVAL" not in text
        assert "widget" not in str(page.find_all("script"))


@pytest.mark.long
def test_a_reader_needs_no_network(book):
    loads = re.compile(r"^(?:https?:)?//")
    for name, page in book.items():
        if name:
            found = [tag.get("src") or tag.get("href") for tag in page.select("[src], link[href]")]
            assert not [address for address in found if loads.match(address)], name
    for path in book[""].rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


@pytest.mark.long
def test_formulas_are_mathml(book):
    [dollars] = [cell.source for cell in NOTEBOOKS["10_past_five_million"].cells if r"\lceil" in cell.source]
    page = book["notebooks/10_past_five_million.html"]
    assert len(page.find_all("math")) >= dollars.count("$$") // 2 > 0
    assert "$$" not in page.find("article").text


@pytest.mark.long
@pytest.mark.parametrize("package", sources.PACKAGES)
def test_the_public_names_have_entries(book, package):
    page = book[f"{package}.html"]
    for name in import_module(package).__all__:
        if f"{package}.{name}" not in sources.PACKAGES:
            entry = page.find(id=f"{package}.{name}")
            assert entry is not None, name
            assert len(entry.find_next_sibling("dd").text.strip()) > 20, name


@pytest.fixture
def one_page(monkeypatch):
    """A book of one page, whose text a test gives."""

    def use(text):
        def write(folder):
            folder.mkdir()
            (folder / "conf.py").write_text(sources.CONFIGURATION)
            (folder / "index.md").write_text(text)

        monkeypatch.setattr(sources, "write_sources", write)

    return use


def lab_book(out):
    return CliRunner().invoke(main, ["book", "--out", str(out)])


@pytest.mark.long
def test_a_book_replaces_an_older_one_alone(tmp_path, one_page):
    one_page("# One\n")
    assert lab_book(tmp_path / "book").exit_code == 0
    (tmp_path / "book" / "_static" / "old").touch()
    one_page("# Two\n\n$5 and $6, $E = S/C$\n")
    again = lab_book(tmp_path / "book")
    assert (again.exit_code, again.output) == (0, f"{tmp_path / 'book' / 'index.html'}\n")
    page = (tmp_path / "book" / "index.html").read_text()
    assert "<h1>Two" in page
    assert page.count("<math") == 1
    assert not (tmp_path / "book" / "_static" / "old").exists()


# MyST asks Sphinx for an attribute that Sphinx 11 will not have.
@pytest.mark.filterwarnings("ignore:'myst_parser.*is deprecated")
def test_warnings_are_lines_and_an_exit_code(tmp_path, one_page):
    one_page("# One\n\n[two](#three)\n\n$\\nothing$\n")
    said = lab_book(tmp_path)
    assert (said.exit_code, type(said.exception)) == (1, SystemExit), said.exc_info
    link, formula = said.stderr.splitlines()
    assert link.startswith("index.md:3: WARNING: ")
    assert "'three'" in link
    assert formula.startswith("index.md:5: WARNING: a formula that docutils does not know: ")
    assert (tmp_path / "index.html").exists()


def test_a_folder_with_other_files_is_kept(tmp_path):
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / "objects.inv").write_text("# Sphinx inventory version 2\n# Project: mine\n")
    said = lab_book(tmp_path)
    assert (said.exit_code, said.stderr.count("\n")) == (2, 1)
    assert "has other files" in said.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["objects.inv", "thesis"]


def assert_refused(out, said):
    done = lab_book(out)
    assert (done.exit_code, done.stderr) == (2, f"lab: {said}\n")


@pytest.mark.parametrize("out", ["file", "file/book"])
def test_a_file_is_no_folder(tmp_path, out):
    (tmp_path / "file").write_text("mine")
    out = tmp_path / out
    assert_refused(out, f"--out {out}: a file is in the way; give a folder for the book")


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(build, "TemporaryFile", refuse)  # root may write anywhere
    assert_refused(tmp_path, f"--out {tmp_path}: Permission denied; give a folder that you can write to")


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "NEEDED", ("sphinx", "no_such_package"))
    said = "the book needs no_such_package: install with pip install -e '.[book]'"
    assert_refused(tmp_path / "book", said)
    assert not (tmp_path / "book").exists()


def test_links_lead_to_pages_or_are_words():
    pages = sources.TEXTS | {"notebooks/01_fsdp.ipynb": "notebooks/01_fsdp.ipynb"}
    text = (
        "`01_fsdp` [a](README.md#minutes) [b](../lab/decoder.py) [c](https://pytorch.org) [d](#here) "
        "![e](images/live.png) [`f`](../README.md) `x`"
    )
    assert sources.with_links(text, "notebooks/01_fsdp.ipynb", pages) == (
        "[`01_fsdp`](01_fsdp.ipynb) [a](../index.md#minutes) b [c](https://pytorch.org) [d](#here) "
        "![e](images/live.png) [`f`](../readme.md) `x`"
    )
    assert sources.with_links(text, "notebooks/README.md", pages) == (
        "[`01_fsdp`](notebooks/01_fsdp.ipynb) [a](index.md#minutes) b [c](https://pytorch.org) [d](#here) "
        "![e](notebooks/images/live.png) [`f`](readme.md) `x`"
    )


def test_a_chart_is_a_list_of_its_edges():
    chart = (
        'flowchart TD\n    peak{"What is left?"}\n    peak -->|"model state"| fsdp["FSDP (01)"]\n'
        '    fsdp -->|"more, of all tokens"| ring["a ring (13)"]\n    peak -->|"logits"| ring\n'
    )
    assert sources.chart_as_list(f"Before\n\n```mermaid\n{chart}```\n\nAfter\n") == (
        "Before\n\nWhat is left?\n\n- model state: **FSDP (01)**\n  - more, of all tokens: **a ring (13)**\n"
        "- logits: **a ring (13)**\n\nAfter\n"
    )
