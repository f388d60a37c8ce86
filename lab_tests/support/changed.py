"""Which files of tests a change reaches by imports."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PACKAGES = ("lab", "cluster", "lab_tests")


def changed_files(since: str) -> list[str]:
    """Return the files that differ from a commit, and those that git does not know yet.

    Raises:
        subprocess.CalledProcessError: There is no such commit.
    """
    commands = (["diff", "--name-only", since, "--"], ["ls-files", "--others", "--exclude-standard"])
    lines = [subprocess.check_output(["git", *words], cwd=ROOT, text=True).splitlines() for words in commands]
    return sorted({line for of_command in lines for line in of_command})


def reached_tests(files: Iterable[str]) -> set[str]:
    """Return the files of tests that import a changed module, or name a changed file that is no module.

    A test imports a module itself, or by the modules of ``lab_tests`` that it imports. Imports between
    modules of ``lab`` are not followed: nearly every test would be reached.
    """
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    reached = set[str]()
    for file in files:
        if file == "lab_tests/conftest.py":
            reached |= graph.modules
        elif file.endswith(".py") and Path(file).parts[0] in PACKAGES:
            reached |= _importers(graph, file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        else:
            tests = (ROOT / "lab_tests").glob("test_*.py")
            reached |= {f"lab_tests.{test.stem}" for test in tests if Path(file).name in test.read_text()}
    return {f"{name.replace('.', '/')}.py" for name in reached if name.startswith("lab_tests.test_")}


def _importers(graph: grimp.ImportGraph, module: str) -> set[str]:
    """Return the modules of tests that import a module; of one that is gone, none."""
    found, new = set[str](), {module} & graph.modules
    while new:
        found |= new
        of_new = {importer for one in new for importer in graph.find_modules_that_directly_import(one)}
        new = {importer for importer in of_new if importer.startswith("lab_tests.")} - found
    return found
