"""The tuner in a real JupyterLab and a real Notebook 7, moved by a real browser."""

import sys
from pathlib import Path

from playwright.sync_api import Locator, Page

from lab.jupyter.serving import jupyterlab_arguments
from lab_tests.support.browser import (
    FROM_HERE,
    IN_BROWSER,
    jupyter_page,
    notebook_page,
    one_cell_notebook,
    wait_for,
)

pytestmark = IN_BROWSER
TUNER = """
import lab.show

tuner = lab.show.tuner("llama3-8b", tokens="3M", ranks=8)
tuner
"""


def handle(page: Page, name: str) -> Locator:
    """What the reader drags of a slider."""
    return page.locator(".widget-hslider", has_text=name).locator(".noUi-handle")


def verdict(page: Page) -> str:
    return page.locator(".lab-tuner-verdict").inner_text()


def widths(page: Page) -> list[float]:
    """Of the parts of the stack, in pixels."""
    parts = page.locator(".lab-tuner-device .lab-tuner-part").all()
    return [box["width"] if (box := part.bounding_box()) else 0 for part in parts]


def test_the_head_chunk_slider_moves_the_stack_and_the_verdict(tmp_path: Path) -> None:
    with notebook_page(tmp_path, TUNER) as (page, _):
        _drag(page)
        _step_and_mend(page)


def test_a_drag_does_the_same_in_notebook_7(tmp_path: Path) -> None:
    path, _ = one_cell_notebook(tmp_path, FROM_HERE + TUNER)
    command = [sys.executable, "-m", "notebook", "--no-browser", "--ServerApp.port={port}"]
    command += jupyterlab_arguments(path.parent, path.name)
    with jupyter_page(command, "notebooks/live.ipynb", home=tmp_path) as page:
        cell = page.locator(".jp-CodeCell .cm-content")
        cell.click(timeout=60_000)
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=60_000)
        page.keyboard.press("Control+Enter")
        _drag(page)


def _drag(page: Page) -> None:
    page.locator(".lab-tuner-verdict").wait_for(timeout=120_000)
    first, stack = verdict(page), widths(page)
    assert first.startswith("fits: ")

    # Dragged to its right end, where UPipe is off: more is held, and the bar is longer.
    handle(page, "head chunk").hover()  # once it stands still
    at = handle(page, "head chunk").bounding_box()
    assert at is not None
    page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    page.mouse.down()
    page.mouse.move(at["x"] + 300, at["y"], steps=12)
    page.mouse.up()
    wait_for(lambda: "head_chunk=None" in page.locator(".lab-tuner-copy code").first.inner_text())
    wait_for(lambda: sum(widths(page)) > sum(stack) + 10, 120)
    wait_for(lambda: verdict(page) != first)


def _step_and_mend(page: Page) -> None:
    # One step to the left of it is 32; of 24 heads a message speaks, and a button mends it.
    handle(page, "head chunk").press("ArrowLeft")
    wait_for(lambda: "head_chunk=32" in page.locator(".lab-tuner-copy code").first.inner_text())
    handle(page, "head chunk").press("ArrowLeft")
    wait_for(lambda: verdict(page).startswith("head_chunk=24: "))
    assert page.locator(".lab-tuner-chart").evaluate("chart => getComputedStyle(chart).opacity") == "0.35"
    # On a slow machine it is planned by then, for what the knob saves: nothing is said of planning.
    page.get_by_role("button", name="Set head chunk 16").click()
    wait_for(lambda: verdict(page).startswith("fits: "), 120)
    assert "--set head_chunk=16" in page.locator(".lab-tuner-copy code").last.inner_text()
