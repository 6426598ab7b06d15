"""Write docs/images/demo-circuit.png: the wiring of the demo model's page as Chromium shows it (needs playwright)."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import headspan as hs

PICTURE = Path(__file__).parent / "images" / "demo-circuit.png"
PARTS = ("#diagram svg", "#legend")  # from the top of the first to the bottom of the last
MARGIN = 14


def main() -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no Chromium on this machine")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "demo.html"
        hs.report("demo", out=page_file)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 1000}, device_scale_factor=2, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        page.eval_on_selector("#diagram", "box => box.scrollIntoView({block: 'center'})")
        boxes = [box for part in PARTS if (box := page.locator(part).bounding_box()) is not None]
        top, bottom = boxes[0]["y"], boxes[-1]["y"] + boxes[-1]["height"] + MARGIN
        spans = [span.bounding_box() for span in page.locator("#legend span").all()]
        ends = [box["x"] + box["width"] for box in (boxes[0], *spans) if box is not None]
        left, right = boxes[0]["x"] - MARGIN, max(ends) + MARGIN
        page.screenshot(path=PICTURE, clip={"x": left, "y": top, "width": right - left, "height": bottom - top})
        browser.close()


if __name__ == "__main__":
    main()
