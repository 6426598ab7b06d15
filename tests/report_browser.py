"""A report opened in a real browser, and measurements of its drawing, for tests."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headspan.results.scores import Scores

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip


@dataclass
class View:
    """An open report, with the errors and requests that occurred in it."""

    page: Any
    scores: Scores
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def drawn(self) -> Any:
        """The page, after the next frame has been drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self.page

    def edges(self) -> set[str]:
        """The edges drawn, as the page names them: ``L0H1.O-L2H0.K``."""
        script = "all => all.filter(e => !e.closest('#task')).map(e => e.dataset.pair)"
        return set(self.page.eval_on_selector_all(".edge-hit", script))

    def visible_edges(self) -> set[str]:
        shown = "!e.closest('#task') && getComputedStyle(e).display !== 'none'"
        script = f"all => all.filter(e => {shown}).map(e => e.dataset.pair)"
        return set(self.page.eval_on_selector_all(".edge-hit", script))

    def state(self, key: str) -> str:
        return self.page.evaluate("key => HS.state[key]", key)

    def fragment(self) -> str:
        return self.page.evaluate("location.hash")

    def text(self, selector: str) -> str:
        return self.drawn().inner_text(selector)

    def shows(self, selector: str, words: str) -> bool:
        """Whether a part of the page contains these words, waiting until it is drawn."""
        self.page.locator(selector, has_text=words).wait_for(timeout=20_000)
        return True

    def fill(self, selector: str, text: str) -> None:
        """Type a number and press Enter, which makes it count at once."""
        self.page.fill(selector, text)
        self.page.press(selector, "Enter")

    def click_head(self, name: str) -> None:
        self.page.click(f'#diagram .node[data-head="{name}"]')

    def saved_csv(self, selector: str) -> list[dict[str, str]]:
        with self.page.expect_download() as download:
            self.page.click(selector)
        return list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))


Open = Callable[..., View]

_DRAWING = """() => {
    const box = (r) => [r.x.baseVal.value, r.y.baseVal.value, r.width.baseVal.value, r.height.baseVal.value];
    return {
        lines: [...document.querySelectorAll("#diagram .edge")].map((path, i) => {
            const n = Math.ceil(path.getTotalLength() / 3);
            const points = Array.from({length: n + 1}, (_, j) => path.getPointAtLength(path.getTotalLength() * j / n));
            const key = document.querySelectorAll("#diagram .edge-hit")[i].dataset.pair;
            return {key, points: points.map((p) => [p.x, p.y])};
        }),
        boxes: [...document.querySelectorAll("#diagram .node")].map((node) => {
            const b = node.querySelector(".shape").getBBox();
            return {name: node.dataset.head, box: [b.x, b.y, b.x + b.width, b.y + b.height]};
        }),
    };
}"""


def drawing(page: Any) -> tuple[list[tuple[str, str, np.ndarray]], dict[str, np.ndarray]]:
    """(source, target, points along the line) of every line as it is drawn, and the corners of every box."""
    found = page.evaluate(_DRAWING)
    lines = []
    for line in found["lines"]:
        source, target = line["key"].split("-")
        lines.append((source[:-2], target[:-2], np.array(line["points"])))
    return lines, {entry["name"]: np.array(entry["box"]) for entry in found["boxes"]}


def crossings(lines: list[tuple[str, str, np.ndarray]]) -> int:
    """How often two lines that share no end cross, from their points; lines of the same two heads count once."""
    unique = list({(source, target): points for source, target, points in lines}.items())
    total = 0
    for i, (ends, first) in enumerate(unique):
        for others, second in unique[i + 1 :]:
            if set(ends) & set(others) or first[-1, 0] <= second[0, 0] or second[-1, 0] <= first[0, 0]:
                continue
            left, right = max(first[0, 0], second[0, 0]), min(first[-1, 0], second[-1, 0])
            x = np.linspace(left, right, 400)
            above = np.interp(x, *first.T) - np.interp(x, *second.T)
            signs = np.sign(above[np.abs(above) > 0.5])
            total += int(np.count_nonzero(np.diff(signs)))
    return total


def lines_through_boxes(lines: list[tuple[str, str, np.ndarray]], boxes: dict[str, np.ndarray]) -> list[str]:
    """Lines that enter a box which is neither of their ends."""
    found = []
    for source, target, points in lines:
        for name, (left, top, right, bottom) in boxes.items():
            inside = (points > (left, top)).all(axis=1) & (points < (right, bottom)).all(axis=1)
            if name not in (source, target) and inside.any():
                found.append(f"{source} → {target} runs through {name}")
    return found


def violations(page: Any, axe: str) -> list[tuple[str, int, Any]]:
    """The problems that axe-core finds in a page (opened with bypass_csp): rule, count and first place."""
    page.evaluate("typeof HS !== 'undefined' && HS.lazyParts.forEach((draw) => draw())")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [(v["id"], len(v["nodes"]), v["nodes"][0]["target"]) for v in found]
