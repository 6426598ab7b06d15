"""Change figures and pages: they show the library's numbers, and the pages make no requests."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from headspan.change.diff import Diff
from headspan.change.series import Series
from headspan.cli import app
from headspan.explorer.change import change_page
from headspan.plotting.canvas import theme
from headspan.plotting.change import drift_figure, save_change, series_figure
from headspan.subspaces.random_subspaces import moments
from headspan.vocabulary.heads import FLOW_PAIRINGS, ROLES, Role
from report_browser import violations


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
    assert any("1 of 48 weights" in text.get_text() for text in figure.texts)


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
    assert "must end in" in str(refused.exception)


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


def wirings(change: Diff) -> tuple[set[str], set[str]]:
    """The strongest k of every pairing, before and after, by the scores themselves."""
    found = []
    for scores in (change.before, change.after):
        edges = [edge for p in FLOW_PAIRINGS for edge in scores["pk", p].forward().top(change.k)]
        found.append({f"{e.source}.{e.pairing.source}-{e.target}.{e.pairing.target}" for e in edges})
    return found[0], found[1]


def test_the_page_of_two_models(browser: Any, change: Diff, tmp_path: Path) -> None:
    change_page(change).save(tmp_path / "d.html")
    problems: list[str] = []
    page = opened(browser, tmp_path / "d.html", problems)
    names = {f"{e.source}.{e.pairing.source}-{e.target}.{e.pairing.target}": e for e in change.edges}
    before, after = wirings(change)
    assert edges_of(page) == set(names) | (before & after)
    dashed = set(page.eval_on_selector_all('.edge-hit[data-look="left"]', "all => all.map(e => e.dataset.pair)"))
    assert dashed == {name for name, edge in names.items() if edge.kind in ("left", "weakened")}
    page.click('button[data-value="kept"]')
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


def test_two_wirings_side_by_side(browser: Any, change: Diff, tmp_path: Path) -> None:
    """Each side has the strongest edges of its model; heads have the same places; edges on one side stand out."""
    change_page(change).save(tmp_path / "d.html")
    problems: list[str] = []
    page = opened(browser, tmp_path / "d.html", problems, "#view=beside")
    for side, expected, other, look in zip(
        ("before", "after"), wirings(change), wirings(change)[::-1], ("left", "entered"), strict=True
    ):
        edges = page.eval_on_selector_all(f"#{side} .edge-hit", "all => all.map(e => [e.dataset.pair, e.dataset.look])")
        assert {pair for pair, _ in edges} == expected
        assert {pair for pair, shown in edges if shown == look} == expected - other
    places = [
        page.eval_on_selector_all(f"#{side} .node text", "all => all.map(t => [t.textContent, t.getAttribute('y')])")
        for side in ("before", "after")
    ]
    assert places[0] == places[1] and len(places[0]) > 4
    for width in (1440, 1024, 420):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.select_option("#control-view", "over")
    assert page.locator("#before").count() == 0 and page.evaluate("location.hash") == ""
    assert problems == []


def test_a_step_against_another(browser: Any, series: Series, tmp_path: Path) -> None:
    """Edges that came and went between two steps; heads stay where they are while the slider moves."""
    change_page(series).save(tmp_path / "s.html")
    problems: list[str] = []
    page = opened(browser, tmp_path / "s.html", problems, "#top=3&with=first")

    def among(step: int) -> set[str]:
        chosen = (series.edges[i] for i in range(len(series.edges)) if 0 < series.ranks[step, i] <= 3)
        return {f"{e.source}.{e.pairing.source}-{e.target}.{e.pairing.target}" for e in chosen}

    for step in (4, 2, 0):
        page.eval_on_selector("#step", "(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }", str(step))
        edges = page.eval_on_selector_all(".edge-hit", "all => all.map(e => [e.dataset.pair, e.dataset.look])")
        assert {pair for pair, look in edges if look == "entered"} == among(step) - among(0)
        assert {pair for pair, look in edges if look == "left"} == among(0) - among(step)
        assert {pair for pair, look in edges if look == "kept"} == among(step) & among(0)
    where = "all => all.map(t => [t.textContent, t.getAttribute('x'), t.getAttribute('y')])"
    first = page.eval_on_selector_all("#wiring .node text", where)
    page.eval_on_selector("#step", "(s) => { s.value = 4; s.dispatchEvent(new Event('input')); }")
    assert page.eval_on_selector_all("#wiring .node text", where) == first
    assert among(4) != among(0) and problems == []


def test_shared_heads_are_drawn_with_their_group(browser: Any, tmp_path: Path) -> None:
    change_page(hs.diff(model(0.0, kv=2), model(0.8, kv=2), k=6)).save(tmp_path / "d.html")
    problems: list[str] = []
    page = opened(browser, tmp_path / "d.html", problems)
    assert page.locator(".node .shape.kv").count() > 0 and page.locator(".diagram .group").count() > 0
    assert problems == []


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (420, "dark")])
def test_axe_finds_nothing(
    width: int, scheme: str, browser: Any, axe: str, change: Diff, series: Series, tmp_path: Path
) -> None:
    change_page(change).save(tmp_path / "d.html")
    change_page(series).save(tmp_path / "s.html")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    for address in ("d.html", "d.html#view=beside", "s.html", "s.html#step=2&with=last"):
        page.goto("about:blank")
        page.goto(f"{tmp_path.as_uri()}/{address}")
        page.wait_for_selector("html[data-ready=true]")
        assert violations(page, axe) == [], address
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert violations(page, axe) == []
    context.close()


def test_lines_are_as_strong_as_they_rise_above_chance(change: Diff, series: Series) -> None:
    level = moments(32, 4)
    start = float(level.mean + 3 * level.sd)

    def expected(values: Any) -> np.ndarray:
        values = np.nan_to_num(np.asarray(values, dtype=np.float64))
        return np.clip((values - start) / (4 - start), 0, 1)

    edges = change_page(change).payload["edges"]
    for name in ("before", "after"):
        found = [edge[f"{name}_strength"] for edge in edges]
        np.testing.assert_allclose(found, expected([edge[name] for edge in edges]), atol=6e-5)
    payload = change_page(series).payload
    found = np.frombuffer(b64decode(payload["strengths"]), dtype="<f4").reshape(series.scores.shape)
    np.testing.assert_allclose(found, expected(series.scores), atol=1e-6)
    assert change_page(replace(series, provenance={})).payload["strengths"] is None, "a file of an earlier version"
