"""Evidence on the page: how lines and dots look, circuits alone, controls that say what they cannot draw."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import headspan as hs
from headspan.explorer.demo_measurements import with_shipped
from headspan.graphs.selection import wiring
from headspan.plotting.style import EDGE_REST, ROLE_COLOURS, edge_width
from headspan.results.effects import effects_of
from headspan.results.scores import Scores
from headspan.vocabulary.heads import Pairing
from report_browser import Open, View
from report_models import synthetic_scores

Demo = tuple[Path, Scores]


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def lines(view: View) -> dict[str, dict[str, Any]]:
    """Colour, width and arrowhead of every line by the edge's name."""
    script = """() => [...document.querySelectorAll("#diagram .edge")].map((path, i) => {
        const style = getComputedStyle(path);
        return [HS.wiring.lines()[i].hit.dataset.pair,
            {colour: style.stroke, width: parseFloat(style.strokeWidth), opacity: style.opacity,
             arrow: getComputedStyle(document.querySelector(path.getAttribute("marker-end").slice(4, -1))).fill}];
    })"""
    return dict(view.drawn().evaluate(script))


def dots(view: View) -> dict[str, tuple[bool, float]]:
    """Whether the dot of an edge is filled, and its radius."""
    script = """() => [...document.querySelectorAll("#diagram .effect-dot")].map((dot) =>
        [dot.dataset.large ?? dot.dataset.small, [Boolean(dot.dataset.large), Number(dot.getAttribute("r"))]])"""
    return dict(view.drawn().evaluate(script))


def name(edge: Any) -> str:
    return f"{edge.source}.{edge.pairing.source}-{edge.target}.{edge.pairing.target}"


def until(view: View, key: str, value: str) -> bool:
    """Wait until the view has this setting."""
    for _ in range(100):
        if view.state(key) == value:
            return True
        view.page.wait_for_timeout(50)
    return False


def test_lines_look_as_the_figures_draw_them(open_page: Open, demo: Demo) -> None:
    path, scores = demo
    view = open_page(path, scores, "#pairings=OQ,OK,OV&k=30")
    chosen = wiring(with_shipped(scores), k=30)
    seen = lines(view)
    assert len(seen) == len(chosen.edges) == 90
    bits = chosen.evidence()
    assert {bool(b) for b in bits} == {True, False}
    for edge, strength, evidence in zip(chosen.edges, chosen.strengths(), bits, strict=True):
        colour = rgb(ROLE_COLOURS[edge.pairing.target] if evidence else EDGE_REST)
        look = seen[name(edge)]
        assert (look["colour"], look["arrow"], look["opacity"]) == (colour, colour, "1"), name(edge)
        assert look["width"] == pytest.approx(edge_width(strength, bool(evidence)), abs=0.02)
    count = view.text("#wiring-notes")
    kinds = [sum(bool(b and b & 1) for b in bits), sum(bool(b and b & 2) for b in bits)]
    both, none = sum(b == 3 for b in bits), sum(b == 0 for b in bits)
    assert f"90 drawn: {kinds[0]} stand above reversed pairs, {kinds[1]} have large effects, {both} both" in count
    assert f"{none} neither" in count and "OV: 23 have large effects, but none stands above reversed pairs" in count


def test_the_area_of_a_dot_is_its_effect(open_page: Open, demo: Demo) -> None:
    path, scores = demo
    view = open_page(path, scores, "#pairings=OQ,OK,OV&k=30")
    measured, seen = effects_of(with_shipped(scores)), dots(view)
    areas = []
    for edge in wiring(with_shipped(scores), k=30).edges:
        place = measured.matrix(edge.pairing).find(edge.source, edge.target)
        filled, radius = seen[name(edge)]
        assert filled == bool(measured.large(edge.pairing)[place])
        if filled:
            areas.append(radius**2 / measured.of(edge.pairing)[place])
    assert len(areas) > 20 and np.ptp(areas) < 0.02 * np.mean(areas)
    assert "large effect (TV or norm):" in view.text("#legend") and "measured, not large" in view.text("#legend")
    overlap = """() => { const all = [...document.querySelectorAll("#diagram .effect-dot")].map((d) =>
        ["cx", "cy", "r"].map((key) => Number(d.getAttribute(key))));
        return all.flatMap((a, i) => all.slice(i + 1).filter((b) =>
            Math.hypot(a[0] - b[0], a[1] - b[1]) < 0.6 * (a[2] + b[2]))).length; }"""
    assert view.page.evaluate(overlap) <= 2, "dots are kept apart"


