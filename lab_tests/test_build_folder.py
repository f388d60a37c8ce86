"""Where extensions are compiled: one process at a time, and a process that is killed stops nobody."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
