"""The report in a real browser: every control does what it says, and nothing leaves the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.explorer.demo_measurements import with_shipped
from headspan.explorer.report import report
from headspan.graphs.selection import wiring
from headspan.plotting.style import label_colours
from headspan.results.effects import effects_of
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.statistics.hubs import hubs
from headspan.subspaces.random_subspaces import moments
from report_browser import Open
from report_models import HOSTILE, array_model, synthetic_scores

LABELS = Labels.from_pairs([("L0H1", "writer"), ("L0H2", "writer"), ("L2H0", "reader"), ("L3H3", "reader")])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    """A report of a small model with everything in it: labels, head scores, tokens, angles."""
    weights = array_model()
    scores = hs.score(weights)
    scores.annotations["behaviour"] = {"induction": {str(h): h.index / 10 for h in scores.heads("Q")}}
    path = tmp_path_factory.mktemp("report") / "small.html"
    report(scores, weights, path, labels=LABELS)
    return path, scores


@pytest.fixture(scope="module")
def gpt2(gpt2_page: Path) -> tuple[Path, Scores]:
    return gpt2_page / "page.html", hs.load(gpt2_page / "scores.safetensors")


def expected(scores: Scores, **choice: Any) -> set[str]:
    """The same edges from the library."""
    return {f"{e.source}.{e.pairing.source}-{e.target}.{e.pairing.target}" for e in wiring(scores, **choice).edges}


# ------------------------------------------------------------ wiring and controls


@pytest.mark.parametrize("which", ["demo", "gpt2"])
def test_edge_controls_choose_what_the_library_chooses(
    which: str, open_page: Open, request: pytest.FixtureRequest
) -> None:
    path, scores = request.getfixturevalue(which)
    view = open_page(path, scores)
    page = view.page
    opening = ["OK"] if which == "demo" else ["OQ", "OK", "OV"]  # a small model opens with 20 lines, not with 60
    assert view.edges() == expected(scores, k=20, pairing=opening)
    for pairing in {"OQ", "OK", "OV"} - set(opening):
        page.click(f'.toggle[data-pairing="{pairing}"]')
    view.fill("#control-k", "7")
    assert view.edges() == expected(scores, k=7)
    page.click("#more > summary")
    page.select_option("#control-metric", "cs")
    assert view.edges() == expected(scores, k=7, metric="cs")
    page.select_option("#control-metric", "pk")
    page.click('.toggle[data-pairing="OV"]')
    assert view.edges() == expected(scores, k=7, pairing="OQ,OK")
    page.click('.toggle[data-pairing="QK"]')
    assert view.edges() == expected(scores, k=7, pairing="OQ,OK,QK")
    page.click('.toggle[data-pairing="QK"]')
    page.select_option("#control-rule", "top-per-target")
    view.fill("#control-k", "2")
    assert view.edges() == expected(scores, k=2, rule="top-per-target", pairing="OQ,OK")
    least = float(np.float32(scores["pk", "OK"].top(9)[-1].score))
    page.select_option("#control-rule", "threshold")
    view.fill("#control-min", repr(least))
    assert view.edges() == expected(scores, rule="threshold", minimum=least, pairing="OQ,OK")
    assert page.is_hidden("#control-k") and page.is_hidden("#control-q")


# ------------------------------------------------------------ effects


def test_edges_of_large_effect_are_marked_and_can_be_had_alone(open_page: Open, demo: tuple[Path, Scores]) -> None:
    path, scores = demo
    known = with_shipped(scores)
    view = open_page(path, scores)
    page = view.page

    def marked() -> set[str]:
        return set(page.eval_on_selector_all(".effect-dot.large", "all => all.map(e => e.dataset.large)"))

    large = expected(known, k=64, pairing=["OK"], large_effect=True)
    assert len(large) == 28
    assert marked() == large & view.edges() and len(marked()) == len(view.edges()) == 20
    assert "20 have large effects" in view.text("#wiring-notes")
    assert "large effect" in view.text("#legend")
    page.check("#control-large")
    assert view.edges() == marked() == expected(known, k=20, pairing=["OK"], large_effect=True)
    assert "large=1" in view.fragment()
    for pairing in ("OQ", "OV"):
        page.click(f'.toggle[data-pairing="{pairing}"]')
    view.fill("#control-k", "9")
    assert view.edges() == expected(known, k=9, large_effect=True)
    page.select_option("#control-rule", "top-per-target")
    view.fill("#control-k", "1")
    assert view.edges() == expected(known, k=1, rule="top-per-target", large_effect=True)
    view.click_head("L1H0")
    shown = page.eval_on_selector_all(
        ".effect-dot.large", "all => all.filter(e => getComputedStyle(e).display !== 'none').length"
    )
    assert shown == len(view.visible_edges()) < len(view.edges())


def test_effects_in_table_card_and_csv(open_page: Open, demo: tuple[Path, Scores]) -> None:
    path, scores = demo
    measured = effects_of(with_shipped(scores))
    view = open_page(path, scores, "#pair=L0H3.O-L1H0.K&pairings=OQ,OK,OV")
    page = view.page
    shown = float(page.get_attribute("[data-effect]", "data-effect") or "nan")
    assert shown == measured.at("OK", "L0H3", "L1H0")
    assert f"{shown:.4f}" in view.text("#inspector") and "total variation" in view.text("#inspector")
    facts = ("large, 3.3 times that of a random output", "floor 0.05", "336 tokens", "1,095 tokens")
    assert all(fact in view.text("#inspector") for fact in facts)
    page.click("#edge-list > summary")
    rows = view.saved_csv('[data-csv="edges-pk"]')
    assert len(rows) == 60
    for row in rows:
        matrix = measured.matrix(row["pairing"])
        place = matrix.sources.index(hs.Head.parse(row["source"])), matrix.targets.index(hs.Head.parse(row["target"]))
        assert float(row["effect"]) == matrix.values[place]
        assert np.float32(row["percentile_in_layers"]) == np.float32(measured.percentiles(row["pairing"])[place])
        assert row["effect_unit"] == measured.unit(row["pairing"])
        assert row["large_effect"] == str(bool(measured.large(row["pairing"])[place])).lower()
    page.click('#edge-table th[data-key="effect"] button')
    best = max(float(row["effect"]) for row in rows)
    assert f"{best:.4f}" in page.inner_text("#edge-table tbody tr:first-child")


def test_a_page_without_effects_does_not_speak_of_them(open_page: Open, small: tuple[Path, Scores]) -> None:
    path, scores = small
    view = open_page(path, scores, "#large=1")
    assert view.state("large") == "" and view.edges() == expected(scores, k=20)
    assert view.page.query_selector("#control-large") is None and view.page.query_selector(".effect-dot") is None
    assert "large effect" not in view.text("#legend") and "Effect" not in view.text("#edge-list")
    assert "Effects were not measured" in view.text("#wiring-notes")


@pytest.mark.parametrize("null", ["random", "reversed"])
def test_significance_rule(null: str, open_page: Open, gpt2: tuple[Path, Scores]) -> None:
    path, scores = gpt2
    view = open_page(path, scores)
    view.page.select_option("#control-rule", "significance")
    view.page.select_option("#control-null", null)
    view.page.select_option("#control-q", "0.05")
    view.page.click('.toggle[data-pairing="OQ"]')
    view.page.click('.toggle[data-pairing="OV"]')
    chosen = expected(scores, pairing="OK", rule="significance", q=0.05, null=null)
    if len(chosen) <= 400:
        assert view.edges() == chosen
        assert chosen
    else:  # the page draws the strongest and says so
        assert len(view.edges()) == 400
        assert view.edges() == expected(scores, pairing="OK", k=400)
        assert "More pass in OK" in view.text("#wiring-notes")


def test_significance_and_minimum_can_leave_nothing(open_page: Open, small: tuple[Path, Scores]) -> None:
    view = open_page(*small)
    view.page.click("#more > summary")
    view.fill("#control-min", "1000")
    assert view.edges() == set()
    assert "No pair has so large a score" in view.text("#wiring-notes")


def test_a_head_keeps_its_edges_and_opens_its_card(open_page: Open, gpt2: tuple[Path, Scores]) -> None:
    path, scores = gpt2
    view = open_page(path, scores)
    view.click_head("L4H7")
    own = {edge for edge in expected(scores, k=20) if "L4H7." in edge}
    assert view.visible_edges() == own
    assert len(own) > 10
    card = view.text("#inspector")
    assert "L4H7" in card
    assert "Hub ranks" in card
    outlet = hubs(scores, "OK").outlet
    rows = view.saved_csv('#inspector [data-csv="L4H7-hubs"]')
    line = next(row for row in rows if (row["pairing"], row["kind"]) == ("OK", "outlet"))
    assert int(line["rank"]) == outlet.rank_of("L4H7")
    assert np.float32(line["value"]) == np.float32(outlet.of("L4H7"))
    view.click_head("L4H7")
    assert view.visible_edges() == expected(scores, k=20)
    assert "What an edge means" in view.text("#inspector")


def test_a_line_opens_its_pair_card(open_page: Open, gpt2: tuple[Path, Scores]) -> None:
    path, scores = gpt2
    view = open_page(path, scores)
    view.page.eval_on_selector(
        '[data-pair="L4H11.O-L5H1.K"]', "e => e.dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    card = view.text("#inspector")
    assert "L4H11.O → L5H1.K" in card
    assert f"{scores['pk', 'OK'].at('L4H11', 'L5H1'):.3f}" in card
    assert "1 of 9,504 OK pairs" in card
    assert view.page.locator("#inspector .ray").count() == 64
    shown = view.page.get_attribute("#inspector [data-score]", "data-score")
    assert np.float32(shown) == np.float32(scores["pk", "OK"].at("L4H11", "L5H1"))
    view.page.click('#inspector button:has-text("VK")')
    assert "L4H11.V → L5H1.K" in view.text("#inspector")
    assert view.page.evaluate("HS.state.pair") == "L4H11.V-L5H1.K"


def test_tooltips_show_the_numbers(open_page: Open, small: tuple[Path, Scores]) -> None:
    path, scores = small
    view = open_page(path, scores)
    view.page.hover('.node[data-head="L2H0"]')
    tip = view.text("#tip")
    assert "L2H0" in tip
    assert "reader" in tip
    assert "induction 0" in tip
    script = "e => e.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: 300, clientY: 300}))"
    view.page.eval_on_selector('[data-pair="L0H1.O-L2H0.K"]', script)
    assert f"Projection Kernel {scores['pk', 'OK'].at('L0H1', 'L2H0'):.3f}, rank 1 of 96" in view.text("#tip")


def test_cards_show_labels_scores_and_tokens(open_page: Open, small: tuple[Path, Scores]) -> None:
    path, scores = small
    view = open_page(path, scores, "#head=L2H3")
    card = view.text("#inspector")
    assert "0.300 · #1" in card
    assert "Tokens by role" in card
    tokens = view.page.eval_on_selector_all("#inspector .chip.token", "all => all.map(e => e.textContent)")
    payload = json.loads(view.page.inner_text("#payload") or view.page.text_content("#payload"))
    assert tokens == [t for role in "QKVO" for t in payload["tokens"][role]["L2H3"]]
    view.page.goto(path.as_uri() + "#head=L0H1")
    assert "writer" in view.text("#inspector .chips")
    assert view.page.evaluate("HS.state.head") == "L0H1"


def test_shading_and_legend(open_page: Open, small: tuple[Path, Scores]) -> None:
    view = open_page(*small)
    fill = "e => getComputedStyle(e).fill"
    assert "writer" in view.text("#legend")
    colour = label_colours(LABELS.names)["writer"]
    rgb = ", ".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
    assert view.page.eval_on_selector('.node[data-head="L0H1"] rect', fill) == f"rgb({rgb})"
    view.page.select_option("#control-shade", "behaviour:induction")
    assert "writer" not in view.text("#legend")
    weak, strong = (view.page.eval_on_selector(f'.node[data-head="L1H{i}"] rect', fill) for i in (1, 3))
    assert weak != strong


# --------------------------------------------------------------------- keyboard


def test_the_diagram_works_with_the_keyboard(open_page: Open, small: tuple[Path, Scores]) -> None:
    view = open_page(*small)
    page = view.page
    assert page.locator(".node[tabindex='0']").count() == 1
    page.focus(".node[tabindex='0']")
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    head = page.evaluate("document.activeElement.dataset.head")
    assert head.startswith("L2")
    page.keyboard.press("Enter")
    assert view.state("head") == head
    assert page.get_attribute(f'.node[data-head="{head}"]', "aria-pressed") == "true"
    assert re.search(r"\d+ edges? out", page.get_attribute(f'.node[data-head="{head}"]', "aria-label"))
    page.keyboard.press("Escape")
    assert view.state("head") == ""
    page.locator("#heatmaps").scroll_into_view_if_needed()
    page.locator("#heat-caption", has_text="Projection Kernel, OK").wait_for()
    page.focus("#heat-canvas")
    for key in ("ArrowRight",) * 8 + ("ArrowDown",):
        page.keyboard.press(key)
    assert "L0H1.O → L2H0.K" in view.text("#heat-caption")
    page.set_viewport_size({"width": 1000, "height": 700})  # it is drawn again, and the keyboard stays where it was
    assert "L0H1.O → L2H0.K" in view.text("#heat-caption")
    assert page.evaluate("document.activeElement.id") == "heat-canvas"
    page.keyboard.press("Enter")
    assert view.state("pair") == "L0H1.O-L2H0.K"


# ----------------------------------------------------------------- other parts


def test_heat_map_scatter_and_hubs_are_linked(open_page: Open, small: tuple[Path, Scores]) -> None:
    path, scores = small
    view = open_page(path, scores)
    page = view.page
    page.click('.thumb[data-pairing="OV"]')
    assert view.drawn().get_attribute('.thumb[data-pairing="OV"]', "aria-pressed") == "true"
    assert "OV" in view.text("#heat-caption")
    box = page.locator("#heat-canvas").bounding_box()
    side = page.evaluate("document.getElementById('heat-canvas').clientHeight - 34")
    cell = side / 16
    page.mouse.click(box["x"] + 44 + 12.5 * cell, box["y"] + 4 + 5.5 * cell)
    assert view.state("pair") == "L1H1.O-L3H0.V"
    assert f"{scores['pk', 'OV'].at('L1H1', 'L3H0'):.3f}" in view.text("#inspector")
    page.uncheck("#heat-common")
    assert "99.7 % point of this panel" in view.text("#heat-caption")
    page.select_option("#control-scatter", "OV")
    page.locator("#scatter-caption", has_text="96 forward pairs of OV").wait_for()  # it is drawn with the next frame
    scatter = page.locator("#scatter-canvas")
    scatter.scroll_into_view_if_needed()
    page.wait_for_timeout(200)
    frame = scatter.bounding_box()
    found = next(
        (x, y)
        for y in range(20, int(frame["height"]) - 45, 7)
        for x in range(60, int(frame["width"]) - 20, 7)
        if (x + y) % 2 == 0 and _point_near(page, frame, x, y)
    )
    named = view.text("#tip").splitlines()[0].replace(" → ", "-")
    page.mouse.click(frame["x"] + found[0], frame["y"] + found[1])
    assert view.state("pair") == named
    assert named.replace("-", " → ") in view.text("#inspector")
    page.select_option("#control-hubs", "OV")
    top = hubs(scores, "OV").outlet.top(1)[0]
    assert page.locator("#hub-tables tbody tr").first.inner_text().split()[1] == str(top.head)
    page.click(f'#hub-tables tbody tr:first-child button:has-text("{top.head}") >> nth=0')
    assert view.state("head") == str(top.head)
    assert page.locator(f'#hub-tables tr.chosen[data-key="{top.head}"]').count() >= 1


def _point_near(page: Any, frame: dict[str, float], x: int, y: int) -> bool:
    page.mouse.move(frame["x"] + x, frame["y"] + y)
    return page.is_visible("#tip")


def test_tables_sort_and_save(open_page: Open, gpt2: tuple[Path, Scores]) -> None:
    path, scores = gpt2
    view = open_page(path, scores)
    page = view.page
    page.click("#edge-list summary")
    rows = view.saved_csv("#edge-table [data-csv]")
    assert len(rows) == 60
    for row in rows:
        assert np.float32(row["score"]) == np.float32(scores["pk", row["pairing"]].at(row["source"], row["target"]))
        assert int(row["rank"]) == scores["pk", row["pairing"]].rank_of(row["source"], row["target"])
    page.click('#edge-table th[data-key="score"] button')
    first = float(page.locator("#edge-table tbody tr").first.locator("td").nth(4).inner_text())
    assert first == pytest.approx(max(float(row["score"]) for row in rows), abs=6e-4)
    assert page.get_attribute('#edge-table th[data-key="score"]', "aria-sort") == "descending"
    page.click('#edge-table th[data-key="score"] button')
    assert page.get_attribute('#edge-table th[data-key="score"]', "aria-sort") == "ascending"
    assert page.locator("#edge-table tbody tr").count() == 20
    page.click('#edge-table button:has-text("Show all 60")')
    assert page.locator("#edge-table tbody tr").count() == 60


def test_distributions_evaluation_and_provenance(open_page: Open, gpt2: tuple[Path, Scores]) -> None:
    from headspan.statistics.baseline import summarise

    path, scores = gpt2
    (line,) = (line for line in summarise(scores) if str(line.pairing) == "OK")
    view = open_page(path, scores, "#at=distributions")
    view.page.wait_for_selector(".dist")
    assert view.page.locator(".dist").count() == 16
    assert f"{line.shift:.1f} sd" in view.text('.dist[data-pairing="OK"]')
    assert "0.446" in view.text("#evaluation-body")
    assert scores.provenance["fingerprint"] in view.text("#provenance-list")
    assert "Yamagiwa" in view.text("#citation")


def test_findings_lead_to_what_they_say(open_page: Open, gpt2: tuple[Path, Scores]) -> None:
    view = open_page(*gpt2)
    assert view.page.locator("#findings li").count() == 5
    view.page.click("#findings li:first-child button")
    assert view.state("pair") == "L4H11.O-L5H1.K"
    assert "L4H11.O → L5H1.K" in view.text("#inspector")


# ---------------------------------------------------------- address, theme, paper


def test_the_address_is_the_view(open_page: Open, small: tuple[Path, Scores]) -> None:
    path, scores = small
    view = open_page(path, scores)
    view.page.fill("#control-k", "5")
    view.page.click('.toggle[data-pairing="OQ"]')
    view.click_head("L2H0")
    other = open_page(path, scores, view.fragment())
    assert other.edges() == view.edges() == expected(scores, k=5, pairing="OK,OV")
    assert other.state("head") == "L2H0"
    assert other.page.input_value("#control-k") == "5"
    view.page.go_back()
    view.page.locator("#inspector", has_text="What an edge means").wait_for()
    assert view.state("head") == ""


def test_nonsense_in_the_address_is_ignored(open_page: Open, small: tuple[Path, Scores]) -> None:
    path, scores = small
    view = open_page(path, scores, "#metric=x&k=-3&rule=all&head=L99H1&pair=zz&pairings=XX,OK&q=7&min=abc&at=zz&heat=1")
    assert view.edges() == expected(scores, pairing="OK", k=20)
    assert "What an edge means" in view.text("#inspector")


def test_light_dark_narrow_and_printed(open_page: Open, small: tuple[Path, Scores]) -> None:
    path, scores = small
    dark = open_page(path, scores, color_scheme="dark", viewport={"width": 1024, "height": 768})
    assert dark.page.get_attribute("html", "data-theme") == "dark"
    assert dark.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    dark.page.click("#theme")
    assert dark.page.get_attribute("html", "data-theme") == "light"
    assert "theme=light" in dark.fragment()
    dark.page.click("#theme")
    pdf = dark.page.pdf()
    assert pdf.startswith(b"%PDF")
    assert dark.page.get_attribute("html", "data-theme") == "dark"


def test_shared_key_value_heads(open_page: Open, tmp_path: Path) -> None:
    weights = array_model(kv_heads=2)
    scores = hs.score(weights)
    report(scores, weights, tmp_path / "gqa.html")
    assert open_page(tmp_path / "gqa.html", scores).edges() == expected(scores, k=20, pairing=["OK"])
    view = open_page(tmp_path / "gqa.html", scores, "#pairings=OQ,OK,OV")
    shown = {end.rpartition(".")[0] for edge in view.edges() for end in edge.split("-")}
    assert set(view.page.eval_on_selector_all(".node", "all => all.map(n => n.dataset.head)")) == shown
    assert view.edges() == expected(scores, k=20)
    view.click_head("L2KV0")
    assert {"L0H1.O-L2KV0.K"} <= view.visible_edges()
    view.page.click('#inspector button[data-head="L2H1"]')
    assert "reads through L2KV0" in view.text("#inspector")
    view.page.locator("#heatmaps").scroll_into_view_if_needed()  # drawn when it comes into view
    for key in ("OV", "KK", "QK"):
        view.page.click(f'.thumb[data-pairing="{key}"]')
        assert key in view.text("#heat-caption")


def test_a_result_alone_and_one_similarity(open_page: Open, tmp_path: Path) -> None:
    scores = hs.score(array_model(layers=2), metric="cs", pairing="QQ")
    report(scores, path=tmp_path / "one.html")
    view = open_page(tmp_path / "one.html", scores, "#at=scatter")
    assert "Only one similarity" in view.text("#scatter-main")
    view.click_head("L0H1")
    assert "from the model" in view.text("#inspector")
    for section in ("hub-tables", "evaluation-body", "distribution-grid"):
        view.page.locator(f"#{section}").scroll_into_view_if_needed()
        view.page.wait_for_selector(f"#{section} .empty")


def test_similarities_with_different_pairings(open_page: Open, tmp_path: Path) -> None:
    full = hs.score(array_model(), metric=["pk", "cs"])
    arrays = {key: values for key, values in full.arrays.items() if key[0] == "pk" or str(key[1]) in ("OK", "QQ")}
    scores = Scores(arrays, full.ports, full.d_model, full.role_ranks, full.provenance)
    report(scores, path=tmp_path / "uneven.html")
    view = open_page(tmp_path / "uneven.html", scores)
    view.page.click("#more > summary")
    view.page.select_option("#control-metric", "cs")
    assert view.edges() == expected(scores, metric="cs", pairing="OK", k=20)
    view.click_head("L2H0")
    view.page.select_option("#control-hubs", "OV")
    assert view.shows("#hub-tables", "no outlet values")
    view.page.click('.thumb[data-pairing="OV"]')
    assert view.shows("#heat-main", "no cs scores for OV")
    view.page.select_option("#control-scatter", "OV")
    assert view.shows("#scatter-main", "does not store the single pairs")


# ------------------------------------------------------------- hostile and large


def test_hostile_names_do_nothing(open_page: Open, tmp_path: Path) -> None:
    weights = array_model()
    scores = hs.score(weights)
    scores.provenance["reference"] = HOSTILE
    scores.annotations["behaviour"] = {HOSTILE: {"L0H1": 0.5}}
    page = report(scores, weights, labels=Labels.from_pairs([("L0H1", HOSTILE), ("L2H0", HOSTILE)]))
    page.payload["tokens"] = {role: {str(h): [HOSTILE] for h in scores.heads("Q")} for role in "QKVO"}
    page.payload["notes"] = [HOSTILE]
    from headspan.explorer.page import render

    path = tmp_path / "hostile.html"
    path.write_text(render(page.payload), encoding="utf-8")
    view = open_page(path, scores)
    view.click_head("L0H1")
    view.page.hover('.node[data-head="L0H1"]')
    view.page.select_option("#control-shade", "labels")
    view.page.click("#edge-list summary")
    assert view.page.locator("img").count() == 0
    assert view.page.locator("script").count() == 2
    assert "<img src=x onerror=alert(1)>" in view.text("#inspector .chip.token >> nth=0")
    assert "<img src=x" in view.text("#model-name")
    formula = view.page.evaluate("HS.csv([{key: 'a'}], [{a: '=1+1'}, {a: -2}], (c, row) => row[c.key])")
    assert formula == "a\n'=1+1\n-2\n"


@pytest.mark.slow
def test_a_thousand_heads_respond(open_page: Open, large_page: Path, record_property: Callable[..., None]) -> None:
    view = open_page(large_page / "page.html", synthetic_scores(32, 32), "#idle=1")
    assert view.page.locator(".node").count() == 1024
    view.click_head("L3H3")
    script = """name => new Promise(done => {
        const start = performance.now();
        document.querySelector(`.node[data-head="${name}"]`).dispatchEvent(new MouseEvent("click", {bubbles: true}));
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
    })"""
    times = sorted(view.page.evaluate(script, name) for name in ("L10H5", "L20H8", "L30H1", "L1H31", "L16H16"))
    print(f"milliseconds from click to drawn: {[round(t) for t in times]}")
    record_property("click_ms", times)
    assert view.state("head") == "L16H16"


def test_a_notebook_cell_shows_a_working_page(browser: Any) -> None:
    scores = hs.score(array_model())
    context = browser.new_context()
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(f"<body>{report(scores).show()._repr_html_()}</body>")
    cell = page.frame_locator("iframe")
    cell.locator('.node[data-head="L2H0"]').click()
    assert "L2H0" in cell.locator("#card-title").inner_text()
    cell.locator("#control-k").fill("3")
    cell.locator("#wiring-notes", has_text="9 drawn").wait_for()
    assert errors == []
    context.close()


def test_chance_on_a_folded_page_has_one_dimension_less(open_page: Open, tmp_path: Path) -> None:
    rng, d, m = np.random.default_rng(0), 24, 4
    weights = hs.fold(hs.open({**{role: rng.normal(size=(2, 3, d, m)) for role in "QKVO"}, "norm": "layer"}))
    scores = hs.score(weights, "pk")
    report(scores, weights, tmp_path / "folded.html")
    page = open_page(tmp_path / "folded.html", scores).page
    found, random = page.evaluate("() => HS.model.limits('pk', 'OK', 0, 3)"), moments(d - 1, m)
    assert found["chance"] == pytest.approx(float(random.mean))
    assert found["start"] == pytest.approx(float(random.mean + 3 * random.sd))
    drawn = page.evaluate("() => Object.keys(HS.data.angles_by_chance)")
    assert drawn == [f"{m},{m},{page.evaluate('() => HS.model.dimension(`OK`, 0, 3)')}"] == [f"{m},{m},{d - 1}"]
