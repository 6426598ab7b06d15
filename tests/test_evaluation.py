"""Detection and classification against scikit-learn and against the protocol written out pair by pair."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import auc, average_precision_score, precision_recall_curve, roc_auc_score
from typer.testing import CliRunner

from headspan.cli import app
from headspan.paper.evaluation import classification, detection, evaluate, metric_agreement, near_tie_range
from headspan.results.labels import Labels
from headspan.results.matrix import ScoreMatrix
from headspan.statistics.areas import areas_under_curves, chance_areas, resampled
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head
from notices import noticed
from science_helpers import make_scores, random_scores

FLOW, SAME = ("OQ", "OK", "OV"), ("QQ", "KK", "VV", "OO")
LABELS = Labels.from_pairs(
    [("L0H0", "a"), ("L1H1", "a"), ("L2H2", "a"), ("L1H0", "b"), ("L3H1", "b"), ("L2H0", "lone"), ("L0H0", "b")]
)

# Few distinct scores, so that ties are the rule.
items = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 3)), min_size=2, max_size=30)


@given(items)
def test_areas_are_scikit_learns_with_ties_and_weights(drawn: list[tuple[int, bool, int]]) -> None:
    scores, positive, weights = (np.array(column) for column in zip(*drawn, strict=True))
    positive = positive.astype(bool)
    assume(0 < positive.sum() < len(positive))
    precision, recall, _ = precision_recall_curve(positive, scores)
    areas = areas_under_curves(scores, positive)
    assert areas.pr[0] == pytest.approx(auc(recall, precision))
    assert areas.roc[0] == pytest.approx(roc_auc_score(positive, scores))

    assume((weights * positive).sum() > 0 and (weights * ~positive).sum() > 0)
    # Items of weight w are w equal items, in both kinds of curve.
    many = areas_under_curves(scores, positive, np.stack([weights, np.ones(len(scores))], axis=1).astype(float))
    again = np.repeat(np.arange(len(scores)), weights)
    for anchored in (True, False):
        weighted = areas_under_curves(scores, positive, weights[:, None].astype(float), anchored=anchored)
        repeated = areas_under_curves(scores[again], positive[again], anchored=anchored)
        assert weighted.pr[0] == pytest.approx(repeated.pr[0])
        assert weighted.roc[0] == pytest.approx(repeated.roc[0])
    assert many.pr[1] == pytest.approx(areas.pr[0])


def pair_by_pair(matrix: ScoreMatrix, labels: Labels, n_heads: int) -> float:
    """The protocol: one pair at a time, both heads into the found set, precision and recall after every pair."""
    found: set[Head] = set()
    points = []
    for edge in matrix.forward().top(10**6):
        found |= {edge.source, edge.target}
        hits = sum(head in labels for head in found)
        points.append((hits / len(labels), hits / len(found)))
    assert len(found) == n_heads
    recall, precision = np.array(points).T
    return float(np.sum(np.diff(recall) * (precision[1:] + precision[:-1]) / 2))


@pytest.mark.parametrize("seed", range(5))
def test_detection_is_the_protocol(seed: int) -> None:
    scores = random_scores(seed, FLOW, layers=4, heads=3, metrics=("cs",))
    found = detection(scores, LABELS, "cs")
    for pairing in FLOW:
        assert found[pairing].value == pytest.approx(pair_by_pair(scores["cs", pairing], LABELS, 12))
    assert found["average"].value == pytest.approx(np.mean([found[p].value for p in FLOW]))
    assert np.isnan(found["average"].low)


def test_detection_does_not_depend_on_the_order_of_tied_pairs() -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 4, size=(12, 12)).astype(float)
    order = np.concatenate([rng.permutation(3) + 3 * layer for layer in range(4)])  # heads renumbered in their layers
    renumbered = {Head(i // 3, i % 3): Head(int(j) // 3, int(j) % 3) for j, i in enumerate(order)}
    moved = Labels.from_pairs([(renumbered[h], name) for h, names in LABELS.classes.items() for name in names])
    first = detection(make_scores({("pk", "OK"): values}, layers=4, heads=3), LABELS, pairing=["OK"])
    second_scores = make_scores({("pk", "OK"): values[np.ix_(order, order)]}, layers=4, heads=3)
    assert detection(second_scores, moved, pairing=["OK"])["OK"].value == pytest.approx(first["OK"].value)


def test_detection_counts_query_and_kv_heads_once() -> None:
    values = np.random.default_rng(2).exponential(size=(12, 6))
    scores = make_scores({("pk", "OK"): values}, layers=3, heads=4, kv_heads=2)
    labels = Labels.from_pairs([("L0H0", "a"), ("L2H3", "a")])
    # The last layer's query heads and the first layer's KV heads are in no forward pair: found last, all together.
    matrix = scores["pk", "OK"]
    best = {h: np.nanmax(np.append(matrix.values[i], -1)) for i, h in enumerate(matrix.sources)}
    best |= {h: np.nanmax(np.append(matrix.values[:, j], -1)) for j, h in enumerate(matrix.targets)}
    positive = np.array([h in {Head(0, 0), Head(2, 3), Head(0, 0, "KV"), Head(2, 1, "KV")} for h in best])
    precision, recall, _ = precision_recall_curve(positive, np.array(list(best.values())))
    assert detection(scores, labels, pairing=["OK"])["OK"].value == pytest.approx(auc(recall[:-1], precision[:-1]))


@pytest.mark.parametrize("pairing", SAME)
def test_classification_is_scikit_learns(pairing: str) -> None:
    scores = random_scores(3, SAME, layers=4, heads=3)
    result = classification(scores, LABELS, classes=["a", "b"])
    matrix = scores["pk", pairing]
    pairs = [(i, j) for i in range(12) for j in range(i + 1, 12)]
    values = [matrix.values[pair] for pair in pairs]
    for name in ("a", "b"):
        inside = [matrix.sources[i] in LABELS.heads(name) and matrix.sources[j] in LABELS.heads(name) for i, j in pairs]
        precision, recall, _ = precision_recall_curve(inside, values)
        assert result.pr_auc[pairing][name].value == pytest.approx(auc(recall, precision))
        assert result.roc_auc[pairing][name].value == pytest.approx(roc_auc_score(inside, values))
    assert result.roc_auc[pairing]["average"].value == pytest.approx(
        np.mean([result.roc_auc[pairing][name].value for name in ("a", "b")])
    )


def test_means_over_classes_and_pairings() -> None:
    result = classification(random_scores(4, SAME, layers=4, heads=3), LABELS, classes=["a", "b"])
    table = np.array([[result.pr_auc[p][c].value for c in ("a", "b")] for p in SAME])
    assert result.by_class["pr_auc"]["a"].value == pytest.approx(table[:, 0].mean())
    assert result.summary["pr_auc"].value == pytest.approx(table.mean())


def test_bootstrap_is_seeded_and_surrounds_the_value() -> None:
    scores = random_scores(5, FLOW + SAME, layers=6, heads=6)
    labels = Labels.from_pairs([(f"L{layer}H{i}", "a") for layer in range(6) for i in range(2)])
    once, same, other = (detection(scores, labels, bootstrap=300, seed=s)["OK"] for s in (0, 0, 1))
    assert once == same
    assert once != other
    assert once.low < once.value < once.high
    wide = classification(scores, labels, bootstrap=200, level=0.99).summary["roc_auc"]
    narrow = classification(scores, labels, bootstrap=200, level=0.5).summary["roc_auc"]
    assert wide.low < narrow.low <= narrow.high < wide.high
    assert wide.value == narrow.value


def test_bootstrap_intervals_cover_what_they_estimate() -> None:
    """The ROC-AUC of meaningless labels is ½ on average: 90 % intervals must nearly always contain it."""
    labels = Labels.from_pairs([(f"L{layer}H{i}", "a") for layer in range(5) for i in range(2)])
    held = 0
    for seed in range(60):
        scores = random_scores(100 + seed, ("KK",), layers=5, heads=5)
        interval = classification(scores, labels, pairing=["KK"], bootstrap=150, level=0.9).roc_auc["KK"]["a"]
        held += interval.low <= 0.5 <= interval.high
    assert held >= 48


def test_a_resampled_pair_counts_by_the_draws_of_both_heads() -> None:
    scores = random_scores(6, ("KK",), layers=3, heads=3)
    labels = Labels.from_pairs([("L0H0", "a"), ("L1H1", "a"), ("L2H0", "a")])
    member = np.array([h in labels for h in scores.heads("K")])
    draws = resampled(member, 40, seed=7, distinct=2)
    assert (draws[member].sum(axis=0) == 3).all()
    assert (draws[~member].sum(axis=0) == 6).all()
    assert (np.count_nonzero(draws[member], axis=0) >= 2).all()
    rows, columns = np.triu_indices(9, 1)
    values, inside = scores["pk", "KK"].values[rows, columns], member[rows] & member[columns]
    replicates = []
    for draw in draws.T:
        weights = draw[rows] * draw[columns]
        replicates.append(roc_auc_score(inside, values, sample_weight=weights))
    interval = classification(scores, labels, pairing=["KK"], bootstrap=40, seed=7).roc_auc["KK"]["a"]
    np.testing.assert_allclose([interval.low, interval.high], np.quantile(replicates, [0.025, 0.975]))


def test_near_ties_widen_a_range_and_nothing_else_does() -> None:
    values = np.zeros((4, 4))
    values[np.triu_indices(4, 1)] = [0.9, 0.5, 0.5 + 1e-6, 0.3, 0.2, 0.1]
    scores = make_scores({("pk", "KK"): values}, layers=2, heads=2)
    tied = Labels.from_pairs([("L0H0", "a"), ("L1H0", "a")])  # the pair with 0.5
    low, high = near_tie_range(scores, tied, "pk", "KK", "a", 2e-6)
    assert (low.roc[0], high.roc[0]) == (pytest.approx(0.6), pytest.approx(0.8))
    alone = Labels.from_pairs([("L0H0", "a"), ("L0H1", "a")])  # the pair with 0.9
    low, high = near_tie_range(scores, alone, "pk", "KK", "a", 2e-6)
    assert low.roc[0] == high.roc[0] == 1


def test_pk_against_cs() -> None:
    scores = random_scores(8, ("OK",), layers=6, heads=5, metrics=("pk", "cs"))
    x, y = (scores[metric, "OK"].pairs()[2] for metric in ("pk", "cs"))
    everywhere, at_the_top = metric_agreement(scores, "OK", quantile=0.9)
    high = (x >= np.quantile(x, 0.9)) | (y >= np.quantile(y, 0.9))
    assert everywhere == pytest.approx(stats.spearmanr(x, y).statistic)
    assert at_the_top == pytest.approx(stats.spearmanr(x[high], y[high]).statistic)
    flat = make_scores({("pk", "OK"): np.ones((4, 4)), ("cs", "OK"): np.ones((4, 4))}, layers=2, heads=2)
    assert np.isnan(metric_agreement(flat, "OK")).all()


def test_two_pairs_are_enough_to_agree_or_not() -> None:
    arrays = {
        ("pk", "OK"): np.array([[0, 1], [0, 2], [0, 0], [0, 0]]),
        ("cs", "OK"): np.array([[0, 5], [0, 4], [0, 0], [0, 0]]),
    }
    assert metric_agreement(make_scores(arrays, layers=2, heads=2, kv_heads=1), "OK")[0] == pytest.approx(-1)
    one = {("pk", "OK"): np.eye(2), ("cs", "OK"): np.eye(2)}
    with pytest.raises(HeadspanError, match="pk with cs over 1 pairs"):
        metric_agreement(make_scores(one, layers=2, heads=1), "OK")
    arrays["cs", "OK"] = np.array([[0, 5], [0, np.nan], [0, 0], [0, 0]])
    with pytest.raises(HeadspanError, match="pk with cs over 1 pairs"):
        metric_agreement(make_scores(arrays, layers=2, heads=2, kv_heads=1), "OK")


def deals(n: int, positives: int) -> list[np.ndarray]:
    return [np.isin(np.arange(n), chosen) for chosen in combinations(range(n), positives)]


@pytest.mark.parametrize("ranking", [[8, 7, 6, 5, 4, 3, 2, 1], [3, 3, 3, 2, 2, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("positives", [1, 3, 7])
@pytest.mark.parametrize("anchored", [True, False])
def test_chance_is_the_mean_over_all_deals_of_labels(ranking: list[int], positives: int, anchored: bool) -> None:
    scores = np.array(ranking, dtype=float)
    areas = [areas_under_curves(scores, positive, anchored=anchored) for positive in deals(8, positives)]
    chance = chance_areas(scores, positives, anchored=anchored)
    for name in ("pr", "ap", "roc"):
        assert getattr(chance, name)[0] == pytest.approx(np.mean([getattr(a, name)[0] for a in areas]))


def test_chance_does_not_depend_on_the_order_of_items() -> None:
    rng = np.random.default_rng(12)
    scores = rng.integers(0, 6, size=30).astype(float)
    for first, second in zip(chance_areas(scores, 7), chance_areas(rng.permutation(scores), 7), strict=True):
        assert first[0] == second[0]


@given(items)
def test_average_precision_is_scikit_learns(drawn: list[tuple[int, bool, int]]) -> None:
    scores, positive, weights = (np.array(column) for column in zip(*drawn, strict=True))
    assume(positive.any())
    ours = areas_under_curves(scores, positive.astype(bool)).ap[0]
    assert ours == pytest.approx(average_precision_score(positive, scores))
    assume(weights[positive.astype(bool)].sum() > 0)
    weighted = areas_under_curves(scores, positive.astype(bool), weights[:, None].astype(float)).ap[0]
    assert weighted == pytest.approx(average_precision_score(positive, scores, sample_weight=weights))


def test_average_precision_shows_a_perfect_detector_whose_area_is_0() -> None:
    """Both heads enter with the first pair, where the area without a point (0, 1) has not begun."""
    values = np.random.default_rng(13).uniform(size=(12, 12))
    values[1, 5] = 9.0
    scores = make_scores({("pk", p): values for p in FLOW}, layers=4, heads=3)
    two = Labels.from_pairs([("L0H1", "a"), ("L1H2", "a")])
    area, precision = (detection(scores, two, measure=m)["OK"] for m in ("pr_auc", "average_precision"))
    assert (area.value, precision.value) == (0, 1)
    assert 0 < area.chance < precision.chance < 0.4
    # Chance by dealing the two labels anew.
    rng, dealt = np.random.default_rng(14), []
    for _ in range(300):
        picked = rng.choice(12, size=2, replace=False)
        labels = Labels.from_pairs([(scores.heads("O")[i], "a") for i in picked])
        dealt.append(detection(scores, labels, measure="average_precision")["OK"].value)
    assert abs(np.mean(dealt) - precision.chance) < 4 * np.std(dealt) / np.sqrt(300)
    with pytest.raises(HeadspanError, match=r"measure.*pr_auc, average_precision"):
        detection(scores, two, measure="area")  # type: ignore[arg-type]


def test_the_bootstrap_of_detection_follows_the_protocol_without_a_point_0_1() -> None:
    """Every replicate by hand: heads repeated as often as drawn, ranked by their best pair, trapezoids from there."""
    scores = random_scores(15, FLOW, layers=4, heads=3)
    found = detection(scores, LABELS, pairing=["OK"], bootstrap=40, seed=3)["OK"]
    matrix = scores["pk", "OK"]
    best = np.fmax(np.nanmax(np.vstack([matrix.values, np.full(12, -1)]), axis=0), np.nan)
    best = np.fmax(best, np.nanmax(np.hstack([matrix.values, np.full((12, 1), -1)]), axis=1))
    positive = np.array([head in LABELS for head in matrix.sources])
    replicates = []
    for drawn in resampled(positive, 40, 3).T.astype(int):
        value, label = np.repeat(best, drawn), np.repeat(positive, drawn)
        cuts = np.unique(value)[::-1]
        recall = [label[value >= cut].sum() / label.sum() for cut in cuts]
        precision = [label[value >= cut].mean() for cut in cuts]
        replicates.append(auc(recall, precision) if len(cuts) > 1 else 0.0)
    low, high = np.quantile(replicates, [0.025, 0.975])
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    anchored = areas_under_curves(best, positive, resampled(positive, 40, 3)).pr
    assert np.quantile(anchored, 0.975) > high + 0.02  # the point would be seen


def test_a_single_labelled_head_is_drawn_every_time() -> None:
    drawn = resampled(np.arange(6) == 2, 50, 0)
    assert (drawn[2] == 1).all()
    assert (drawn.sum(axis=0) == 6).all()
    # Two different ones where a pair is needed, and sometimes only one where it is not.
    three = np.arange(6) < 3
    assert (np.count_nonzero(resampled(three, 200, 0, distinct=2)[:3], axis=0) >= 2).all()
    assert (np.count_nonzero(resampled(three, 200, 0)[:3], axis=0) == 1).any()


def test_every_area_comes_with_its_chance() -> None:
    scores = random_scores(16, FLOW + SAME, layers=4, heads=3)
    rows = evaluate(scores, LABELS).rows()
    assert {row["measure"] for row in rows} == {"pr_auc", "average_precision", "roc_auc"}
    for row in rows:
        if row["measure"] == "roc_auc":
            assert row["chance"] == 0.5
        else:
            assert 0 < row["chance"] < 0.8
    (kk,) = (r for r in rows if (r["pairing"], r["class"], r["measure"]) == ("KK", "a", "pr_auc"))
    # Both the area of a class and its chance begin at (0, 1).
    values = scores["pk", "KK"].pairs()[2]
    assert kk["chance"] == pytest.approx(chance_areas(values, 3, anchored=True).pr[0])
    assert chance_areas(values, 3).pr[0] > chance_areas(values, 3, anchored=False).pr[0]


def test_what_cannot_be_evaluated_is_reported() -> None:
    scores = random_scores(9, FLOW + SAME, layers=4, heads=3)
    with pytest.raises(HeadspanError, match="class 'lone' has 1 of the 12 heads"):
        classification(scores, LABELS)
    with pytest.raises(HeadspanError, match="no class 'none'"):
        classification(scores, LABELS, classes=["none"])
    with pytest.raises(HeadspanError, match="at least one class"):
        classification(scores, Labels({}))
    with pytest.raises(HeadspanError, match="not OK"):
        classification(scores, LABELS, classes=["a"], pairing=["OK"])
    with pytest.raises(HeadspanError, match="nothing to classify"):
        classification(scores, Labels.from_pairs([(h, "all") for h in scores.heads("Q")]))
    with pytest.raises(HeadspanError, match="12 heads of OQ"):
        detection(scores, Labels({}))
    with pytest.raises(HeadspanError, match="does not have: L7H0"):
        detection(scores, Labels.from_pairs([("L7H0", "a")]))
    with pytest.raises(HeadspanError, match="at least two layers"):
        detection(random_scores(9, FLOW, layers=1, heads=3), Labels.from_pairs([("L0H0", "a")]))
    with pytest.raises(HeadspanError, match="no pk scores for QQ"):
        classification(random_scores(9, FLOW, layers=4, heads=3), LABELS, classes=["a"], pairing=["QQ"])
    for level in (95, 1, 0, -0.1):
        with pytest.raises(HeadspanError, match="between 0 and 1"):
            detection(scores, LABELS, bootstrap=3, level=level)
    with pytest.raises(HeadspanError, match="from 0 to 1,000,000, not -1"):
        detection(scores, LABELS, bootstrap=-1)
    one_head = random_scores(9, FLOW + SAME, layers=1, heads=1)
    with pytest.raises(HeadspanError, match="at least two heads"):
        classification(one_head, Labels.from_pairs([("L0H0", "a")]))


def test_classes_without_pairs_are_left_out_with_a_word() -> None:
    with noticed() as said:
        result = evaluate(random_scores(10, FLOW + SAME, layers=4, heads=3), LABELS)
    assert len(said) == 1 and "fewer than two heads: lone" in said[0]
    assert list(result.classification["pk"].by_class["pr_auc"]) == ["a", "b", "average"]
    assert result.spearman == {}


def test_evaluate_command(tmp_path: Path) -> None:
    scores = random_scores(11, FLOW + SAME, layers=4, heads=3, metrics=("pk", "cs"))
    for metric, pairing in scores.arrays:
        scores.arrays[metric, pairing] /= 20  # a CS cannot be more than 1
    path, labels = tmp_path / "result.safetensors", tmp_path / "labels.csv"
    scores.save(path)
    labels.write_text("head,label\n" + "".join(f"{h},{n}\n" for h, names in LABELS.classes.items() for n in names))
    arguments = ["evaluate", str(path), "--labels", str(labels), "--bootstrap", "20"]
    run = CliRunner().invoke(app, [*arguments, "--json"])
    assert run.exit_code == 0, run.output
    keys = ("task", "metric", "measure", "pairing", "class")
    found = {tuple(row[key] for key in keys): row for row in json.loads(run.stdout)}
    expected = classification(scores, LABELS, "cs", classes=["a", "b"])
    roc, pr = (("classification", "cs", f"{kind}_auc") for kind in ("roc", "pr"))
    assert found[(*roc, "VV", "b")]["value"] == expected.roc_auc["VV"]["b"].value
    assert found[(*pr, "average", "a")]["value"] == expected.by_class["pr_auc"]["a"].value
    assert found[(*roc, "average", "average")]["value"] == expected.summary["roc_auc"].value
    detected = found["detection", "pk", "pr_auc", "OK", None]
    assert detected["value"] == detection(scores, LABELS)["OK"].value
    assert detected["low"] <= detected["high"]
    agreement = found["agreement", "pk,cs", "spearman", "OV", "all"]
    assert agreement["value"] == pytest.approx(metric_agreement(scores, "OV")[0])
    lines = CliRunner().invoke(app, [*arguments, "--csv", "--metrics", "pk"]).stdout.splitlines()
    assert lines[0] == "task,metric,measure,pairing,class,value,low,high,chance"
    assert len(lines) == 1 + 2 * 4 + 2 * 5 * 3
    shown = CliRunner().invoke(app, [*arguments, "--metrics", "cs"]).stdout
    assert "detection: average precision" in shown
    assert "chance" in shown
    assert "ROC-AUC" in shown
