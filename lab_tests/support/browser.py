"""A real Jupyter server and a page of a real browser on it, for tests of what a reader sees."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import nbformat
import psutil
import pytest
from playwright.sync_api import Page, sync_playwright

from cluster.network import reserved_ports
from lab.jupyter.serving import jupyterlab_arguments

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

FROM_HERE = f"import sys\nsys.path[:0] = [{str(Path(__file__).parents[2])!r}]\n"
"""The beginning of a cell that imports the lab and its tests."""

IN_BROWSER = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
]
"""The marks of a test that needs the browser."""

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass(frozen=True)
class Server:
    """A running Jupyter server: ``url("lab/tree/a.ipynb")`` opens a page of it."""

    port: int
    token: str

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}?token={self.token}"


@contextmanager
def jupyter(command: Sequence[str], *, home: Path, seconds: float = 60) -> Iterator[Server]:
    """Start a Jupyter server, yield it when it answers, stop it and all it started by their ids.

    ``command`` has ``{port}`` where the port belongs. Settings and runtime files go to ``home``, and the
    server's log to ``home/server.log``.
    """
    with reserved_ports(1) as [port]:
        yield from _serve(command, Server(port, uuid4().hex), home, seconds)


def _serve(command: Sequence[str], server: Server, home: Path, seconds: float) -> Iterator[Server]:
    names = ("_CONFIG_DIR", "_RUNTIME_DIR", "LAB_SETTINGS_DIR", "LAB_WORKSPACES_DIR")
    folders = {f"JUPYTER{name}": str(home / name.lower()) for name in names}
    with open(home / "server.log", "w") as log:
        process = subprocess.Popen(
            [part.format(port=server.port) for part in command],
            env={**os.environ, **folders, "JUPYTER_TOKEN": server.token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_up(server, process, home / "server.log", seconds)
            yield server
        finally:
            _stop(process)


@contextmanager
def browser_page(*, width: int = 1200, height: int = 1000, ratio: float = 1) -> Iterator[Page]:
    """A page of a headless browser, ``ratio`` device pixels to a pixel."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        try:
            yield browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=ratio)
        finally:
            browser.close()


@contextmanager
def jupyter_page(command: Sequence[str], path: str, *, home: Path, **view: Any) -> Iterator[Page]:
    """A browser page (of ``view``) on ``path`` of a Jupyter server that runs as long as the block."""
    with jupyter(command, home=home) as server, browser_page(**view) as page:
        page.goto(server.url(path))
        yield page


@contextmanager
def notebook_page(home: Path, code: str) -> Iterator[tuple[Page, Path]]:
    """A browser page on a notebook of one cell, which is started, in JupyterLab; and the notebook's file."""
    path, command = one_cell_notebook(home, FROM_HERE + code)
    with jupyter_page(command, f"lab/tree/{path.name}", home=home) as page:
        run_all_cells(page)
        yield page, path


def run_all_cells(page: Page) -> None:
    """Runs the open notebook from JupyterLab's menu, once the kernel is idle: an earlier request is lost."""
    page.get_by_text("| Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def saved_outputs(page: Page, path: Path) -> list[dict[str, Any]]:
    """Saves the open notebook until its file has a display of its only cell, and returns the cell's outputs.

    On a busy machine a line on stderr says what takes long; it is left out.
    """
    deadline = time.monotonic() + 180
    while True:
        page.keyboard.press("Control+s")
        outputs = json.loads(path.read_text())["cells"][0]["outputs"]
        if any(output["output_type"] == "display_data" for output in outputs):
            return [output for output in outputs if output.get("name") != "stderr"]
        assert time.monotonic() < deadline, f"no display in the file: {outputs}"
        time.sleep(1)


def wait_for(holds: Callable[[], bool], seconds: float = 180) -> None:
    """Waits until a condition holds; it is an error if it does not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"the page did not change within {seconds:g} s"
        time.sleep(0.1)


def one_cell_notebook(folder: Path, code: str) -> tuple[Path, list[str]]:
    """Writes a notebook of one cell below ``folder``; returns its path and the command that serves it."""
    path = folder / "notebooks" / "live.ipynb"
    path.parent.mkdir()
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cell = nbformat.v4.new_code_cell(code)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel}), path)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.port={port}"]
    return path, command + jupyterlab_arguments(path.parent, path.name)


def _wait_until_up(server: Server, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):  # it does not listen yet, or is slow to answer
            urllib.request.urlopen(server.url("api/status"), timeout=5).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not come up:\n{log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Taken first: once the server is gone its kernels can no longer be told from others.
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()
