"""Takes the README's two screenshots again: ``python -m lab_tests.support.pictures``."""

from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Locator, Page

from lab.jupyter.notebook_files import FOLDER
from lab_tests.support.browser import jupyter_page, one_cell_notebook, run_all_cells

LIVE = """import lab

with lab.Cluster(ranks=4) as cluster:
    lab.run("tiny", "offload", tokens=4096, steps=4, cluster=cluster, watch=lab.show.live())"""

TUNER = """import lab

lab.show.tuner("llama3-8b", tokens="5M", ranks=8)"""


def main() -> None:
    """Stores a picture of each cell in JupyterLab: the run in its last step, and the tuner with all plans."""
    for name, code in (("live", LIVE), ("tuner", TUNER)):
        with TemporaryDirectory() as folder:
            home = Path(folder)
            path, command = one_cell_notebook(home, code)
            with jupyter_page(command, f"lab/tree/{path.name}", home=home, width=1440, ratio=1.25) as page:
                run_all_cells(page)
                cell_with_output(page, name).screenshot(path=FOLDER / "images" / f"{name}.png")


def cell_with_output(page: Page, name: str) -> Locator:
    """Waits until the output is what the picture shows, and returns the cell."""
    if name == "live":
        page.locator(".lab-live-status", has_text="step 4 of 4").wait_for(timeout=120_000)
        canvas = page.locator(".lab-live canvas")
        box = canvas.bounding_box()
        assert box is not None
        canvas.hover(position={"x": box["width"] * 0.2, "y": box["height"] * 0.2})
    else:
        # The knobs that save something at this context.
        saves = page.locator(".widget-label", has_text="saves ")
        saves.nth(5).wait_for(timeout=300_000)
    return page.locator(".jp-CodeCell").first


if __name__ == "__main__":
    main()
