"""What the page says about chance: heat maps, histograms and the plot of heads; models without pairs; plain words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.explorer.bands import crowd_band
from headspan.explorer.change import change_page
from headspan.explorer.provenance import provenance_rows
from headspan.explorer.report import report
from headspan.models.folding import fold
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.statistics.hubs import extremes_at_random, hubs
from headspan.subspaces.random_subspaces import moments
from report_browser import Open, violations
from report_models import array_model, noise_model, synthetic_scores
from science_helpers import random_scores

NAME = "an-organisation/a-model-with-a-very-long-name-that-goes-on-and-on-and-on-v2.5-instruct-q4_k_m"


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    scores = hs.score(noise_model(5, 8, 96, 12), "pk,cs")
    path = tmp_path_factory.mktemp("chance") / "noise.html"
    report(scores, out=path)
    return path, scores


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    scores = hs.score(array_model(kv_heads=2))
    labels = Labels.from_pairs([("L0H1", "previous_token"), ("L2H0", "induction"), ("L2H0", "name_mover")])
    path = tmp_path_factory.mktemp("chance") / "planted.html"
    report(scores, out=path, labels=labels)
    return path, scores


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores]:
    scores = hs.score(array_model(layers=1))
    path = tmp_path_factory.mktemp("chance") / "one.html"
    report(scores, out=path)
    return path, scores


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of other kinds: one head a layer, matrices kept by layers, and a model with a long name."""
    folder = tmp_path_factory.mktemp("chance")
    kinds = {
        "single": hs.score(noise_model(3, 1, 24, 4)),
        "large": synthetic_scores(16, 24),
        "long": synthetic_scores(2, 2, NAME),
    }
    for kind, scores in kinds.items():
        report(scores, out=folder / f"{kind}.html")
    return {kind: folder / f"{kind}.html" for kind in kinds}


# ------------------------------------------------------------------ bands


def test_random_hubs_stay_inside_their_band() -> None:
    """With exchangeable scores every chooser picks at random: about one model in twenty leaves the band at each end."""
    seen = []
    for seed in range(150):
        values = random_scores(seed, ("OK",), layers=4, heads=4)["pk", "OK"].forward().values
        found = hubs(random_scores(seed, ("OK",), layers=4, heads=4), "OK").inlet_corrected.values
        band = extremes_at_random(values, draws=200)
        assert band is not None
        seen.append((np.nanmin(found) < band[0] - 1e-9, np.nanmax(found) > band[1] + 1e-9))
    below, above = np.mean(seen, axis=0)
    assert below <= 0.12 and 0.005 <= above <= 0.12


def test_the_band_of_hubs_is_that_of_plain_simulation() -> None:
    """The same choices drawn one by one."""
    scores = random_scores(7, ("OV",), layers=3, heads=3)
    values = scores["pk", "OV"].forward().values
    rng, extremes = np.random.default_rng(1), []
    for _ in range(600):
        drawn = np.full(values.shape, np.nan)
        for i, row in enumerate(values):
            candidates = np.flatnonzero(~np.isnan(row))
            if len(candidates):
                drawn[i, candidates] = 0.0
                drawn[i, rng.choice(candidates)] = np.nanmax(row)
        z = hubs(_with(scores, drawn), "OV").inlet_corrected.values
        extremes.append((np.nanmin(z), np.nanmax(z)))
    low, high = np.array(extremes).T
    band = extremes_at_random(values, draws=600)
    assert band is not None
    assert band[0] == pytest.approx(np.quantile(low, 0.05), abs=0.15)
    assert band[1] == pytest.approx(np.quantile(high, 0.95), abs=0.25)


def _with(scores: Scores, values: np.ndarray) -> Scores:
    arrays = {("pk", scores.pairings[0]): values.astype(np.float32)}
    return Scores(arrays, scores.ports, scores.d_model, scores.role_ranks)


def test_the_band_of_a_crowd() -> None:
    """Normal values leave it about as often as it says, one end at a time; half of the values equal give none."""
    rng = np.random.default_rng(0)
    draws = [rng.normal(3, 2, 144) for _ in range(300)]
    bands = [crowd_band(values, least=-np.inf) for values in draws]
    beyond = np.mean([values.max() > band[1] for values, band in zip(draws, bands, strict=True) if band])
    assert 0.02 <= beyond <= 0.16
    assert crowd_band([0.0] * 30 + [1.0] * 10) is None and crowd_band(range(5)) is None
    two_groups = crowd_band([0.01 * i for i in range(8)] + [0.8 + 0.01 * i for i in range(8)], most=1.0)
    assert two_groups == (0.0, 1.0), "a score of at most 1 has no band beyond 1"


def test_bands_of_the_page(planted: tuple[Path, Scores]) -> None:
    bands = report(planted[1]).payload["bands"]
    low, high = extremes_at_random(planted[1]["pk", "OK"].forward().values.T) or (0, 0)
    assert bands["hub:pk/OK/outlet"] == pytest.approx([low, high], rel=1e-6)


# ------------------------------------------------------------------ plots


