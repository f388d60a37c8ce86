"""The sources of the book: copies of notebooks and Markdown files, and pages of the public names."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import ModuleType

import nbformat
from nbformat import NotebookNode
from sphinx.pycode import ModuleAnalyzer

from lab.errors import NotebookError
from lab.jupyter.notebook_files import FOLDER, WIDGET, code_cells, own_notebooks, read_notebook

ROOT = FOLDER.parent
TEXTS = {
    "notebooks/README.md": "index.md",
    "README.md": "readme.md",
    "lab/techniques/README.md": "techniques.md",
    "lab/bench/README.md": "results.md",
    "cluster/README.md": "cluster.md",
}
"""The page of each Markdown file of the repository. The first one is the first page."""
PACKAGES = ("lab", "lab.show", "lab.models", "lab.techniques", "lab.memory", "lab.planning")
"""The packages whose public names have pages."""
CONFIGURATION = "from lab.jupyter.book.settings import SETTINGS\n\nglobals().update(SETTINGS)\n"


def write_sources(folder: Path) -> None:
    """Write the sources of the book into a new folder.

    Raises:
        NotebookError: The lab is installed without its other pages, or a notebook cannot be read.
    """
    if not (ROOT / "README.md").exists():
        raise NotebookError(
            "the book has pages of the lab's clone: install the lab there, by pip install -e ."
        )
    notebooks = own_notebooks().values()
    folder.mkdir()
    (folder / "conf.py").write_text(CONFIGURATION, encoding="utf-8")
    shutil.copytree(FOLDER / "images", folder / "notebooks" / "images")
    pages = TEXTS | {f"notebooks/{path.name}": f"notebooks/{path.name}" for path in notebooks}
    for source, page in TEXTS.items():
        text = with_links(chart_as_list((ROOT / source).read_text(encoding="utf-8")), source, pages)
        (folder / page).write_text(text, encoding="utf-8")
    for path in notebooks:
        notebook = _prepared(read_notebook(path))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = with_links(cell.source, f"notebooks/{path.name}", pages)
        nbformat.write(notebook, folder / "notebooks" / path.name)
    for package in PACKAGES:
        (folder / f"{package}.rst").write_text(_reference(import_module(package)), encoding="utf-8")
    with (folder / "index.md").open("a", encoding="utf-8") as first:
        first.write(_contents("Notebooks", [f"notebooks/{path.stem}" for path in notebooks]))
        first.write(_contents("The lab", [Path(page).stem for page in list(TEXTS.values())[1:]]))
        first.write(_contents("Python", PACKAGES))


def _prepared(notebook: NotebookNode) -> NotebookNode:
    """Fold the solutions, and leave out widgets, which need a kernel.

    In place of a widget, the page has the picture or the text that is stored with it. The text of a picture
    is what a screen reader reads.
    """
    notebook.metadata.pop("widgets", None)
    for cell in code_cells(notebook, "solution"):
        cell.metadata.tags.append("hide-cell")
    for cell in code_cells(notebook):
        data = [output.data for output in cell.outputs if "data" in output]
        texts = [each.get("text/plain", "") for each in data if "image/png" in each]
        # The pictures of one cell have one text.
        cell.metadata["mystnb"] = {"image": {"alt": " ".join(" ".join(texts).split())}}
        for each in data:
            each.pop(WIDGET, None)
    return notebook


def with_links(text: str, source: str, pages: dict[str, str]) -> str:
    """Let the links of a Markdown text lead to pages of the book.

    Args:
        text: The text.
        source: The path of its file in the repository.
        pages: The path in the book of each file in the repository that has a page.

    Returns:
        The text. A link to a file that has no page is its words alone, and the name of a notebook is a link.
    """
    folder, own = os.path.dirname(source), os.path.dirname(pages[source])

    def link(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        name, hash_, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(folder, name))
        page = path if image else pages.get(path)
        return f"{image}[{words}]({os.path.relpath(page, own or '.')}{hash_}{anchor})" if page else words

    def notebook(match: re.Match[str]) -> str:
        path = f"notebooks/{match[1]}.ipynb"
        return f"[{match[0]}]({os.path.relpath(path, own or '.')})" if path in pages else match[0]

    text = re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", link, text)
    return re.sub(r"(?<!\[)`(\w+)`", notebook, text)


def chart_as_list(text: str) -> str:
    """Replace each Mermaid flowchart of a Markdown text by a list: Mermaid's script is no part of the book.

    An edge is an item: its label, and the node to which it leads, with the edges of that node below it.
    """
    chart = re.compile(r"```mermaid\nflowchart .*?\n(.*?)```\n", re.S)
    return chart.sub(lambda match: _edges_as_list(match[1]), text)


def _edges_as_list(chart: str) -> str:
    words = dict(re.findall(r'(\w+)[{[]"(.*?)"[]}]', chart))
    edges = re.findall(r'^ *(\w+).*-->\|"(.*?)"\| *(\w+)', chart, re.M)

    def items(start: str, depth: int) -> list[str]:
        found = []
        for label, end in ((label, end) for name, label, end in edges if name == start):
            found += [f"{'  ' * depth}- {label}: **{words[end]}**", *items(end, depth + 1)]
        return found

    root = edges[0][0]
    return "\n".join([words[root], "", *items(root, 0), ""])


def _contents(caption: str, pages: list[str] | tuple[str, ...]) -> str:
    """Return the directive that lists pages in the sidebar."""
    lines = "\n".join(pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def _reference(package: ModuleType) -> str:
    """Return the page of a package's public names: a table, and the documentation of each."""
    name = package.__name__
    public = {each: getattr(package, each) for each in package.__all__}
    table, entries = [".. list-table::", "   :widths: 30 70", ""], list[str]()
    for each, value in public.items():
        words, link = inspect.getdoc(value) or "", f":py:obj:`{each} <{name}.{each}>`"
        if inspect.ismodule(value):
            link = f":py:mod:`~{value.__name__}`"
        elif inspect.isclass(value):
            entries += [f".. autoclass:: {name}.{each}", "   :members:", ""]
        elif inspect.isroutine(value):
            entries += [f".. autofunction:: {name}.{each}", ""]
        else:
            words = _documentation(value, each)
            entries += [f".. py:data:: {each}", f"   :value: {value!r}", "", indent(words, "   "), ""]
        table += [f"   * - {link}", f"     - {' '.join(words.split(chr(10) * 2)[0].split())}"]
    head = [name, "=" * len(name), "", f".. py:module:: {name}", "", inspect.getdoc(package) or "", ""]
    return "\n".join([*head, *table, "", *entries])


def _documentation(value: object, name: str) -> str:
    """Return the text that stands below a constant, in the module of the lab that assigns it."""
    for module in [each for each in sys.modules if each.startswith("lab.")]:
        if getattr(sys.modules[module], name, None) is value:
            texts = ModuleAnalyzer.for_module(module).find_attr_docs()
            if ("", name) in texts:
                return "\n".join(texts["", name])
    return ""
