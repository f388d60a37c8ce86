"""Where extensions are compiled: one process at a time, and a process that is killed stops nobody."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from cluster.limits import Memory
from lab.commands.cli import main
from lab.errors import RecipeError
from lab.techniques import deepspeed
from lab.techniques.deepspeed import build_folder

COMPILE = """
import time
from lab.techniques import deepspeed
deepspeed.SILENT_SECONDS = 0.2
with deepspeed.build_folder() as folder:
    (folder / "operator").mkdir(exist_ok=True)
    (folder / "operator" / "lock").open("x")  # as torch does, which waits where there is one
    print("compiling", flush=True)
    time.sleep(100)
"""


def compiler() -> subprocess.Popen[str]:
    """Its messages are among its output."""
    command = [sys.executable, "-u", "-c", COMPILE]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said_by(process: subprocess.Popen[str]) -> str:
    """The next line that is of the lab, and of none of its packages."""
    return next(line for line in process.stdout if line.startswith(("compiling", "waiting", "removed")))


@pytest.mark.long
def test_a_process_waits_for_another_and_removes_its_lock_when_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with compiler() as first:
        assert said_by(first) == "compiling\n"
        with compiler() as second:
            waits = said_by(second)
            first.kill()
            removes, compiles = said_by(second), said_by(second)
            second.kill()
    with build_folder() as folder:
        lock = folder / "flock"
    assert waits.startswith(
        f"waiting for process {first.pid}, which compiles DeepSpeed's communication operator"
    )
    assert f" and holds {lock}: " in waits
    assert (removes.split()[0], compiles) == ("removed", "compiling\n")
    with build_folder() as folder:
        assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
        assert not list(folder.glob("*/lock"))
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)


def test_a_lock_that_was_left_is_removed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed, "SILENT_SECONDS", 0.1)
    with build_folder() as folder:
        (folder / "operator").mkdir()
        (folder / "operator" / "lock").touch()
        time.sleep(0.2)
    assert capsys.readouterr().err == "", "nobody had to wait"
    with build_folder():
        left = folder / "operator" / "lock"
        assert not left.exists()
        assert capsys.readouterr().err == (
            f"removed {left}: a process that ended while it compiled has left this lock\n"
        )


@pytest.fixture
def compiles_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], list[str]]:
    """The number of files at once with which an operator is compiled, for memory for so many of its files."""
    cpu = torch.device("cpu")
    deepspeed.sequence_parallel(cpu)  # Its first import chooses the accelerator.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("MAX_JOBS", "64")

    def compile_with(files: float) -> list[str]:
        seen = []
        builder = SimpleNamespace(load=lambda verbose: seen.append(os.environ["MAX_JOBS"]))
        accelerator = SimpleNamespace(create_op_builder=lambda name: builder)
        monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
        monkeypatch.setattr(
            "cluster.limits.memory", lambda: Memory(2**40, int(files * deepspeed.FILE_MEMORY))
        )
        deepspeed.warm_operator(cpu)
        assert os.environ["MAX_JOBS"] == "64"
        return seen

    return compile_with


@pytest.mark.parametrize(("files", "jobs"), [(1, "1"), (1.99, "1"), (2, "64")])
def test_a_compiler_takes_no_more_memory_than_there_is(compiles_with, files: float, jobs: str) -> None:
    assert compiles_with(files) == [jobs]


def test_too_little_memory_for_the_compiler_is_one_line(compiles_with) -> None:
    with pytest.raises(RecipeError, match=r"takes 1.56 GiB of memory, and 1.55 GiB are available here; free"):
        compiles_with(0.99)


@pytest.mark.parametrize("compiles", [True, False])
def test_the_doctor_warms_up_and_reports(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    warmed = []

    def warm(device: torch.device) -> None:
        warmed.append(device.type)
        if not compiles:
            raise RecipeError("it cannot be compiled")

    monkeypatch.setattr("lab.commands.doctor.warm_operator", warm)
    said = CliRunner().invoke(main, ["doctor", "--warm"])
    assert said.exit_code == 0
    assert warmed == ["cpu"]
    fonts, operator, python, *_ = said.stdout.splitlines()
    assert fonts.startswith("fonts          ready after ")
    assert operator.startswith(f"operator       {'ready after ' if compiles else 'it cannot be compiled'}")
    assert python.startswith("python ")


@pytest.mark.long
def test_without_a_compiler_the_doctor_says_so_in_one_line(tmp_path: Path) -> None:
    """In another process, because DeepSpeed stays imported in this one. Its import takes seconds."""
    environment = {**os.environ, "PATH": "", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    words = [sys.executable, "-m", "lab", "doctor", "--warm"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert said.returncode == 0
    [line] = [line for line in said.stdout.splitlines() if line.startswith("operator ")]
    assert "its communication operator cannot be compiled here, for which it needs a C++ compiler" in line
    assert "\ncompiler       MISSING" in said.stdout