def test_noise_looks_like_noise(open_page: Open, noise: tuple[Path, Scores]) -> None:
    """Nearly all cells have the darkest colour, and none is light; the ends of the scale are those of the library."""
    for metric in ("pk", "cs"):
        view = open_page(*noise, f"#at=heatmaps&heat=OK&metric={metric}")
        text = view.text("#heat-caption")
        found = view.page.evaluate(
            """(key) => { const end = HS.chance.end(key), maps = HS.data.pairings.map((p) => HS.chance.matrix(key, p));
            const all = maps.flatMap((m) => [...m.values].filter((v) => !Number.isNaN(v)).map((v) => v / end));
            return [all.length, all.filter((v) => v > 0).length, Math.max(...all)]; }""",
            metric,
        )
        assert found[0] == sum(len(noise[1][metric, p].pairs()[2]) for p in noise[1].pairings)
        assert found[1] / found[0] < 0.01 and found[2] < 0.5
        if metric == "pk":
            mean, variance = moments(96, 12, 12)
            assert f"chance + 3 sd ({mean + 3 * variance**0.5:.2f})" in text
    assert "on one scale for all pairings" in text
    view.page.uncheck("#heat-common")
    assert "Colours run from the lowest score" in view.text("#heat-caption") and view.state("own") == "1"


def test_places_on_the_scale_are_the_excess_over_chance(open_page: Open, planted: tuple[Path, Scores]) -> None:
    scores, view = planted[1], open_page(*planted)
    mean, variance = moments(24, 4, 4)
    start = mean + 3 * variance**0.5
    script = "[...HS.chance.matrix('pk', 'OK').values].map((v) => (Number.isNaN(v) ? null : v))"
    found = np.array(view.page.evaluate(script), dtype=float)
    values = scores["pk", "OK"].values.ravel().astype(float)
    np.testing.assert_allclose(found, (values - start) / (4 - start), rtol=1e-5, atol=1e-6)


def test_the_best_pair_is_on_the_axis_of_its_histogram(open_page: Open, tmp_path: Path) -> None:
    scores = synthetic_scores(6, 8)
    report(scores, out=tmp_path / "tail.html")
    best = max((scores["pk", p].forward().top(1)[0] for p in scores.pairings), key=lambda edge: edge.score)
    pairing = str(best.pairing)
    pair = f"{best.source}.{pairing[0]}-{best.target}.{pairing[1]}"
    view = open_page(tmp_path / "tail.html", scores, f"#at=distributions&pair={pair}")
    panel = view.page.locator(f'.dist[data-pairing="{pairing}"]')
    panel.wait_for()
    assert f"{best.source} → {best.target}" in panel.inner_text() and f"{best.score:.2f}" in panel.inner_text()
    beyond = panel.locator(".over title").text_content(timeout=5000)
    found = re.fullmatch(rf"(\d+) pairs? of {pairing} above ([\d.]+), up to {best.score:.2f}", beyond)
    assert found is not None
    count, end = map(float, found.groups())
    values = scores["pk", pairing].forward().pairs()[2]
    assert best.score > end and np.count_nonzero(values > end + 0.6) <= count <= np.count_nonzero(values > end - 0.6)
    bar, here = panel.locator(".over rect").bounding_box(), panel.locator(".here").bounding_box()
    assert bar["x"] <= here["x"] <= bar["x"] + bar["width"]
    assert sum(view.page.evaluate(f"HS.data.distributions.{pairing}.counts")) == len(values)


def test_heads_have_a_band_whole_layers_and_dots_apart(open_page: Open, noise: tuple[Path, Scores]) -> None:
    view = open_page(*noise, "#at=heads&hx=layer&hy=outlet:OK")
    view.page.wait_for_selector("#heads-main .point")
    assert view.page.locator("#heads-main .crowd").count() == 1
    ticks = view.page.locator("#heads-main .tick-x").all_text_contents()
    assert ticks == ["0", "1", "2", "3", "4"]
    low, high = report(noise[1]).payload["bands"]["hub:pk/OK/outlet"]
    assert f"OK outlet z {low:.2f} to {high:.2f}" in view.text("#heads-caption")
    z = hubs(noise[1], "OK").outlet_corrected
    outside = {str(h) for h, v in zip(z.heads, z.values, strict=True) if v > high + 1e-3 or v < low - 1e-3}
    marked = view.page.eval_on_selector_all("#heads-main [data-outside]", "all => all.map((p) => p.dataset.head)")
    assert set(marked) == outside
    reached = view.page.evaluate(
        """() => { document.querySelector("#heads").scrollIntoView();
        return [...document.querySelectorAll("#heads-main .point")].map((p) => {
            const b = p.querySelector("circle").getBoundingClientRect();
            const hit = document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2);
            return [p.dataset.head, hit?.closest(".point")?.dataset.head]; }); }"""
    )
    assert len(reached) == 32 and all(name == hit for name, hit in reached)


def test_partners_come_in_the_order_of_strength_above_chance(open_page: Open, planted: tuple[Path, Scores]) -> None:
    view = open_page(*planted, "#head=L0H1")
    rows = "#inspector table:has(th[data-key=target]) tbody button[title='Open the pair card']"
    order = view.page.eval_on_selector_all(rows, "all => all.map((b) => Number(b.textContent))")[:9]
    assert len(order) == 9 and order == sorted(order, reverse=True), "all pairings of this model have one chance level"


