"""A click on a timeline in a real JupyterLab: the treemap, the table, the keys, a size, what is stored."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page

from lab_tests.support.browser import IN_BROWSER, notebook_page, saved_outputs, wait_for

pytestmark = IN_BROWSER

TIMELINE = """
import lab
from lab.training.records import Run

plan = lab.plan("tiny", "ulysses", tokens=768, ranks=2, workspace=False)
run = Run(plan.title, plan.job, None, (), (), (plan.timeline, plan.timeline))
timeline = plan.timeline
peak = int(timeline.total.argmax())
print(timeline.device_peak, timeline.total[peak + 1], timeline.moment(peak).device)
lab.show.timeline(run)
"""

BOXES = "[...document.querySelectorAll('.lab-holders-box')]"

# What the cell prints, and not a line about the start of its ranks.
STDOUT = "[data-mime-type='application/vnd.jupyter.stdout'] pre"


def bytes_drawn(page: Page) -> int:
    return int(page.evaluate(f"{BOXES}.reduce((sum, box) => sum + Number(box.dataset.bytes), 0)"))


def test_a_click_opens_who_holds_the_bytes(tmp_path: Path) -> None:
    with notebook_page(tmp_path, TIMELINE) as (page, path):
        canvas, freed = page.locator(".jp-RenderedImage .lab-live canvas"), page.locator("output")
        canvas.wait_for(timeout=120_000)
        peak, after, second = map(int, page.locator(STDOUT).inner_text().split())

        # Of no instant yet: a key begins at the peak. Then one row later, and back.
        canvas.focus()
        page.keyboard.press("Enter")
        wait_for(lambda: bytes_drawn(page) == peak)
        page.keyboard.press("ArrowRight")
        wait_for(lambda: bytes_drawn(page) == after != peak)
        page.keyboard.press("ArrowLeft")
        wait_for(lambda: bytes_drawn(page) == peak)

        # The areas are in proportion to the bytes.
        areas = page.evaluate(
            f"{BOXES}.map(box => [Number(box.dataset.bytes), box.offsetWidth * box.offsetHeight])"
        )
        whole = sum(area for _, area in areas)
        for size, area in areas[:5]:
            assert area / whole == pytest.approx(size / peak, rel=0.1)

        page.get_by_role("button", name="all ranks").click()
        wait_for(lambda: bytes_drawn(page) == peak + second)
        assert page.locator(".lab-holders-ranks button").count() == 2
        page.locator(".lab-holders-ranks button").nth(1).click()
        wait_for(lambda: page.locator(".lab-holders-name").inner_text().startswith("rank 1"))
        wait_for(lambda: bytes_drawn(page) == second)

        size = page.locator(".lab-holders-free input")
        size.fill("1 MiB")
        size.press("Enter")
        wait_for(lambda: freed.inner_text().startswith("set loss_tile="))
        wait_for(lambda: page.locator(".lab-holders-box.lab-holders-marked").count() > 0)
        marked = page.locator("tr.lab-holders-marked")
        assert all("loss_tile" in text for text in marked.all_inner_texts())
        size.fill("a lot")
        size.press("Enter")
        wait_for(lambda: freed.inner_text().startswith("'a lot' is not an amount of memory"))

        first = page.locator(".lab-holders-table tbody tr").first
        largest = first.inner_text()
        page.get_by_role("button", name="bytes ↓").click()
        wait_for(lambda: first.inner_text() != largest)

        # A click, and the tensors of the row that the pointer reads out.
        canvas.click(position={"x": 300, "y": 120})
        read = page.locator(".lab-live-readout .lab-live-total").last
        wait_for(lambda: read.inner_text().split("\n")[-1] in page.locator(".lab-holders-name").inner_text())
        page.keyboard.press("Escape")
        wait_for(page.locator(".lab-holders").is_hidden)
        _, output = saved_outputs(page, path)
    assert set(output["data"]) == {"image/png", "text/plain"}
    assert "widgets" not in json.loads(path.read_text())["metadata"]