def test_lines_of_scripts_are_short() -> None:
    folder = Path(hs.__file__).parent / "explorer" / "static"
    long = [
        f"{script.name}:{number}"
        for script in sorted(folder.glob("*.js"))
        for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 120
    ]
    assert long == []


def test_nothing_drawn_says_why_and_at_which_q_something_would_be(open_page: Open, demo: Demo) -> None:
    path, scores = demo
    view = open_page(path, scores)
    page = view.page
    page.select_option("#control-rule", "significance")
    assert view.state("q") == "0.05" and len(view.edges()) == 40
    page.click('.toggle[data-pairing="OK"]')
    page.click('.toggle[data-pairing="OV"]')
    q = float(np.nanmin(hs.significance(scores, "OV", null="reversed").q))
    assert view.edges() == set()
    assert "no OV pair stands out from reversed pairs at q ≤ 0.05" in view.text("#wiring-notes")
    assert f"The smallest q is OV {q:.4f}" in view.text("#wiring-notes") and 0.1 < q < 0.2
    page.click("#wider-q")
    assert view.state("q") == "0.2" and view.edges()
    page.click('.toggle[data-pairing="OV"]')
    assert "Choose at least one pairing" in view.text("#wiring-notes")
    view = open_page(path, scores, "#rule=significance&pairings=QQ")
    assert "QQ have no q-values against reversed pairs" in view.text("#wiring-notes")


def test_k_beyond_the_page_is_said_and_typing_waits(open_page: Open, tmp_path: Path) -> None:
    scores = synthetic_scores(6, 12)
    hs.report(scores, out=tmp_path / "page.html")
    view = open_page(tmp_path / "page.html", scores, "#pairings=OK")
    page = view.page
    page.evaluate("() => { window.draws = 0; HS.on(['k'], () => { window.draws += 1; }); }")
    page.locator("#control-k").press_sequentially("00", delay=20)  # 20 becomes 2000
    assert until(view, "k", "2000")
    assert page.evaluate("draws") == 1 and len(view.edges()) == 400
    assert "k = 2,000 is more than this page holds: it draws the best 400 pairs" in view.text("#wiring-notes")
    page.select_option("#control-rule", "top-per-target")
    assert "the best 5 sources of each target" in view.text("#wiring-notes")
    assert view.edges() == {name(e) for e in wiring(scores, "OK", k=5, rule="top-per-target").edges}
    assert open_page(tmp_path / "page.html", scores, "#pairings=OK&k=400").text("#wiring-notes").count("holds") == 0


def test_a_circuit_alone_has_its_own_layout_and_full_strength(open_page: Open, demo: Demo) -> None:
    path, scores = demo
    pins = ["L0H3.O-L1H0.K", "L0H3.O-L1H2.K", "L0H0.O-L1H5.Q"]
    view = open_page(path, scores, "#pins=" + "|".join(pins) + "&circuit=my%20loop")
    page = view.page
    assert view.edges() > set(pins[:2])
    page.click("#circuit-only")
    assert view.edges() == set(pins) and "only=1" in view.fragment()
    assert all(look["colour"] != rgb(EDGE_REST) for look in lines(view).values())
    assert page.locator("#diagram .node").count() == 5
    assert "Circuit “my loop” alone. 3 drawn:" in view.text("#wiring-notes")
    with page.expect_download() as download:
        page.click("#save-svg")
    assert download.value.suggested_filename == "demo-my-loop.svg"
    picture = ElementTree.parse(download.value.path()).getroot()
    words = " ".join(node.text or "" for node in picture.iter("{http://www.w3.org/2000/svg}text"))
    assert "circuit “my loop”" in words and "3 edges chosen by hand" in words and "best" not in words
    assert "read by queries" in words and "read by keys" in words and "PK:" in words and "large effect" in words
    assert len(picture.findall(".//*[@class='legend']/{*}circle")) == 4
    widths = [float(e.get("stroke-width") or 0) for e in picture.findall(".//*[@class='legend']/{*}line")]
    assert max(widths) == pytest.approx(7) and "grey" not in words
    size = [float(v) for v in (picture.get("viewBox") or "").split()]
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        x, y = float(text.get("x") or 0), float(text.get("y") or 0)
        assert 0 <= x < size[2] and 0 <= y < size[3]
    page.click("#circuit-only")
    assert view.edges() > set(pins[:2])
    page.evaluate("HS.set({rule: 'significance', null: 'within'})")
    assert "q ≤ 0.05 against heads of the same two layers" in page.evaluate("HS.save.picture().text")


