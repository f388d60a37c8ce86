"""Where extensions are compiled: one process at a time, and a process that is killed stops nobody."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab.commands.cli import main
from lab.errors import RecipeError
from lab.techniques import deepspeed
from lab.techniques.deepspeed import build_folder

COMPILE = """
import time
from lab.techniques.deepspeed import build_folder
with build_folder() as folder:
    (folder / "operator").mkdir(exist_ok=True)
    (folder / "operator" / "lock").open("x")  # as torch does, which waits where there is one
    print("compiling", flush=True)
    time.sleep(600)
"""


def compiler() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, text=True)


def test_the_lock_of_a_process_that_was_killed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with compiler() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "compiling\n"
        with compiler() as second:
            assert second.stdout is not None
            os.set_blocking(second.stdout.fileno(), False)
            time.sleep(5)
            assert second.stdout.readline() == "", "the first compiles"
            os.set_blocking(second.stdout.fileno(), True)
            first.kill()
            assert second.stdout.readline() == "compiling\n"
            second.kill()
    with build_folder() as folder:
        assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
        assert not list(folder.glob("*/lock"))
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)


def test_a_lock_that_was_left_is_removed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with build_folder() as folder:
        (folder / "operator").mkdir()
        (folder / "operator" / "lock").touch()
    assert capsys.readouterr().err == ""
    with build_folder():
        left = folder / "operator" / "lock"
        assert not left.exists()
        assert capsys.readouterr().err == (
            f"removed {left}: a process that ended while it compiled has left this lock\n"
        )


def test_a_wait_for_another_process_is_said_with_its_number_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed, "SILENT_SECONDS", 0.2)
    for _ in range(2):
        with build_folder() as folder:
            lock = folder / "flock"
    # A second file is a second holder, as in another process.
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.6, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        with build_folder():
            said = capsys.readouterr().err
    assert said.startswith(
        f"waiting for process {os.getpid()}, which compiles DeepSpeed's communication operator"
    )
    assert f" and holds {lock}: " in said
    assert said.count("\n") == 1
    with build_folder():
        time.sleep(0.4)
    assert capsys.readouterr().err == "", "nobody had to wait"


def test_the_doctor_warms_up_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed = []
    monkeypatch.setattr("lab.commands.doctor.warm_operator", warmed.append)
    said = CliRunner().invoke(main, ["doctor", "--warm"])
    assert said.exit_code == 0
    assert [device.type for device in warmed] == ["cpu"]
    fonts, operator, python, *_ = said.stdout.splitlines()
    assert fonts.startswith("fonts          ready after ")
    assert operator.startswith("operator       ready after ")
    assert python.startswith("python ")


def test_a_doctor_that_cannot_compile_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(device: object) -> None:
        raise RecipeError("it cannot be compiled")

    monkeypatch.setattr("lab.commands.doctor.warm_operator", refuses)
    said = CliRunner().invoke(main, ["doctor", "--warm"])
    assert said.exit_code == 0
    assert "\noperator       it cannot be compiled\npython " in said.stdout


@pytest.mark.slow
def test_without_a_compiler_the_doctor_says_so_in_one_line(tmp_path: Path) -> None:
    """In another process, because DeepSpeed stays imported in this one. Its import takes seconds."""
    environment = {**os.environ, "PATH": "", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    words = [sys.executable, "-m", "lab", "doctor", "--warm"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert said.returncode == 0
    [line] = [line for line in said.stdout.splitlines() if line.startswith("operator ")]
    assert "its communication operator cannot be compiled here, for which it needs a C++ compiler" in line
    assert "\ncompiler       MISSING" in said.stdout
