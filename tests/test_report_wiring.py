"""The wiring diagram as it is drawn: honest about chance, few crossings, no line through a box, KV heads in groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import headspan as hs
from headspan.explorer.report import report
from headspan.results.scores import Scores
from headspan.statistics.evidence import rises_above_chance
from headspan.subspaces.metrics import WEIGHT_METRICS, drawn_scores, metric_of
from headspan.subspaces.random_subspaces import expected_squares, moments, random_bases
from report_browser import Open, crossings, drawing, lines_through_boxes
from report_models import array_model, noise_model, unpack


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    scores = hs.score(noise_model(), "pk", "flow")
    path = tmp_path_factory.mktemp("report") / "noise.html"
    report(scores, out=path)
    return path, scores


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, gpt2_flow: Scores) -> tuple[Path, Scores]:
    path = tmp_path_factory.mktemp("report") / "gpt2.html"
    report(gpt2_flow, out=path, labels="gpt2-ioi")
    return path, gpt2_flow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> tuple[Path, Scores]:
    path = tmp_path_factory.mktemp("report") / "smollm2.html"
    scores = hs.score(str(smollm2_gguf), "pk", "flow")
    report(scores, out=path)
    return path, scores


# ---------------------------------------------------------------------- chance


@pytest.mark.parametrize("metric", WEIGHT_METRICS)
def test_random_weights_are_worth_nothing_in_any_similarity(metric: str) -> None:
    for d, m in ((48, 6), (120, 10)):
        weights = noise_model(4, 6, d, m, seed=1)
        scores = hs.score(weights, metric, "OK")
        values = scores[metric, "OK"].pairs()[2]
        chance = float(metric_of(metric).chance(d, np.asarray(m), np.asarray(m))[0])
        assert values.mean() == pytest.approx(chance, rel=0.05)
        excess = metric_of(metric).excess(values, d, np.asarray(m), np.asarray(m))
        assert excess.min() >= 0 and excess.max() < 0.25 and np.median(excess) == 0
        largest = metric_of(metric).excess(np.array([metric_of(metric).largest(m, m)]), d, np.array([m]), np.array([m]))
        assert largest[0] == (0 if metric == "linear_cka" and m == 6 else 1), "where chance reaches 1, nothing is above"


def test_strength_does_not_depend_on_what_else_is_drawn() -> None:
    scores = hs.score(array_model(), "pk", "flow")
    page = report(scores).payload
    raw = page["edges"]["pk/OK"]
    stored = unpack(raw["strength"], "u1") / 255
    values = unpack(raw["score"], "f4")
    chance, most = 4 * 4 / 24 + 3 * float(moments(24, 4).sd), 4
    np.testing.assert_allclose(stored, np.clip((values - chance) / (most - chance), 0, 1), atol=0.5 / 255 + 1e-6)
    assert stored.max() > 0.9, "the planted edge"
    drawn = hs.wiring(scores, "OK", k=5)
    assert drawn.strengths() == pytest.approx(stored[:5].tolist(), abs=0.5 / 255 + 1e-6), "in figures too"


@pytest.mark.parametrize("seed", range(4))
def test_noise_does_not_rise_above_chance_and_one_planted_edge_does(seed: int) -> None:
    assert not rises_above_chance(hs.score(noise_model(6, 8, 64, 12, seed), "pk", "all"))
    assert not rises_above_chance(
        hs.score(noise_model(5, 6, 48, 8, seed), "cs,simple_cs,linear_cka,procrustes", "flow")
    )
    assert rises_above_chance(hs.score(array_model(), "pk", "flow"))
    assert rises_above_chance(hs.score("demo", "cs", "flow"))


def test_a_page_of_noise_says_so_and_has_no_findings(
    open_page: Open, noise: tuple[Path, Scores], gpt2: tuple[Path, Scores]
) -> None:
    view = open_page(*noise)
    assert view.text("#headline").startswith("Nothing stands above chance: none of")
    assert view.page.locator("#findings li").count() == 0 == view.page.locator(".top-findings li").count()
    assert view.page.evaluate("document.querySelector('#headline').getBoundingClientRect().top") < 120
    assert view.page.locator(".edge:not(.rest)").count() == 0 < view.page.locator(".edge.rest").count()
    real = open_page(*gpt2)
    assert real.page.locator("#findings li").count() > 2 and real.page.locator(".top-findings button").count() == 3


def test_meters_have_a_tick_and_angles_a_curve_of_chance(open_page: Open, demo: tuple[Path, Scores]) -> None:
    path, scores = demo
    view = open_page(path, scores, "#pair=L0H3.O-L1H0.K")
    left = view.page.eval_on_selector("#inspector .meter .tick", "e => parseFloat(e.style.left)")
    ranks = scores.ranks("O")[3], scores.ranks("K")[8]
    assert left == pytest.approx(100 * float(moments(scores.d_model, *ranks).mean) / min(ranks), abs=0.1)
    d = view.page.get_attribute("#inspector .angles .chance", "d") or ""
    heights = [float(part.split(" ")[1]) for part in d.replace("M", "L").split("L")[1:]]
    assert len(heights) == min(ranks) and heights == sorted(heights) and heights[-1] - heights[0] > 5


def test_the_chance_curve_is_that_of_random_subspaces() -> None:
    squares = np.array(expected_squares(60, 12, 8))
    frames = random_bases(200, 60, 8, seed=5)
    drawn = np.square(
        np.linalg.svd(random_bases(200, 60, 12, seed=6).transpose(0, 2, 1) @ frames, compute_uv=False)
    ).mean(axis=0)
    np.testing.assert_allclose(squares, drawn, atol=0.04)
    assert squares.sum() == pytest.approx(12 * 8 / 60, rel=0.1)
    assert len(drawn_scores("cs", 60, 8)) == 144


# ------------------------------------------------------------------- untangled


@pytest.mark.parametrize(("which", "most"), [("gpt2", 43), ("smollm2", 8), ("demo", 41)])
def test_few_crossings_and_no_line_through_a_box(
    which: str, most: int, open_page: Open, request: pytest.FixtureRequest
) -> None:
    view = open_page(*request.getfixturevalue(which))
    lines, boxes = drawing(view.page)
    assert len(lines) == (20 if which == "demo" else 60)
    assert lines_through_boxes(lines, boxes) == []
    found = crossings(lines)
    told = view.page.evaluate("HS.wiring.geometry().crossings")
    assert found <= told <= most
    labels = view.page.eval_on_selector_all("#diagram .node text", "all => all.map(t => t.textContent)")
    assert len(labels) == len(boxes) and all(labels)
    assert all(
        "arrow" in m
        for m in view.page.eval_on_selector_all(".edge", "all => all.map(e => e.getAttribute('marker-end'))")
    )
    view.page.click("#more > summary")
    view.page.check("#control-order")
    lines, boxes = drawing(view.page)
    assert lines_through_boxes(lines, boxes) == []
    assert view.page.evaluate("HS.wiring.geometry().crossings") > told
    by_column: dict[float, list[tuple[float, int]]] = {}
    if which != "smollm2":  # in groups the key/value head comes first
        for name, box in boxes.items():
            by_column.setdefault(round(box[0]), []).append((box[1], int(name.split("H")[1])))
        for column in by_column.values():
            assert [number for _, number in sorted(column)] == sorted(number for _, number in column)


def test_layers_without_a_line_are_folded(open_page: Open, smollm2: tuple[Path, Scores]) -> None:
    view = open_page(*smollm2)
    drawn = {hs.Head.parse(name).layer for name in drawing(view.page)[1]}
    headers = view.page.eval_on_selector_all("#diagram .header text", "all => all.map(t => t.textContent)")
    assert headers == [f"L{layer}" for layer in sorted(drawn)] and len(drawn) < 30
    assert view.page.locator("#diagram .fold").count() > 0
    view.page.click("#more > summary")
    view.page.check("#control-idle")
    assert view.page.locator("#diagram .header text").count() == 30
    assert view.page.locator(".node").count() == 30 * 12
    lines, boxes = drawing(view.page)
    assert lines_through_boxes(lines, boxes) == []


def test_zoom_and_pan(open_page: Open, gpt2: tuple[Path, Scores]) -> None:
    view = open_page(*gpt2)
    page = view.page
    place = "document.querySelector('.world').getAttribute('transform')"
    before = page.evaluate(place)
    page.click('#zoom button[aria-label="Larger"]')
    page.click('#zoom button[aria-label="Larger"]')
    larger = page.evaluate(place)
    assert larger != before
    box = page.locator("#diagram").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + box["height"] - 15)
    page.mouse.down()
    page.mouse.move(box["x"] - 60, box["y"] + box["height"] - 75, steps=5)
    page.mouse.up()
    assert page.evaluate(place) != larger and view.state("head") == ""
    page.click('#zoom button[aria-label="Show the whole diagram"]')
    page.focus('.node[tabindex="0"]')
    at = page.evaluate("document.activeElement.dataset.head")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.head") != at
    page.keyboard.press("Enter")
    assert view.state("head") == page.evaluate("document.activeElement.dataset.head")


def test_another_similarity_is_drawn(
    open_page: Open, gpt2: tuple[Path, Scores], record_property: Callable[..., None]
) -> None:
    view = open_page(*gpt2)
    script = """metric => new Promise(done => {
        const start = performance.now();
        HS.set({metric});
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
    })"""
    times = [view.page.evaluate(script, metric) for metric in ("cs", "pk", "cs", "pk")]
    print(f"milliseconds from choice to drawn: {[round(t) for t in times]}")
    record_property("switch_ms", times)
    assert view.state("metric") == "pk" and view.edges()


# -------------------------------------------------------------------------- GQA


def test_key_value_heads_are_drawn_with_their_query_heads(open_page: Open, smollm2: tuple[Path, Scores]) -> None:
    path, scores = smollm2
    view = open_page(path, scores)
    _, boxes = drawing(view.page)
    together = [(q, kv) for q, kv in scores.ports.served_by.items() if str(q) in boxes and str(kv) in boxes]
    assert len(together) > 5
    frames = view.page.eval_on_selector_all(
        "#diagram .group",
        "all => all.map(r => { const b = r.getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height]; })",
    )
    for pair in together:
        both = [boxes[str(head)] for head in pair]
        assert any(all(f[0] < b[0] and f[1] < b[1] and f[2] > b[2] and f[3] > b[3] for b in both) for f in frames)
    query, kv = map(str, together[0])
    for chosen, other in ((query, kv), (kv, query)):
        view.page.eval_on_selector(
            f'.node[data-head="{chosen}"]', "e => e.dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        )
        assert view.state("head") == chosen
        assert "kin" in view.page.get_attribute(f'.node[data-head="{other}"]', "class")
    view.page.evaluate("name => HS.openHead(name)", query)
    rows = view.saved_csv(f'#inspector [data-csv="{query}-sources"]')
    best = scores["pk", "OK"].forward()
    column = best.targets.index(hs.Head.parse(kv))
    source = str(best.sources[int(np.nanargmax(best.values[:, column]))])
    assert any(r["pairing"] == "OK" and r["target"] == kv and r["source"] == source for r in rows), "of its KV head"


# --------------------------------------------------------------------- circuits


def test_a_circuit_is_followed_pinned_named_and_saved(open_page: Open, demo: tuple[Path, Scores]) -> None:
    path, scores = demo
    view = open_page(path, scores, "#head=L0H3&pairings=OQ,OK,OV")
    page = view.page
    page.click('#inspector [data-pin="L0H3.O-L1H0.K"]')
    assert view.state("head") == "L1H0" and view.state("pins") == "L0H3.O-L1H0.K"
    page.fill("#circuit-name", "induction <b>")
    with page.expect_download() as download:
        page.click("#circuit-save")
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert download.value.suggested_filename == "induction-b-.json"
    score = scores["pk", "OK"].at("L0H3", "L1H0")
    assert saved == {
        "format": "headspan circuit", "version": 1, "name": "induction <b>", "model": "demo", "nodes": ["L0H3", "L1H0"],
        "edges": [{"source": "L0H3.O", "target": "L1H0.K", "metric": "pk", "score": score}],
    }  # fmt: skip
    other = open_page(path, scores, view.fragment())
    assert other.state("pins") == view.state("pins") and other.page.input_value("#circuit-name") == "induction <b>"
    assert other.page.locator(".edge.pinned").count() == 1
    other.page.click("#circuit button:has-text('Clear')")
    assert other.state("pins") == "" and other.page.locator(".edge.pinned").count() == 0


def test_paths_are_those_of_the_library_and_can_be_pinned(open_page: Open, tmp_path: Path) -> None:
    weights = array_model(kv_heads=2)
    scores = hs.score(weights, "pk", "flow")
    page = report(scores, weights, tmp_path / "paths.html")
    first = page.payload["paths"][0]
    target = f"{first['heads'][-1]}.{first['pairing'][1]}"
    found = [
        p
        for p in hs.paths(weights, to=target, depth=2, k=40)
        if [str(h) for h in (p.source, *p.via)] == first["heads"][:-1]
    ]
    assert found[0].score == pytest.approx(first["score"]) and found[0].chance == pytest.approx(first["chance"])
    view = open_page(tmp_path / "paths.html", scores)
    view.page.click("#paths summary")
    view.page.click("#paths tbody tr:first-child .pin")
    pins = view.state("pins").split("|")
    assert len(pins) == 2 and pins[0].startswith(f"{first['heads'][0]}.O-") and pins[1].endswith(f"-{target}")
    circuit = tmp_path / "circuit.json"
    circuit.write_text(json.dumps(view.page.evaluate("HS.circuit.content()")))
    drawn = hs.wiring(scores, circuit=circuit)
    assert {f"{e.source}.O-{e.target}.{e.pairing.target}" for e in drawn.edges} == set(pins)


def test_other_nodes_are_drawn_where_they_write_and_read(open_page: Open, tmp_path: Path) -> None:
    weights = array_model()
    rng = np.random.default_rng(2)
    np.savez(
        tmp_path / "vectors.npz", steer=weights.read("O", 0)[1] @ rng.standard_normal(4), probe=rng.standard_normal(24)
    )
    scores = hs.score(weights, "pk", nodes=str(tmp_path / "vectors.npz"))
    report(scores, out=tmp_path / "nodes.html")
    view = open_page(tmp_path / "nodes.html", scores, "#pairings=OR,WK&k=8")
    lines, boxes = drawing(view.page)
    assert lines_through_boxes(lines, boxes) == []
    assert "steer" in boxes and "steer (read)" in boxes
    assert boxes["steer"][2] < min(box[0] for name, box in boxes.items() if name.startswith("L"))
    assert boxes["steer (read)"][0] > max(box[2] for name, box in boxes.items() if name.startswith("L"))
    assert ("steer", "L2H0") in [line[:2] for line in lines], "it lies in what L0H1 writes, which L2H0 reads"
    assert view.page.eval_on_selector('.node[data-head="steer"] .shape', "e => e.tagName") == "path"


# ----------------------------------------------------------------- first screen


def test_the_first_screen_explains_an_edge(
    open_page: Open, demo: tuple[Path, Scores], gpt2: tuple[Path, Scores]
) -> None:
    for which in (demo, gpt2):
        view = open_page(*which)
        box = view.page.locator("#diagram").bounding_box()
        assert box["y"] + box["height"] < 900 and box["height"] > 250
        assert view.page.locator("#inspector .planes").count() == 1
    view = open_page(*demo)
    page = view.page
    page.click("#tour-start")
    assert view.state("head") == "L0H3" and "previous token" in view.text(".tour")
    page.click("#tour-next")
    assert view.state("pair") == "L0H3.O-L1H0.K" and "4.00 by chance" in view.text(".tour")
    page.click("#tour-next")
    assert "times the effect of a random output" in view.text(".tour")
    page.click("#tour-next")
    assert view.state("tour") == "" and "What an edge means" in view.text("#inspector")
    assert open_page(*gpt2).page.locator("#tour-start").count() == 0


def test_every_term_has_its_meaning(open_page: Open, demo: tuple[Path, Scores]) -> None:
    view = open_page(*demo)
    page = view.page
    page.hover('#wiring [data-term="residual stream"]')
    assert "every token carries" in view.text("#tip")
    page.focus('#inspector [data-term="Projection Kernel"]')
    assert "sum of cos²" in view.text("#tip")
    assert page.evaluate("[...document.querySelectorAll('[data-term]')].every(e => HS.words[e.dataset.term])")
    listed = page.eval_on_selector_all("#glossary-list dt", "all => all.map(e => e.textContent)")
    assert {"residual stream", "pairing", "q", "hub", "KV head", "Projection Kernel"} <= set(listed)
