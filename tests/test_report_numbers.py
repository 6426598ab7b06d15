"""Numbers that a reader sees on a page are those of the files: every kind is sampled from tables, cards and captions.

Scores and effects are read from the result file with safetensors alone. Statistics are those of the library, which
other tests check. Influence has its own tests in tests/test_influence_cli.py, tokens and angles in test_report.py.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import headspan as hs
from headspan.explorer.change import change_page
from headspan.paper.evaluation import Measure, detection, metric_agreement
from headspan.results.effects import effects_of
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.statistics.baseline import summarise
from headspan.statistics.hubs import hubs
from headspan.statistics.significance import significance
from headspan.vocabulary.heads import FLOW_PAIRINGS
from report_browser import View
from report_models import array_model
from test_report_effects import with_random_effects

LABELS = Labels.from_pairs([("L0H1", "previous_token"), ("L1H3", "previous_token"), ("L2H0", "induction")])


Opened = tuple[View, Scores, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def opened(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[View, Scores, dict[str, np.ndarray]]]:
    """A page made from a result file, the result, and the arrays in the file."""
    folder = tmp_path_factory.mktemp("numbers")
    weights = array_model(kv_heads=2)
    scores = with_random_effects(hs.score(weights))
    scores.annotations["behaviour"] = {"induction": {str(h): (h.layer + h.index) / 9 for h in scores.heads("Q")}}
    scores.save(folder / "r.safetensors")
    hs.report(folder / "r.safetensors", weights, folder / "r.html", labels=LABELS)
    context = browser.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    view = View(context.new_page(), scores)
    view.page.goto((folder / "r.html").as_uri())
    view.page.wait_for_selector("html[data-ready=true]")
    yield view, scores, load_file(folder / "r.safetensors")
    context.close()


def table(view: View, part: str) -> list[dict[str, str]]:
    """A table of the page as its CSV, without the download."""
    script = """(part) => { let text = ""; const was = HS.download;
    HS.download = (name, content) => { text = content; };
    document.querySelector(part).click(); HS.download = was; return text; }"""
    return list(csv.DictReader(io.StringIO(view.page.evaluate(script, part))))


def show(view: View, **state: str) -> None:
    view.page.evaluate("(state) => { HS.set(state); for (const draw of HS.lazyParts) draw(); }", state)
    view.drawn()


def number(text: str) -> float:
    return float(text) if text else float("nan")


def test_every_column_of_the_edges(opened: Opened) -> None:
    view, scores, file = opened
    measured = effects_of(scores)
    for metric in ("pk", "cs"):
        show(view, metric=metric, pairings="OQ,OK,OV", rule="top", k="300", head="", pair="")
        rows = table(view, "#edge-table [data-csv]")
        assert len(rows) > 150
        tested = {p: significance(scores, p, null="reversed", metric=metric) for p in FLOW_PAIRINGS}
        random = {p: significance(scores, p) for p in FLOW_PAIRINGS}
        for row in rows:
            pairing = next(p for p in FLOW_PAIRINGS if str(p) == row["pairing"])
            place = scores["pk", pairing].find(row["source"], row["target"])
            value = file[f"{metric}/{pairing}"][place]
            assert np.float32(row["score"]) == value
            assert int(row["rank"]) == 1 + np.count_nonzero(file[f"{metric}/{pairing}"] > value)
            assert number(row["q_reversed"]) == pytest.approx(tested[pairing].q[place], rel=1e-5, nan_ok=True)
            if metric == "pk":
                assert number(row["z"]) == pytest.approx(random[pairing].z[place], rel=1e-5)
            effect = measured.of(pairing)[place]
            assert number(row["effect"]) == pytest.approx(effect, nan_ok=True)
            if not np.isnan(effect):
                assert effect in file[next(n for n in file if n.endswith(f"random/{pairing}"))]
                assert row["large_effect"] == str(bool(measured.large(pairing)[place])).lower()
                assert number(row["percentile_in_layers"]) == pytest.approx(measured.percentiles(pairing)[place])
                assert number(row["random_write_ratio"]) == pytest.approx(measured.ratio(pairing)[place], nan_ok=True)


def test_cards_of_pairs(opened: Opened) -> None:
    """A sample from every pairing, also from those that no diagram shows."""
    view, scores, file = opened
    rng = np.random.default_rng(0)
    for metric in ("pk", "cs"):
        for pairing in scores.pairings:
            matrix, values = scores[metric, pairing], file[f"{metric}/{pairing}"]
            row, column = rng.choice(np.argwhere(~np.isnan(values)))
            source, target = matrix.sources[row], matrix.targets[column]
            show(view, metric=metric, head="", pair=f"{source}.{pairing.source}-{target}.{pairing.target}")
            card = view.page.locator("#inspector")
            assert np.float32(card.locator(".big").get_attribute("data-score")) == values[row, column]
            text = card.inner_text()
            assert f"{values[row, column]:.{3 if metric == 'pk' else 4}f}" in text
            rank = re.search(r"([\d,]+) of ([\d,]+) ", text)
            if rank:
                above = np.count_nonzero(values > values[row, column])
                assert (rank[1], rank[2]) == (f"{1 + above:,}", f"{np.count_nonzero(~np.isnan(values)):,}")


def test_hubs_heads_and_head_scores(opened: Opened) -> None:
    view, scores, _ = opened
    for pairing in ("OQ", "OV"):
        show(view, metric="pk", hubs=pairing, hx=f"outlet:{pairing}", hy="behaviour:induction", head="", pair="")
        found = hubs(scores, pairing)
        for kind in ("outlet", "inlet"):
            plain, corrected = getattr(found, kind), getattr(found, f"{kind}_corrected")
            rows = table(view, f'#hub-tables [data-csv="{kind}-pk-{pairing}"]')
            assert len(rows) == np.count_nonzero(~np.isnan(plain.values))
            for row in rows:
                assert int(row["rank"]) == plain.rank_of(row["head"])
                assert number(row["value"]) == pytest.approx(plain.of(row["head"]), rel=1e-6)
                assert number(row["corrected"]) == pytest.approx(corrected.of(row["head"]), rel=1e-5, nan_ok=True)
        points = {row["name"]: row for row in table(view, '[data-csv="heads"]')}
        assert len(points) == np.count_nonzero(~np.isnan(found.outlet_corrected.values))
        for name, row in points.items():
            assert number(row["x"]) == pytest.approx(found.outlet_corrected.of(name), rel=1e-5)
            assert number(row["y"]) == pytest.approx(scores.annotations["behaviour"]["induction"][name])
    show(view, head="L1H2", metric="pk")
    card = view.text("#inspector")
    assert f"{3 / 9:.3f} · #" in card and f"{hubs(scores, 'OV').outlet.of('L1H2'):.2f}" in card


def test_tables_of_chance_and_evaluation(opened: Opened) -> None:
    view, scores, _ = opened
    lines = {str(line.pairing): line._asdict() for line in summarise(scores)}
    rows = table(view, '#distribution-table [data-csv="distributions"]')
    assert [row["pairing"] for row in rows] == [str(p) for p in scores.pairings] and len(rows) == 16
    for row in rows:
        for name in set(row) - {"pairing"}:
            expected = lines[row["pairing"]][name]
            assert number(row[name]) == pytest.approx(float("nan") if expected is None else expected, nan_ok=True)
    for metric in ("pk", "cs"):
        measures: dict[str, Measure] = {"detection": "pr_auc", "detection-ap": "average_precision"}
        for file, measure in measures.items():
            found = detection(scores, LABELS, metric, pairing=[*FLOW_PAIRINGS], measure=measure)
            title = "Projection Kernel" if metric == "pk" else "Composition Score"
            (row,) = (r for r in table(view, f'#evaluation-body [data-csv="{file}"]') if r["metric"] == title)
            for name, estimate in found.items():
                assert number(row[name]) == pytest.approx(estimate.value, nan_ok=True), (file, name)
            assert number(row["chance"]) == pytest.approx(found["average"].chance)


def test_the_caption_of_two_similarities(opened: Opened) -> None:
    view, scores, _ = opened
    show(view, scatter="OV", x="pk", y="cs")
    everywhere, high = metric_agreement(scores, hs.Pairing.parse("OV"), "pk", "cs")
    found = re.search(r"ρ (\S+) over all, (\S+) over", view.text("#scatter-caption"))
    assert found is not None
    assert [float(part) for part in found.groups()] == pytest.approx([everywhere, high], abs=6e-4)


def test_pages_of_change(browser: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = {role: rng.normal(size=(3, 3, 24, 4)) for role in "QKVO"}
    steps = [{role: a + t * rng.normal(size=a.shape) for role, a in first.items()} for t in (0.0, 0.3, 0.6)]
    change, series = hs.diff(steps[0], steps[2], k=5), hs.track(steps, k=4)
    page = browser.new_page()
    for name, made in (("d", change), ("s", series)):
        change_page(made).save(tmp_path / f"{name}.html")
        page.goto((tmp_path / f"{name}.html").as_uri())
        page.wait_for_selector("html[data-ready=true]")
        view = View(page, None)  # type: ignore[arg-type]
        if name == "d":
            drift = {f"{row['head']}.{row['role']}": row for row in change.rows("drift")}
            for row in table(view, '[data-csv="drift"]'):
                for column in ("drift", "floor", "angle"):
                    assert number(row[column]) == pytest.approx(drift[row["port"]][column])
            edges = {(r["pairing"], f"{r['source']}-{r['target']}"): r for r in change.rows("edge")}
            rows = table(view, '[data-csv="edges"]')
            assert {(row["pairing"], row["edge"]) for row in rows} >= set(edges)
            for row in rows:
                known = edges.get((row["pairing"], row["edge"]))
                if known:
                    assert number(row["before"]) == pytest.approx(known["before"])
                    assert int(row["rank_after"]) == known["rank_after"]
        else:
            courses = {(r["pairing"], f"{r['source']}-{r['target']}"): r for r in series.rows("trajectory")}
            rows = table(view, '[data-csv="trajectories"]')
            assert len(rows) == len(courses)
            for row in rows:
                known = courses[row["pairing"], row["edge"]]
                for column in ("first", "final", "growth", "rank"):
                    assert number(row[column]) == pytest.approx(known[column], nan_ok=True)
    page.close()
