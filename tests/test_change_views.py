"""Figures and pages of change: they show the numbers of the library, and the pages ask for nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from conftest import unavailable
from headspan.analysis.drift import Diff
from headspan.analysis.series import Series
from headspan.cli import app
from headspan.explorer.change import change_page
from headspan.figures.canvas import theme
from headspan.figures.change import drift_figure, save_change, series_figure
from headspan.heads import ROLES, Role


def model(share: float, kv: int = 4) -> dict[str, np.ndarray]:
    """Random heads whose keys in layer 2 turn towards what L0H1 writes."""
    random = np.random.default_rng(1)
    arrays = {role: random.normal(size=(3, kv if role in "KV" else 4, 32, 4)) for role in "QKVO"}
    arrays["K"][2, 0] = (1 - share) * arrays["K"][2, 0] + share * arrays["O"][0, 1]
    return arrays


@pytest.fixture(scope="module")
def change() -> Diff:
    return hs.diff(model(0.0), model(0.8), k=4)


@pytest.fixture(scope="module")
def series() -> Series:
    found = hs.track([model(share) for share in (0.0, 0.2, 0.5, 0.8, 1.0)], k=4)
    values = np.linspace(0, 1, 5)[:, None] * np.linspace(0.1, 0.9, 12)[None, :]
    found.head_scores.update(previous_token=values, induction=values[:, ::-1])
    return found


def test_heat_map_of_drift(change: Diff) -> None:
    with theme():
        figure = drift_figure(change)
    images = {image.get_gid(): image.get_array() for axes in figure.axes for image in axes.images}
    assert set(images) >= {"drift:0", "drift:1", "drift:2"}
    grid = np.ma.filled(np.ma.masked_invalid(images["drift:2"]), np.nan)
    assert grid[0, ROLES.index(Role.K)] == pytest.approx(change.of("L2H0.K").drift)
    assert np.isnan(grid).sum() == 15  # nothing else moved
    assert any("1 of 48 weights moved farther than rounding" in text.get_text() for text in figure.texts)


def test_small_multiples(series: Series) -> None:
    with theme():
        figure = series_figure(series)
    lines = {line.get_gid(): line for axes in figure.axes for line in axes.lines}
    assert np.allclose(lines["edge:L0H1-L2H0:OK"].get_ydata(), series.of("L0H1", "L2H0", "OK"))
    assert len([axes for axes in figure.axes if axes.get_visible()]) == 6


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_figures_are_written(change: Diff, series: Series, ending: str, tmp_path: Path) -> None:
    for name, thing in (("diff", change), ("series", series)):
        save_change(thing, tmp_path / f"{name}.{ending}")
        save_change(thing, tmp_path / f"{name}.{ending}")  # over its own kind
        assert (tmp_path / f"{name}.{ending}").stat().st_size > 3000


def test_pages_hold_their_data_and_no_way_out(change: Diff, series: Series) -> None:
    for thing in (change, series):
        html = change_page(thing).html
        assert "default-src 'none'" in unescape(html) and not re.search(r"(src|href)=[\"']?(https?:)?//", html)
    hostile = hs.diff(model(0.0), model(0.8), k=4)
    hostile.notes.append("</script><script>alert(1)</script>")
    html = change_page(hostile).html
    assert "<script>alert(1)" not in html
    payload = json.loads(re.search(r'id="payload">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert payload["notes"][-1].startswith("</script>")


def test_report_makes_these_pages_too(change: Diff, series: Series, tmp_path: Path) -> None:
    for name, thing in (("d", change), ("s", series)):
        page = hs.report(thing, out=tmp_path / f"{name}.html")
        assert (tmp_path / f"{name}.html").read_text(encoding="utf-8") == page.html == change_page(thing).html


def test_commands_write_all_forms(tmp_path: Path) -> None:
    runner = CliRunner()
    outs = [str(tmp_path / f"d.{ending}") for ending in ("html", "png", "safetensors")]
    done = runner.invoke(app, ["diff", "demo", "demo", *(part for out in outs for part in ("--out", out)), "--json"])
    assert done.exit_code == 0, done.exception
    assert all(Path(out).stat().st_size > 1000 for out in outs)
    refused = runner.invoke(app, ["diff", "demo", "demo", "--out", str(tmp_path / "d.txt")])
    assert "its name must end in" in str(refused.exception)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        unavailable("there is no Chromium on this machine")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


def opened(browser: Any, path: Path, problems: list[str], fragment: str = "") -> Any:
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri() + fragment)
    page.wait_for_selector("html[data-ready=true]")
    return page


def edges_of(page: Any) -> set[str]:
    return set(page.eval_on_selector_all(".edge-hit", "all => all.map(e => e.dataset.pair)"))


def test_the_slider_moves_the_wiring(browser: Any, series: Series, tmp_path: Path) -> None:
    change_page(series).save(tmp_path / "s.html")
    problems: list[str] = []
    page = opened(browser, tmp_path / "s.html", problems, "#top=3")

    def expected(step: int, top: int) -> set[str]:
        chosen = (i for i in range(len(series.edges)) if 0 < series.ranks[step, i] <= top)
        edges = (series.edges[i] for i in chosen)
        return {f"{e.source}.{e.pairing.source}-{e.target}.{e.pairing.target}" for e in edges}

    assert edges_of(page) == expected(4, 3)
    assert "L0H1.O-L2H0.K" in edges_of(page)
    for step in range(5):
        page.eval_on_selector("#step", "(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }", str(step))
        assert edges_of(page) == expected(step, 3)
        assert page.inner_text("#step-name").startswith(f"step {step} ({step + 1} of 5)")
    assert "L0H1.O-L2H0.K" not in expected(0, 3)
    page.select_option("#control-against", "from_previous")
    cell = '[data-port="L2H0.K"]'
    page.eval_on_selector("#step", "(s) => { s.value = 2; s.dispatchEvent(new Event('input')); }")
    assert float(page.get_attribute(cell, "fill-opacity")) == 1
    assert float(page.get_attribute('[data-port="L1H0.K"]', "fill-opacity")) < 1e-3
    assert page.evaluate("location.hash") != ""
    page.click("#play")
    for _ in range(100):
        if page.evaluate("HS.state.step") == "4":
            break
        page.wait_for_timeout(100)
    assert edges_of(page) == expected(4, 3)
    assert page.locator("#head-scores tbody tr").count() == 12
    assert problems == []


def test_the_page_of_two_models(browser: Any, change: Diff, tmp_path: Path) -> None:
    change_page(change).save(tmp_path / "d.html")
    problems: list[str] = []
    page = opened(browser, tmp_path / "d.html", problems)
    names = {f"{e.source}.{e.pairing.source}-{e.target}.{e.pairing.target}": e for e in change.edges}
    assert edges_of(page) == set(names)
    page.click('button[data-value="weakened"]')
    assert edges_of(page) == {name for name, edge in names.items() if edge.kind != "weakened"}
    page.click('button[data-value="OK"]')
    assert edges_of(page) == set()  # only keys changed
    assert float(page.get_attribute('[data-port="L2H0.K"]', "fill-opacity")) == 1
    assert float(page.get_attribute('[data-port="L2H1.K"]', "fill-opacity")) == 0
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    assert problems == []
