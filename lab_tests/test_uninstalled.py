"""The lab's sources on a machine with torch and transformers, where nothing can be installed."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

MISSING = (
    "__editable__", "anywidget", "cloudpickle", "deepspeed", "flash", "ipykernel", "ipyparallel",
    "ipython", "ipywidgets", "jupyter", "longcontext", "matplotlib", "nb", "notebook", "papermill",
    "platformdirs", "psygnal", "pyzmq", "tornado", "traitlets", "zmq",
)  # fmt: skip
"""How the names of what is not there begin: all that the lab wants for its ranks and its notebooks."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if not found.name.lower().startswith(MISSING):
            (site / found.name).symlink_to(found)
    root = Path(__file__).resolve().parents[1]
    home = tmp_path_factory.mktemp("home")
    environment = os.environ | {"HOME": str(home), "PYTHONPATH": f"{site}{os.pathsep}{root}"}

    def run(words):
        command = [sys.executable, "-S", "-m", "lab", *words.split()]
        return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)

    return run


def test_the_lab_rehearses_and_plans(lab):
    made = lab("rehearse tiny --tokens 128 --ranks 2 --layers 1 --set head_chunk=16 --json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["plan_over_measured"] == 1
    planned = lab("plan tiny --tokens 128 --ranks 2 --recipe tiling --json")
    assert planned.returncode == 0, planned.stderr


def test_the_doctor_says_what_is_missing(lab):
    said = lab("doctor")
    assert said.returncode == 0, said.stderr
    lines = {line.split()[0]: line for line in said.stdout.splitlines()}
    for package in ("deepspeed", "ipyparallel", "jupyterlab", "papermill"):
        assert "MISSING" in lines[package]
    assert "MISSING" not in lines["transformers"]


@pytest.mark.parametrize(
    "words", ["execute 01_fsdp", "open", "train tiny --tokens 64 --steps 1 --checkpoint x"]
)
def test_a_command_that_needs_a_missing_package_says_so_in_a_line(lab, words):
    said = lab(words)
    assert said.returncode == 2
    assert said.stderr.startswith("lab: this command needs ")
    assert said.stderr.count("\n") == 1
