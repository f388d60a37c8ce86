"""The README's two screenshots, taken anew: ``python -m lab_tests.support.pictures``."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from playwright.sync_api import Locator, Page

from lab.jupyter.executing import FOLDER
from lab.jupyter.serving import arguments
from lab_tests.support.browser import jupyter_page, run_all_cells

LIVE = """import lab

with lab.Cluster(ranks=4) as cluster:
    lab.run("tiny", "offload", tokens=4096, steps=4, cluster=cluster, watch=lab.show.live())"""

TUNER = """import lab

lab.show.tuner("llama3-8b", tokens="5M", ranks=8)"""


def main() -> None:
    """Run each cell in JupyterLab and photograph it: the run in its last step, the tuner as it opens."""
    for name, code in (("live", LIVE), ("tuner", TUNER)):
        with TemporaryDirectory() as folder:
            home = Path(folder)
            kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
            cell = nbformat.v4.new_code_cell(code)
            notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel})
            nbformat.write(notebook, home / f"{name}.ipynb")
            command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.port={port}"]
            command += arguments(home, f"{name}.ipynb")
            with jupyter_page(command, f"lab/tree/{name}.ipynb", home=home, width=1440, ratio=1.25) as page:
                run_all_cells(page)
                shown(page, name).screenshot(path=FOLDER / "images" / f"{name}.png")


def shown(page: Page, name: str) -> Locator:
    """The cell with its output, once there is what the picture is about."""
    if name == "live":
        page.locator(".lab-live-status", has_text="step 4 of 4").wait_for(timeout=120_000)
        canvas = page.locator(".lab-live canvas")
        box = canvas.bounding_box()
        assert box is not None
        canvas.hover(position={"x": box["width"] * 0.2, "y": box["height"] * 0.2})
    else:
        page.locator(".lab-tuner-verdict").wait_for(timeout=120_000)
    return page.locator(".jp-CodeCell").first


if __name__ == "__main__":
    main()
