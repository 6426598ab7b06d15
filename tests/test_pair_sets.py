"""A result with every pair of heads gives the same statistics as one with the paper's pairs."""

from __future__ import annotations

import numpy as np
import pytest

import headspan as hs
from headspan.change.compare import compare
from headspan.graphs.selection import wiring
from headspan.paper.evaluation import evaluate, metric_agreement
from headspan.plotting import theme
from headspan.plotting.distributions import kl_figure
from headspan.plotting.scatter import scatter_figure
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.statistics.baseline import divergence, summarise
from headspan.statistics.hubs import hubs
from headspan.statistics.significance import significance, z_scores
from headspan.vocabulary.heads import FLOW_PAIRINGS, PAIRINGS

KINDS = ("inlet", "outlet", "inlet_corrected", "outlet_corrected")


@pytest.fixture(scope="module", params=[4, 2], ids=["heads", "shared"])
def results(request: pytest.FixtureRequest) -> tuple[Scores, Scores]:
    """The default pair set and all pairs, of heads whose strongest overlaps are not forward."""
    rng = np.random.default_rng(3)
    counts = {"Q": 4, "K": request.param, "V": request.param, "O": 4}
    arrays = {role: rng.standard_normal((4, n, 20, 4)) for role, n in counts.items()}
    for role in "QKV":  # a late head writes exactly what early heads read, and heads of one layer share a span
        arrays[role][0] = arrays["O"][3][: counts[role]]
        arrays[role][2] = arrays["O"][2][: counts[role]]
    weights = hs.open(arrays)
    return hs.score(weights, ["pk", "cs"]), hs.score(weights, ["pk", "cs"], pairs="all")


def test_all_pairs_hold_more_and_larger_scores(results: tuple[Scores, Scores]) -> None:
    paper, everything = results
    for pairing in FLOW_PAIRINGS:
        assert np.nanmax(everything["pk", pairing].values) > 3.99 > np.nanmax(paper["pk", pairing].values)
        assert len(everything["pk", pairing].pairs()[2]) > 1.9 * len(paper["pk", pairing].pairs()[2])


def test_significance(results: tuple[Scores, Scores]) -> None:
    for pairing in PAIRINGS:
        both = [significance(scores, pairing) for scores in results]
        for name in ("z", "p", "q"):
            np.testing.assert_array_equal(getattr(both[0], name), getattr(both[1], name))
        np.testing.assert_array_equal(both[0].matrix.values, both[1].matrix.values)
        np.testing.assert_array_equal(*(z_scores(scores, pairing) for scores in results))
        if not pairing.same_type:
            for metric in ("pk", "cs"):
                both = [significance(scores, pairing, null="reversed", metric=metric) for scores in results]
                for name in ("z", "p", "q"):
                    np.testing.assert_array_equal(getattr(both[0], name), getattr(both[1], name))


def test_kl_and_the_summary(results: tuple[Scores, Scores]) -> None:
    first, second = (summarise(scores, kl=True) for scores in results)
    np.testing.assert_equal([line._asdict() for line in first], [line._asdict() for line in second])
    assert len(first) == 16
    for pairing in PAIRINGS:
        assert divergence(results[0], pairing) == divergence(results[1], pairing)


def test_detection_and_classification(results: tuple[Scores, Scores]) -> None:
    labels = Labels.from_pairs([("L0H0", "a"), ("L1H1", "a"), ("L2H3", "a"), ("L3H0", "b"), ("L1H0", "b")])
    first, second = (evaluate(scores, labels, bootstrap=20) for scores in results)
    np.testing.assert_equal(first.rows(), second.rows())
    assert first.spearman == second.spearman
    assert metric_agreement(results[0], "OK") == metric_agreement(results[1], "OK")


def test_hubs_and_wiring(results: tuple[Scores, Scores]) -> None:
    for pairing in PAIRINGS:
        first, second = (hubs(scores, pairing) for scores in results)
        for kind in KINDS:
            np.testing.assert_array_equal(getattr(first, kind).values, getattr(second, kind).values)
    assert wiring(results[0], "all", k=5).edges == wiring(results[1], "all", k=5).edges
    chosen = [wiring(scores, rule="significance", q=0.5, null="reversed").edges for scores in results]
    assert chosen[0] == chosen[1]


def test_mean_squared_differences(results: tuple[Scores, Scores]) -> None:
    paper, everything = results
    for line in compare(paper, everything):
        assert (line.mse, line.shared_top) == (0.0, min(line.k, line.pairs))
        assert line.pairs == len(paper[line.metric, line.pairing].forward().pairs()[2])


def test_pictures(results: tuple[Scores, Scores]) -> None:
    with theme():
        drawn = [scatter_figure(scores, FLOW_PAIRINGS) for scores in results]
        points = [sum(len(c.get_offsets()) for axes in f.axes for c in axes.collections) for f in drawn]
        texts = [[t.get_text() for axes in kl_figure(s).axes for t in (*axes.texts, axes.title)] for s in results]
    assert points[0] == points[1]
    assert texts[0] == texts[1]
