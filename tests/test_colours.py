"""Classes have one colour in figures and on the page, and a head of two classes is striped in both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import headspan as hs
from headspan.plotting.canvas import theme
from headspan.plotting.ellipse import ellipse_figure
from headspan.plotting.grid import grid_figure
from headspan.plotting.style import label_colours

CLASSES = [("L0H1", "previous_token"), ("L2H0", "induction"), ("L2H0", "my own"), ("L1H1", "zebra"), ("L1H0", "apple")]
UNUSED = [("L0H0", f"class {i}") for i in range(3)]


@pytest.fixture(scope="module")
def labels() -> hs.Labels:
    return hs.Labels.from_pairs([*CLASSES, *UNUSED])


@pytest.fixture(scope="module")
def scores() -> hs.Scores:
    """L0H1, L1H0 and L1H1 write what L2H0 reads, so that they are drawn."""
    rng = np.random.default_rng(3)
    arrays = {role: rng.normal(size=(3, 2, 32, 4)) for role in "QKVO"}
    arrays["Q"][2, 0], arrays["K"][2, 0], arrays["V"][2, 0] = arrays["O"][0, 1], arrays["O"][1, 0], arrays["O"][1, 1]
    return hs.score(hs.open(arrays))


def drawn(figure: Any) -> dict[str, list[str]]:
    """The fills of every head of a figure, from left to right."""
    boxes = {
        p.get_gid()[5:]: p for axes in figure.axes for p in axes.patches if (p.get_gid() or "").startswith("node:")
    }
    stripes = [p for axes in figure.axes for p in axes.patches if type(p) is Rectangle and p.get_width() < 5]
    found = {}
    for name, box in boxes.items():
        x, y, wide, high = box.get_x(), box.get_y(), box.get_width(), box.get_height()
        mine = [s for s in stripes if x < s.get_x() < x + wide and abs(s.get_y() - y) < high / 2]
        fills = [box.get_facecolor(), *(s.get_facecolor() for s in sorted(mine, key=lambda s: s.get_x()))]
        found[name] = [to_hex(fill).upper() for fill in fills]
    return found


def test_figures_take_the_colours_of_the_table(scores: hs.Scores, labels: hs.Labels) -> None:
    wiring = hs.wiring(scores, k=1, labels=labels)
    table = label_colours(labels.names)
    with theme():
        for figure in (grid_figure(wiring), ellipse_figure([wiring])):
            fills = drawn(figure)
            for head in ("L0H1", "L1H0", "L1H1", "L2H0"):
                assert fills[head] == [table[name] for name in labels.of(head)], head


def test_the_page_takes_them_too(scores: hs.Scores, labels: hs.Labels, browser: Any, tmp_path: Path) -> None:
    page_file = tmp_path / "page.html"
    report = hs.report(scores, out=page_file, labels=labels)
    table = label_colours(labels.names)
    assert report.payload["labels"]["colours"] == table
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    page.goto(f"{page_file.as_uri()}#k=1&pairings=OQ,OK,OV&shade=labels")
    page.wait_for_selector("html[data-ready=true]")
    for head in ("L0H1", "L1H0", "L1H1", "L2H0"):
        fills = page.eval_on_selector(
            f'.node[data-head="{head}"]',
            "node => [getComputedStyle(node.querySelector('.shape')).fill,"
            " ...[...node.querySelectorAll('.stripe')].map(s => getComputedStyle(s).fill)]",
        )
        seen = ["#" + "".join(f"{int(n):02X}" for n in re.findall(r"\d+", fill)[:3]) for fill in fills]
        assert seen == [table[name] for name in labels.of(head)], head
    page.close()
