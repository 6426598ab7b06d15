"""Evidence decides how an edge looks: the rule, its agreement with the tests it is made of, and silence on noise."""

from __future__ import annotations

import numpy as np
import pytest

import headspan as hs
from headspan.explorer.demo_measurements import with_shipped
from headspan.explorer.report import report
from headspan.results.effects import effects_of
from headspan.results.scores import Scores
from headspan.statistics.evidence import KINDS, evidence_of, kinds_of, rises_above_chance, strong_influence
from headspan.statistics.significance import reversed_q, significance
from headspan.vocabulary.heads import FLOW_PAIRINGS, Pairing
from report_models import array_model, noise_model, payload_edges, unpack


@pytest.fixture(scope="module")
def demo_scores() -> Scores:
    return with_shipped(hs.score("demo", "pk,cs", "all"))


@pytest.mark.parametrize("metric", ["pk", "cs"])
def test_evidence_is_the_tests_it_names(demo_scores: Scores, metric: str) -> None:
    measured = effects_of(demo_scores)
    for pairing in FLOW_PAIRINGS:
        q = significance(demo_scores, pairing, null="reversed", metric=metric).q
        np.testing.assert_array_equal(reversed_q(demo_scores, metric, pairing), q)
        found = evidence_of(demo_scores, metric, pairing)
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(found.reversed, q <= 0.05)
        np.testing.assert_array_equal(found.effect, measured.large(pairing))
        assert found.tested == ("reversed", "effect") and found.influence is None
        assert found.bits is not None
        for i, kind in enumerate(KINDS[:2]):
            np.testing.assert_array_equal((found.bits >> i & 1).astype(bool), getattr(found, kind))
        page = report(demo_scores).payload
        raw, heads = page["edges"][f"{metric}/{pairing}"], [list(map(str, demo_scores.heads(role))) for role in pairing]
        kept = [(heads[0].index(a), heads[1].index(b)) for a, b in payload_edges(page, metric, str(pairing))]
        np.testing.assert_array_equal(unpack(raw["evidence"], "u1"), found.bits[tuple(np.array(kept).T)])
        ahead = ~np.isnan(demo_scores[metric, pairing].forward().values)
        assert raw["passing"]["any"] == np.count_nonzero((found.bits > 0) & ahead)
        assert raw["least_q"]["reversed"] == pytest.approx(np.nanmin(q))


def test_nothing_is_tested_without_reversed_pairs_effects_or_influence() -> None:
    scores = hs.score(array_model(), "pk", "flow")
    found = evidence_of(scores, "pk", Pairing.parse("OK"))
    assert found.tested == () and found.bits is None
    assert hs.wiring(scores, "OK", k=3).evidence() == [None] * 3
    assert "no edge could be tested" in report(scores).payload["headline"]["text"]
    assert hs.wiring(array_model(), "OK", k=3).evidence()[0] is not None, "a model is scored with its reversed pairs"


def test_influence_counts_at_three_times_its_expectation(llama_folder: object, llama_stats: hs.Statistics) -> None:
    scores = hs.score(llama_folder, "pk,influence", "flow", stats=llama_stats)
    for pairing in FLOW_PAIRINGS:
        values = scores.arrays["influence", pairing]
        spread, sensitivity = (scores.sizes["influence", role].astype(float) for role in pairing)
        expected = spread[:, None] * sensitivity[None, :] / np.sqrt(scores.d_model)
        found = strong_influence(scores, pairing)
        assert evidence_of(scores, "pk", pairing).tested == ("influence",)
        assert found is not None and not found.any(), "the weights are random"
        place = tuple(np.argwhere(~np.isnan(values))[0])
        for factor, strong in ((3.01, True), (2.99, False)):
            values[place] = factor * expected[place]
            found = strong_influence(scores, pairing)
            assert found is not None and found.sum() == strong and bool(found[place]) == strong


@pytest.mark.parametrize("seed", range(3))
def test_noise_has_no_edge_with_evidence(seed: int) -> None:
    scores = hs.score(noise_model(6, 8, 64, 12, seed), "pk", "all")
    assert not rises_above_chance(scores)
    payload = report(scores).payload
    assert all(not np.any(unpack(payload["edges"][f"pk/{p}"]["evidence"], "u1")) for p in FLOW_PAIRINGS)
    assert payload["headline"]["text"].startswith("Nothing stands above chance: none of") and not payload["findings"]
    assert set(hs.wiring(scores).evidence()) == {0}


def test_a_planted_edge_is_the_headline_though_too_few_pairs_can_confirm_it() -> None:
    payload = report(hs.score(array_model(), "pk", "all")).payload
    text = payload["headline"]["text"]
    assert text.startswith("L0H1 writes what L2H0's keys read: 4.0 of 4 dimensions where chance gives 0.7; but of 288")
    assert "none stands above reversed pairs (the smallest q is 0.49)" in text
    assert payload["headline"]["view"]["pair"] == "L0H1.O-L2H0.K"
    assert payload["findings"][0] == payload["headline"]


def test_the_headline_of_the_demo_names_its_evidence_and_what_speaks_against_it(demo_scores: Scores) -> None:
    text = report(demo_scores).payload["headline"]["text"]
    effect, ratio = (effects_of(demo_scores).matrix("OK").at("L0H3", "L1H0"), effects_of(demo_scores).ratio("OK"))
    place = demo_scores["pk", "OK"].find("L0H3", "L1H0")
    assert f"{demo_scores['pk', 'OK'].at('L0H3', 'L1H0'):.1f} of 32 dimensions where chance gives 4.0" in text
    assert (
        f"has a large effect ({effect:.2f} total variation, {ratio[place]:.1f} times that of a random output)" in text
    )
    assert "it stands above reversed pairs (q = 0.025) and has" in text
    assert text.endswith(", but does not stand out among the heads of its two layers (q = 0.59).")


def test_the_headline_of_one_layer_says_why_there_are_no_edges() -> None:
    payload = report(hs.score(array_model(layers=1), "pk", "all")).payload
    assert "one attention layer" in payload["headline"]["text"] and payload["headline"]["view"] == {}


def test_kinds_that_disagree_are_named(demo_scores: Scores) -> None:
    found = report(demo_scores).payload["disagreements"]
    assert found["OV"] == "OV: 23 have large effects, but none stands above reversed pairs."
    assert found["OK"].startswith("OK: 40 stand above reversed pairs, none of them among the heads of the same two")
    assert kinds_of(5) == ("reversed", "influence")