# ------------------------------------------------------------------ models without pairs, words, the bar


def test_one_layer_explains_itself(open_page: Open, one_layer: tuple[Path, Scores]) -> None:
    view = open_page(*one_layer)
    view.page.evaluate("for (const draw of HS.lazyParts) draw()")
    assert "one attention layer" in view.text("#headline")
    for part in ("#hubs", "#distributions", "#scatter"):
        assert "one attention layer" in view.text(part), part
    assert view.state("heat") == "QQ" and "6 pairs" in view.text("#heat-caption")
    assert "two layers" in view.text("#heads-main")


@pytest.mark.parametrize("width", [1440, 1300, 1024, 700, 420])
def test_a_long_name_leaves_the_navigation_whole(width: int, open_page: Open, others: dict[str, Path]) -> None:
    view = open_page(others["long"], None, viewport={"width": width, "height": 800})  # type: ignore[arg-type]
    boxes = view.page.eval_on_selector_all(
        "#nav a, #share, #theme, #find input",
        "all => all.map((a) => a.getBoundingClientRect()).map((b) => [b.left, b.right, b.width, b.top, b.bottom])",
    )
    bar = view.page.locator(".bar").bounding_box()
    for left, right, wide, top, bottom in boxes:
        assert left >= 0 and right <= width and wide > 20 and bar["y"] <= top and bottom <= bar["y"] + bar["height"] + 1
    assert view.page.evaluate("document.documentElement.scrollWidth") <= width


def test_copy_link_is_there_on_a_phone(open_page: Open, planted: tuple[Path, Scores]) -> None:
    view = open_page(*planted, "#head=L0H1", viewport={"width": 420, "height": 800})
    view.page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    view.page.click("#share")
    assert view.page.evaluate("window.copied").endswith("#head=L0H1") and view.text("#share") == "Copied"


def test_classes_are_words(open_page: Open, planted: tuple[Path, Scores]) -> None:
    view = open_page(*planted, "#head=L2H0")
    assert view.page.locator("#inspector .chip.label").all_inner_texts() == ["induction head", "name mover"]
    view.page.click("#edge-list summary")
    assert "previous-token head" in view.text("#edge-table")
    assert "_" not in view.text("#inspector .card-head") + view.text("#edge-table table")


def test_provenance_reads_as_sentences() -> None:
    """No brackets, quotes or Python words, for plain, folded and screened results and for values of any kind."""
    weights = array_model()
    found = [
        hs.score(weights),
        hs.score(weights, "pk", screen=3),
        hs.score(hs.open("demo"), pairing="OK"),
        hs.score(fold(hs.open("demo")), pairing="OK"),
    ]
    found[0].provenance |= {"other": {"a": {"b": [1, None]}, "c": True}, "left_out_layers": [2, 5], "empty": {}}
    found[0].annotations["effects"] = {"tokens": {"text": [5]}, "floors": {"OK": 0.05}}
    for scores in found:
        rows = dict(provenance_rows(scores, 1))
        for name, text in rows.items():
            assert text and not re.search(r"[{}\[\]'\"_]|None|True|False", name + text), (name, text)
    assert dict(provenance_rows(found[0], 1))["other"] == "a: b 1, none; c: yes"
    assert dict(provenance_rows(found[0], 1))["layers left out"] == "layers 2 and 5"
    assert "3 strongest pairs" in dict(provenance_rows(found[1], 1))["screening"]
    assert "folded" in dict(provenance_rows(found[3], 1))["folding"]


def test_a_run_opens_on_a_view_with_content(browser: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = {role: rng.normal(size=(2, 2, 16, 4)) for role in "QKVO"}
    steps = [{role: a + t * rng.normal(size=a.shape) for role, a in first.items()} for t in (0.0, 0.2, 0.4)]
    change_page(hs.track(steps, k=3)).save(tmp_path / "s.html")
    page = browser.new_page()
    page.goto((tmp_path / "s.html").as_uri())
    page.wait_for_selector("html[data-ready=true]")
    shades = page.eval_on_selector_all("#drift .cell", "all => all.map((c) => Number(c.getAttribute('fill-opacity')))")
    assert len(shades) == 16 and max(shades) == 1 and np.mean(shades) > 0.2
    assert page.locator("#wiring .edge").count() > 0 or page.locator(".diagram .edge").count() > 0
    assert page.is_visible("#share")
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1024, "light"), (420, "dark")])
def test_axe_finds_nothing_on_other_kinds(
    width: int,
    scheme: str,
    browser: Any,
    axe: str,
    noise: tuple[Path, Scores],
    one_layer: tuple[Path, Scores],
    others: dict[str, Path],
) -> None:
    """Noise, one layer, one head a layer, and a large model whose matrices are kept by layers."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    for path in (noise[0], one_layer[0], others["single"], others["large"]):
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        assert violations(page, axe) == [], path.name
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
