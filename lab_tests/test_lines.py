"""The lines of code of each folder are at most those of the table in ``pyproject.toml``.

A line of code is one that ruff's formatter leaves, without comments, docstrings, imports, and blank lines.
"""

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.first

ROOT = Path(__file__).parent.parent


def lines_of_code(text: str) -> int:
    """The lines of a Python file that have code."""
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    found = {number for number, line in lines if line and not line.startswith("#")}
    for node in ast.walk(ast.parse(text)):
        # A text that stands alone is a docstring.
        alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (alone and isinstance(node.value.value, str)):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def counted() -> Counter[str]:
    """The lines by folder, of Python; by kind, of other files; and the KiB of the plans that come along."""
    lines: Counter[str] = Counter()
    for package in ("cluster", "lab", "lab_tests"):
        for file in (ROOT / package).rglob("*"):
            kind, folder = file.suffix[1:], file.relative_to(ROOT).parts[:2]
            if kind == "py":
                inside = package != "lab" or len(folder) < 2 or not (ROOT / "lab" / folder[1]).is_dir()
                lines[package if inside else "/".join(folder)] += lines_of_code(file.read_text())
            elif kind in ("js", "css", "toml", "json"):
                lines[kind] += sum(map(bool, map(str.strip, file.read_text().splitlines())))
            elif kind == "plan":
                lines["KiB of plans"] += -(-file.stat().st_size // 1024)
    return lines


def test_no_folder_has_more_lines_than_the_table_says():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["lines-of-code"]
    lines = counted()
    assert lines.keys() == table.keys()
    more = {name: (number, table[name]) for name, number in lines.items() if number > table[name]}
    assert not more, "lines and the most of them: delete some, or edit the table in a commit that says why"


def test_what_a_line_of_code_is():
    text = '"""Doc."""\n\nfrom a import (\n    b,\n)\n\n# No.\ndef f():\n    """Doc.\n\n    More."""\n'
    assert lines_of_code(text) == 1
    assert lines_of_code(text + '    return f(\n        """A\n        text"""\n    )  # Yes.\n') == 5