def test_pinning_is_one_step_and_the_middle_of_a_path_is_not_dimmed(open_page: Open, demo: Demo) -> None:
    path, scores = demo
    view = open_page(path, scores, "#head=L0H3&pairings=OK")
    page = view.page
    before = page.evaluate("history.length")
    page.click('#inspector [data-pin="L0H3.O-L1H0.K"]')
    assert page.evaluate("history.length") == before + 1 and view.state("head") == "L1H0"
    page.evaluate("history.back()")
    assert until(view, "head", "L0H3") and view.state("pins") == ""
    view = open_page(path, scores, "#pins=L0H3.O-L1H0.K&head=L0H5&pairings=OK")
    script = "name => getComputedStyle(document.querySelector(`.node[data-head='${name}']`)).opacity"
    assert [view.page.evaluate(script, head) for head in ("L0H3", "L1H0")] == ["1", "1"]
    assert view.page.evaluate(script, "L0H4") != "1"


def test_the_keyboard_reaches_an_edge_and_opens_its_card(open_page: Open, demo: Demo) -> None:
    view = open_page(*demo)
    page = view.page
    page.keyboard.press("Tab")
    for _ in range(80):
        if page.evaluate("document.activeElement.classList.contains('node')"):
            break
        page.keyboard.press("Tab")
    head = page.evaluate("document.activeElement.dataset.head")
    page.keyboard.press("e")
    first = page.evaluate("document.activeElement.dataset.pair")
    assert head in re.split(r"[.-]", first)
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.dataset.pair")
    assert second != first and "evidence:" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Enter")
    assert view.state("pair") == second and second.split("-")[0] in view.text("#card-title")
    page.keyboard.press("Escape")
    assert view.state("pair") == ""


def test_the_headline_and_the_whole_diagram_are_on_the_first_screen(open_page: Open, demo: Demo) -> None:
    path, scores = demo
    view = open_page(path, scores, "#pairings=OQ,OK,OV")
    page = view.page
    page.set_viewport_size({"width": 1440, "height": 900})
    page.wait_for_timeout(400)  # the page is drawn again for the new window
    box = page.evaluate("""() => ['#headline', '#controls', '#diagram'].map((s) => {
        const r = document.querySelector(s).getBoundingClientRect(); return [r.top, r.bottom]; })""")
    assert box[0][0] > 0 and box[0][1] <= box[1][0] < box[2][0] and box[2][1] <= 900
    assert page.evaluate("HS.byId('controls').getBoundingClientRect().height") < 60, "one row"
    inside = """() => { const box = HS.byId("diagram").getBoundingClientRect();
        return [...document.querySelectorAll("#diagram .node")].every((n) => { const r = n.getBoundingClientRect();
            return r.top >= box.top && r.bottom <= box.bottom && r.left >= box.left && r.right <= box.right; }); }"""
    assert page.evaluate(inside)
    assert page.is_hidden("#control-metric") and page.is_hidden('.toggle[data-pairing="QQ"]')
    assert page.locator(".top-findings button").count() == 3
    page.click("#headline-show")
    assert view.state("pair") == "L0H3.O-L1H0.K"
    assert "Evidence" in view.text("#inspector") and "above reversed pairs (q 0.0246); large effect" in view.text(
        "#inspector"
    )
    place = scores["pk", Pairing.parse("OK")].find("L0H3", "L1H0")
    assert f"{effects_of(with_shipped(scores)).of('OK')[place]:.4f} total variation: large" in view.text("#inspector")
