"""Notebooks in a real JupyterLab, driven by a real browser."""

import json
import sys
from pathlib import Path

from playwright.sync_api import Locator, Page

from lab.jupyter.notebook_files import FOLDER
from lab.show import palette
from lab_tests.support.browser import (
    IN_BROWSER,
    browser_page,
    jupyter,
    notebook_page,
    run_all_cells,
    saved_outputs,
    wait_for,
)

pytestmark = IN_BROWSER

FEED = """
import time
from lab_tests.support.runs import finished_run
from lab.training.records import Progress
import numpy as np
import lab.show

run, watch = finished_run(2), lab.show.live(height=300)
for rows in np.array_split(np.arange(len(run.timelines[0])), 100):
    for rank, timeline in enumerate(run.timelines):
        watch(Progress(rank, 2, 1, 3, 2.5, timeline.rows(rows)))
    time.sleep(0.15)
watch(run)
"""

LONG_RUN = """
import lab

with lab.Cluster(ranks=2) as cluster:
    watch = lab.show.live()
    run = lab.run("tiny", "ulysses", tokens=1024, steps=2000, cluster=cluster, watch=watch)
print(run.complete, len(run.losses))
"""

COUNT_PAINTED = """([red, green, blue]) => {
    const canvas = document.querySelector(".lab-live canvas");
    if (!canvas) return 0;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let painted = 0;
    for (let n = 0; n < data.length; n += 4)
        painted += data[n] === red && data[n + 1] === green && data[n + 2] === blue && data[n + 3] === 255;
    return painted;
}"""


def test_a_live_timeline_is_drawn_while_the_cell_runs_and_leaves_a_picture(tmp_path: Path) -> None:
    with notebook_page(tmp_path, FEED) as (page, path):
        page.locator(".lab-live canvas").wait_for(timeout=60_000)
        wait_for(lambda: painted(page, "activations") > 0)
        early = painted(page, "activations")
        wait_for(lambda: painted(page, "activations") not in (0, early))
        assert page.locator(".jp-InputPrompt").first.inner_text() == "[*]:"
        assert page.locator(".lab-live-status").inner_text() == "step 2 of 3 · loss 2.5000"

        canvas, chips = page.locator(".lab-live canvas"), page.locator(".lab-live-chip")
        assert chips.all_inner_texts() == ["rank 0", "1"]
        assert "rank 1 peak" in label_of(canvas)
        chips.nth(1).click()
        wait_for(lambda: "rank 1" not in label_of(canvas) and "rank 0 peak" in label_of(canvas))
        assert chips.nth(0).is_disabled(), "the last rank that is shown stays"
        chips.nth(1).click()
        wait_for(lambda: "rank 1 peak" in label_of(canvas))
        canvas.hover(position={"x": 200, "y": 150})
        read = page.locator(".lab-live-readout")
        wait_for(lambda: "device" in read.inner_text())
        assert all(part in read.inner_text() for part in ("rank ", "aten.", "layers.", "activations"))

        # The notebook has the picture; on the page the widget is in its place, and alive.
        picture = page.locator(".jp-OutputArea-output img")
        picture.wait_for(timeout=60_000, state="attached")
        assert picture.evaluate("image => image.naturalWidth") == 1620
        page.locator(".jp-RenderedImage .lab-live canvas").wait_for()
        assert picture.is_hidden()
        assert page.locator(".lab-live").count() == 1
        wait_for(lambda: page.locator(".lab-live-status").inner_text() == "tiny · fsdp")
        assert page.locator(".lab-live-stop").is_hidden()
        chips.nth(1).click()
        wait_for(lambda: "rank 1" not in label_of(canvas) and "rank 0 peak" in label_of(canvas))
        (output,) = saved_outputs(page, path)
    assert set(output["data"]) == {"image/png", "text/plain"}
    assert "".join(output["data"]["text/plain"]).startswith("Memory timeline of tiny · fsdp: rank 0 peaks at")
    assert "widgets" not in json.loads(path.read_text())["metadata"]


def test_stop_ends_a_run_while_its_cell_blocks_and_keeps_what_it_measured(tmp_path: Path) -> None:
    with notebook_page(tmp_path, LONG_RUN) as (page, _):
        # It trains: where a loss is shown, a step has ended.
        page.locator(".lab-live-status", has_text="loss").wait_for(timeout=120_000)
        assert page.locator(".jp-InputPrompt").first.inner_text() == "[*]:"
        page.get_by_role("button", name="Stop", exact=True).click()

        # Soon: the 2000 steps would take many minutes.
        # A line about the start of the ranks may have been there, and was erased.
        printed = page.locator(".jp-OutputArea-output pre", has_text="False")
        printed.wait_for(timeout=120_000)
        complete, steps = printed.inner_text().split()
        assert complete == "False"
        assert int(steps) < 2000
        picture = page.locator(".jp-OutputArea-output img")
        picture.wait_for(state="attached")
        assert picture.evaluate("image => image.naturalWidth") == 1620
        canvas = page.locator(".jp-RenderedImage .lab-live canvas")
        canvas.click(position={"x": 200, "y": 150})
        page.locator(".lab-holders-when", has_text="this timeline has no storages: those of a run").wait_for()
        assert page.locator(".lab-holders-box").count() == 0


def test_lab_open_shows_the_first_notebook_and_runs_it_to_its_end(tmp_path: Path) -> None:
    """As a newcomer: open, look, run all cells. The notebooks in the repository are not written."""
    lab = str(Path(sys.executable).with_name("lab"))
    mine = ["--folder", str(tmp_path / "mine")]
    stored = (FOLDER / "00_memory_wall.ipynb").read_bytes()
    command = [lab, "open", *mine, "--no-browser", "--port", "{port}"]
    with jupyter(command, home=tmp_path) as server, browser_page() as page:
        _change_parameters(tmp_path / "mine" / "00_memory_wall.ipynb")
        page.goto(server.url(""))
        page.get_by_role("heading", name="00 · The memory wall").wait_for(timeout=60_000)
        run_all_cells(page)
        page.locator(".lab-live canvas").wait_for(timeout=120_000)
        wait_for(lambda: painted(page, "optimizer") > 1000)
        # Three runs leave three pictures; the last cell but the answer prints a refusal.
        page.get_by_text("unknown model 'llama3-80b'").wait_for(timeout=180_000)
        assert page.get_by_text("official Jupyter news").count() == 0
    assert (FOLDER / "00_memory_wall.ipynb").read_bytes() == stored


def painted(page: Page, category: str) -> int:
    """How many pixels of the canvas have the colour of a category."""
    colour = palette.COLOURS[category]
    return page.evaluate(COUNT_PAINTED, [int(colour[n : n + 2], 16) for n in (1, 3, 5)])


def label_of(canvas: Locator) -> str:
    """What a screen reader is told of the picture."""
    return canvas.get_attribute("aria-label") or ""


def _change_parameters(path: Path) -> None:
    """Make a copy of notebook 00 train on fewer tokens and ranks, as a reader with little time would."""
    text = path.read_text()
    for old, new in (("tokens = 1024 ", "tokens = 256 "), ("ranks = 4", "ranks = 2"), (", 512, 1024]", "]")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
