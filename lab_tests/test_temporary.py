"""Temporary folders: each is removed by its process, or later where that was killed; a living one's stays."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster import temporary
from cluster.engine import CONNECTION_VARIABLE
from cluster.placement import Placement, Start
from cluster.temporary import remove_left, temporary_folder
from lab.commands.cli import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of temporary files, where a folder may be left at once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary, "places", lambda: ["", str(tmp_path)])
    monkeypatch.setattr(temporary, "LOCKED_SECONDS", 0.0)
    return tmp_path


def folder_of(place: Path, process: subprocess.Popen[str]) -> Path:
    while not (found := [*place.glob(f"{temporary.PREFIX}*")]):
        assert process.poll() is None
        time.sleep(0.05)
    return found[0]


def test_a_folder_is_private_and_ends_with_its_block(place: Path) -> None:
    with temporary_folder() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        assert remove_left() == []
    assert not folder.exists()


def test_what_a_killed_process_leaves_is_removed_by_clean(place: Path) -> None:
    holds = """
import time
from cluster.temporary import temporary_folder
with temporary_folder() as folder:
    (folder / "key").touch()
    print(flush=True)
    time.sleep(600)
"""
    variables = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(
        [sys.executable, "-c", holds], env=variables, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        folder = folder_of(place, process)
        assert remove_left() == []
        process.kill()
    (place / f"{temporary.PREFIX}link").symlink_to(folder)
    (place / f"{temporary.PREFIX}mine").mkdir()
    said = CliRunner().invoke(main, ["cluster", "clean"]).output.splitlines()
    assert f"{folder.name}: 0 processes ended, its directory removed" in said
    assert not folder.exists()
    assert remove_left() == []
    assert (place / f"{temporary.PREFIX}mine").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_stays(place: Path) -> None:
    other = place / f"{temporary.PREFIX}other"
    other.mkdir()
    (other / temporary.LOCK).touch()
    os.chown(other / temporary.LOCK, 65534, -1)
    assert remove_left() == []
    assert other.exists()


@pytest.mark.parametrize("how", [subprocess.Popen.terminate, subprocess.Popen.kill])
def test_a_rank_that_ends_before_it_is_registered_leaves_nothing(
    how: Callable[[subprocess.Popen[str]], None], place: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        info = {"interface": "tcp://127.0.0.1", "registration": silent.getsockname()[1]}
        variables = {**os.environ, "TMPDIR": str(place), CONNECTION_VARIABLE: json.dumps(info)}
        command = Start(placement=Placement(0, 0, 1)).command(sys.executable)
        with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL, text=True) as process:
            folder = folder_of(place, process)
            time.sleep(0.5)
            how(process)
        assert process.returncode in (128 + signal.SIGTERM, -signal.SIGKILL)
    assert folder.exists() == (how is subprocess.Popen.kill)
    assert len(remove_left()) == (how is subprocess.Popen.kill)
    assert not folder.exists()
