"""The player of one layer in a real JupyterLab: it plays, steps by keys, and its curve moves the cursor."""

from pathlib import Path

from lab_tests.support.browser import IN_BROWSER, notebook_page, wait_for

pytestmark = IN_BROWSER
PLAYER = """
import lab

lab.show.layer(lab.plan("tiny", "upipe", tokens=1024, ranks=4))
"""


def test_the_player_plays_steps_and_follows_the_curve(tmp_path: Path) -> None:
    with notebook_page(tmp_path, PLAYER) as (page, _):
        counter, canvas = page.locator(".lab-layer-counter"), page.locator(".lab-layer canvas")
        canvas.wait_for(timeout=120_000)
        wait_for(lambda: counter.inner_text().startswith("frame 1 of "))
        last = int(counter.inner_text().split()[-1])
        page.locator(".lab-layer").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        wait_for(lambda: counter.inner_text() == f"frame 2 of {last}")
        assert page.locator(".lab-layer-text").inner_text().startswith("all-gather: every rank gets")
        page.keyboard.press("End")
        wait_for(lambda: counter.inner_text() == f"frame {last} of {last}")

        # Play begins again at the start, and goes on by itself.
        page.locator(".lab-layer select").select_option("8")
        page.get_by_role("button", name="Play or pause").click()
        wait_for(lambda: 2 < int(counter.inner_text().split()[1]) < last)
        page.get_by_role("button", name="Play or pause").click()

        box = canvas.bounding_box()
        assert box is not None
        canvas.click(position={"x": box["width"] * 0.75, "y": box["height"] - 20})
        wait_for(lambda: last / 2 < int(counter.inner_text().split()[1]) < last)
        assert page.locator(".lab-layer-where").inner_text().startswith("backward")
        canvas.hover(position={"x": 115, "y": 30})
        wait_for(lambda: " A · " in page.locator(".lab-layer-readout").inner_text())

        # A browser that draws no canvas says so in its place, and the buttons work as before.
        page.evaluate("HTMLCanvasElement.prototype.getContext = () => null")
        page.locator(".lab-layer").focus()
        page.keyboard.press("Home")
        page.get_by_text("This browser draws no canvas").wait_for()
        assert page.locator(".lab-layer canvas").count() == 0
