"""Take the screenshots in docs/images with Chromium (needs playwright and a Chromium).

    python docs/make_screenshots.py [NAME…]     all of them by default

Those of GPT-2 small need HEADSPAN_GPT2_DIR; with HEADSPAN_SMOLLM2_GGUF the gallery includes SmolLM2. The figures of
docs/gallery.md are made by docs/make_figures.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import headspan as hs

IMAGES = Path(__file__).parent / "images"
MARGIN = 14
MODELS = {"GPT-2 small": "HEADSPAN_GPT2_DIR", "SmolLM2-135M": "HEADSPAN_SMOLLM2_GGUF"}


class Shot(NamedTuple):
    """One screenshot: the page, its view, the size of the window, and the elements to crop to (none for all)."""

    make: Callable[[Path], Path]
    fragment: str = ""
    size: tuple[int, int] = (1440, 900)
    parts: Sequence[str] = ()
    scale: float = 1.0


def demo(folder: Path) -> Path:
    hs.report("demo", out=folder / "demo.html", force=True)
    return folder / "demo.html"


def gpt2(folder: Path) -> Path:
    hs.report(os.environ["HEADSPAN_GPT2_DIR"], out=folder / "gpt2.html", labels="gpt2", tokens=0, force=True)
    return folder / "gpt2.html"


def gallery(folder: Path) -> Path:
    there = {name: os.environ[variable] for name, variable in MODELS.items() if os.environ.get(variable)}
    hs.site(folder / "gallery", {"demo": "demo", **there}, tokens=0)
    return folder / "gallery" / "index.html"


def tuned(folder: Path) -> Path:
    """The demo model with one previous-token head rotated, as fine-tuning might do."""
    import numpy as np

    base = hs.open("demo")
    arrays = {role: np.stack([base.read(role, layer) for layer in base.layers]) for role in "QKVO"}
    other = {role: array.copy() for role, array in arrays.items()}
    rng = np.random.default_rng(0)
    other["O"][0, 3] += 1.2 * rng.normal(size=other["O"][0, 3].shape) * other["O"][0, 3].std()
    other["K"][1, 2] = other["K"][1, 2] * 0.4 + 0.8 * other["O"][0, 0]
    change = replace(hs.diff(arrays, other, k=12), base="demo", other="demo with two heads changed")
    hs.report(change, out=folder / "diff.html", force=True)
    return folder / "diff.html"


SHOTS = {
    "report-first": Shot(demo),
    "report-tour": Shot(demo, "#metric=pk&pairings=OK&pair=L0H3.O-L1H0.K&tour=2"),
    "report-large": Shot(demo, "#metric=pk&pairings=OK&head=L1H0&tour=3"),
    "report-watch": Shot(demo, "#pair=L0H3.O-L1H0.K", (1440, 900), ("#inspector .watch",), 2),
    "report-task": Shot(demo, "#at=task", (1300, 1000), ("#task h2", "#task-legend")),
    "demo-circuit": Shot(demo, "", (1440, 1000), ("#diagram svg", "#legend"), 2),
    "report": Shot(gpt2, "#head=L4H7"),
    "site": Shot(gallery, "", (1440, 860)),
    "diff-page": Shot(tuned, "#view=beside&pairings=OK", (1300, 1000), ("#edges h2", "#edges .legend")),
}


def main(names: Sequence[str]) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no Chromium on this machine")
    made: dict[Callable[[Path], Path], Path] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for name in names:
            shot = SHOTS[name]
            if shot.make is gpt2 and not os.environ.get("HEADSPAN_GPT2_DIR"):
                print(f"{name} was left out: HEADSPAN_GPT2_DIR does not name GPT-2 small")
                continue
            if shot.make not in made:
                made[shot.make] = shot.make(Path(folder))
            take(browser, made[shot.make], shot, IMAGES / f"{name}.png")
            print(f"{name}.png")
        browser.close()


def take(browser: Any, file: Path, shot: Shot, picture: Path) -> None:
    """Take one screenshot."""
    width, height = shot.size
    page = browser.new_page(
        viewport={"width": width, "height": height}, device_scale_factor=shot.scale, color_scheme="light"
    )
    page.goto(file.as_uri() + shot.fragment)
    if shot.make is not gallery:
        page.wait_for_selector("html[data-ready=true]")
    page.wait_for_timeout(500)  # for parts that are drawn when near, and transitions
    if not shot.parts:
        page.screenshot(path=picture)
    else:
        # Remove the controls between the parts.
        page.eval_on_selector_all(
            "#zoom, #save, #circuit, #paths, #wiring > .lead", "all => all.forEach((part) => part.remove())"
        )
        page.eval_on_selector(shot.parts[0], "part => part.scrollIntoView({block: 'start'})")
        page.eval_on_selector("html", "root => root.scrollBy(0, -80)")
        boxes = [box for part in shot.parts if (box := page.locator(part).first.bounding_box()) is not None]
        children = [span.bounding_box() for span in page.locator(f"{shot.parts[-1]} span").all()]
        ends = [box["x"] + box["width"] for box in (*boxes, *children) if box is not None]
        left, top = max(0, boxes[0]["x"] - MARGIN), max(0, boxes[0]["y"] - 3)  # a line of text may end just above
        bottom = boxes[-1]["y"] + boxes[-1]["height"] + MARGIN
        page.screenshot(
            path=picture, clip={"x": left, "y": top, "width": max(ends) + MARGIN - left, "height": bottom - top}
        )
    page.close()


if __name__ == "__main__":
    main(sys.argv[1:] or list(SHOTS))
