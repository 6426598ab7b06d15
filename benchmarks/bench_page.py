"""The time to make a page and its response time, for a thousand heads and, with HEADSPAN_GPT2_DIR, GPT-2 small.

Run: python benchmarks/bench_page.py [LAYERS HEADS]     needs playwright and a Chromium

A click, a switch to another similarity, or drawing the best 200 edges of each pairing is measured until it is drawn, in
processor time of the page's main thread, so that other work on the machine does not matter. The first of each is
reported separately, since it may have to decode or arrange what later ones reuse.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import headspan as hs
from headspan.results.scores import Scores
from headspan.vocabulary.heads import PAIRINGS, ROLES, pair_mask
from headspan.vocabulary.ports import PortTable

DRAWN = """what => new Promise(done => {
    if (!what.head) HS.set(what);
    else document.querySelector(`.node[data-head="${what.head}"]`)
        .dispatchEvent(new MouseEvent("click", {bubbles: true}));
    requestAnimationFrame(() => setTimeout(done));
})"""


class Clock:
    """Milliseconds of processor time that the main thread of a page takes for a change of the view."""

    def __init__(self, page: Any) -> None:
        self.page, self.session = page, page.context.new_cdp_session(page)
        self.session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def _now(self) -> float:
        found = self.session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(metric["value"] for metric in found if metric["name"] == "TaskDuration")

    def __call__(self, what: dict[str, Any]) -> float:
        start = self._now()
        self.page.evaluate(DRAWN, what)
        return self._now() - start


def random_scores(layers: int, heads: int) -> Scores:
    """A result of any size without a model."""
    table, rng = PortTable.regular(range(layers), heads, heads), np.random.default_rng(0)
    count, arrays = layers * heads, {}
    for metric in ("pk", "cs"):
        for pairing in PAIRINGS:
            values = 4 + rng.gamma(2.0, 1.0, (count, count)) if metric == "pk" else rng.beta(2, 30, (count, count))
            mask = pair_mask(pairing, table.of(pairing.source), table.of(pairing.target), "default")
            arrays[metric, pairing] = np.where(mask, values, np.nan).astype(np.float32)
    ranks = {role: np.full(count, 128, dtype=np.int32) for role in ROLES}
    return Scores(arrays, table, 4096, ranks, {"reference": f"random {layers}×{heads}", "folding": "none"})


def measure(browser: Any, scores: Scores, fragment: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file, start = Path(folder) / "page.html", time.process_time()
        hs.report(scores, out=file)
        made, size = time.process_time() - start, file.stat().st_size / 1e6
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(file.as_uri() + fragment)
        page.wait_for_selector("html[data-ready=true]")
        page.wait_for_timeout(1500)  # about the time that a reader takes to find the control
        timed = Clock(page)
        switches = [timed({"metric": metric}) for metric in ("cs", "pk", "cs", "pk")]
        names = page.eval_on_selector_all("#diagram .node", "all => all.slice(0, 6).map(node => node.dataset.head)")
        clicks = [timed({"head": name}) for name in names]
        page.evaluate("HS.clear()")
        many = [timed({"k": k, "pairings": "OQ,OK,OV"}) for k in (200, 20, 200)][::2]
        page.close()
    answers = "; ".join(
        f"{what} {times[0]:.0f} ms at first, then {np.median(times[1:]):.0f} ms"
        for what, times in (("switch", switches), ("click", clicks), ("k = 200", many))
    )
    return f"{scores.provenance['reference']}: made in {made:.1f} s of CPU, {size:.1f} MB; {answers}"


def main(arguments: list[str]) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    layers, heads = map(int, arguments or ("32", "32"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        print(measure(browser, random_scores(layers, heads), "#idle=1"))
        if os.environ.get("HEADSPAN_GPT2_DIR"):
            scores = hs.score(os.environ["HEADSPAN_GPT2_DIR"], ["pk", "cs"])
            scores.provenance["reference"] = "GPT-2 small"
            print(measure(browser, scores, ""))
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
