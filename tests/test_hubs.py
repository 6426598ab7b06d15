"""Hubs: the definition head by head, and a correction that treats all layers equally."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.results.scores import Scores
from headspan.statistics.hubs import hubs
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head
from science_helpers import make_scores, random_scores


def by_definition(scores: Scores, pairing: str, metric: str) -> tuple[dict[Head, float], dict[Head, float]]:
    """Inlet and outlet, written as loops over heads."""
    matrix = scores[metric, pairing]
    inlet: dict[Head, float] = {h: 0.0 for h in matrix.targets if h.layer > matrix.sources[0].layer}
    outlet: dict[Head, float] = {h: 0.0 for h in matrix.sources if h.layer < matrix.targets[-1].layer}
    for source in matrix.sources:
        later = {target: matrix.at(source, target) for target in matrix.targets if target.layer > source.layer}
        if later:
            best = max(later, key=lambda head: later[head])
            inlet[best] += later[best]
    for target in matrix.targets:
        earlier = {source: matrix.at(source, target) for source in matrix.sources if source.layer < target.layer}
        if earlier:
            best = max(earlier, key=lambda head: earlier[head])
            outlet[best] += earlier[best]
    return inlet, outlet


@pytest.mark.parametrize("pairing", ["OQ", "OK", "OV", "QQ"])
@pytest.mark.parametrize("metric", ["pk", "cs"])
def test_hubs_follow_the_definition(pairing: str, metric: str) -> None:
    scores = random_scores(1, (pairing,), layers=5, heads=4, metrics=("pk", "cs"))
    inlet, outlet = by_definition(scores, pairing, metric)
    found = hubs(scores, pairing, metric)
    for kind, expected in ((found.inlet, inlet), (found.outlet, outlet)):
        values = {head: value for head, value in zip(kind.heads, kind.values, strict=True) if not np.isnan(value)}
        assert values.keys() == expected.keys()
        assert values == pytest.approx(expected)


def test_shared_kv_heads_count_once() -> None:
    values = np.random.default_rng(2).exponential(size=(12, 6))
    scores = make_scores({("pk", "OK"): values}, layers=3, heads=4, kv_heads=2)
    inlet, outlet = by_definition(scores, "OK", "pk")
    found = hubs(scores)
    assert [str(h) for h in found.inlet.heads][:3] == ["L0KV0", "L0KV1", "L1KV0"]
    for head, value in inlet.items():
        assert found.inlet.of(head) == pytest.approx(value)
    for head, value in outlet.items():
        assert found.outlet.of(head) == pytest.approx(value)


def test_records_have_kind_pairing_rank_head_score_and_the_heads_that_a_shared_head_serves() -> None:
    values = np.random.default_rng(2).exponential(size=(12, 6))
    inlet = hubs(make_scores({("pk", "OK"): values}, layers=3, heads=4, kv_heads=2)).inlet
    records = inlet.rows()
    assert [set(record) for record in records] == [{"kind", "pairing", "rank", "head", "score", "serves"}] * 4
    best = max((h for h in inlet.heads if h.layer > 0), key=inlet.of)
    expected = {"kind": "inlet", "pairing": "OK", "rank": 1, "head": str(best), "score": inlet.of(best)}
    group = range(2 * best.index, 2 * best.index + 2)
    assert records[0] == expected | {"serves": ";".join(f"L{best.layer}H{i}" for i in group)}
    plain = hubs(random_scores(1, ("OK",), layers=3, heads=2)).outlet
    assert "serves" not in plain.rows()[0]


def test_corrected_hubs_of_exchangeable_scores_have_mean_0_and_variance_1_in_every_layer() -> None:
    layers, heads, times = 6, 4, 800
    raw, corrected = [], []
    for seed in range(times):
        found = hubs(random_scores(seed, ("OK",), layers=layers, heads=heads))
        raw.append([found.inlet.values, found.outlet.values])
        corrected.append([found.inlet_corrected.values, found.outlet_corrected.values])
    # (draw, inlet or outlet, layer, head)
    by_layer = np.array(corrected).reshape(times, 2, layers, heads)
    plain = np.array(raw).reshape(times, 2, layers, heads)
    for kind, present in ((0, range(1, layers)), (1, range(layers - 1))):
        means = [by_layer[:, kind, layer].mean() for layer in present]
        variances = [by_layer[:, kind, layer].var() for layer in present]
        np.testing.assert_allclose(means, 0, atol=0.1)
        np.testing.assert_allclose(variances, 1, atol=0.25)
        sums = [plain[:, kind, layer].mean() for layer in present]
        assert max(sums) > 5 * min(sums)  # what the correction is for


def test_the_expectation_is_that_of_choosing_by_lot() -> None:
    scores = random_scores(3, ("OK",), layers=4, heads=3)
    values = scores["pk", "OK"].values.astype(float)
    rng = np.random.default_rng(4)
    draws = np.zeros((4000, 12))
    for source in range(9):
        candidates = np.flatnonzero(~np.isnan(values[source]))
        draws[np.arange(4000), rng.choice(candidates, size=4000)] += np.nanmax(values[source])
    found = hubs(scores)
    expected = (found.inlet.values - draws.mean(axis=0)) / draws.std(axis=0).clip(1e-12)
    np.testing.assert_allclose(found.inlet_corrected.values[3:], expected[3:], atol=0.15)


def test_top_of_and_rank_of() -> None:
    values = np.zeros((4, 4))
    values[0, 2], values[1, 2] = 3.0, 2.0
    values[0, 3], values[1, 3] = 1.0, 1.5
    found = hubs(make_scores({("pk", "OK"): values}, layers=2, heads=2))
    assert [(line.rank, str(line.head), line.score) for line in found.inlet.top()] == [(1, "L1H0", 5), (2, "L1H1", 0)]
    assert found.outlet.of("L0H0") == 3
    assert found.outlet.of("L0H1") == 1.5
    assert found.inlet.rank_of("L1H1") == 2
    assert len(found.inlet.top(1)) == 1
    assert found.inlet.top(0) == []
    assert np.isnan(found.inlet.of("L0H0"))
    with pytest.raises(HeadspanError, match="L0H0 has no inlet score"):
        found.inlet.rank_of("L0H0")
    with pytest.raises(HeadspanError, match="no head L9H9"):
        found.inlet.of("L9H9")
    with pytest.raises(HeadspanError, match="k is -1"):
        found.inlet.top(-1)


def test_records_are_in_the_order_of_the_sums_unless_the_corrected_ones_are_asked_for() -> None:
    lists = hubs(random_scores(6, ("OQ", "OK"), layers=6, heads=4), ["OQ", "OK"])
    for corrected, order in ((None, "score"), (False, "score"), (True, "corrected")):
        given = {} if corrected is None else {"corrected": corrected}
        rows = lists.rows(**given)
        assert rows == [row for found in lists.values() for row in found.rows(**given)]
        for kind in ("inlet", "outlet"):
            listed = [row[order] for row in rows if (row["pairing"], row["kind"]) == ("OK", kind)]
            assert len(listed) > 10 and listed == sorted(listed, reverse=True)
    assert [row["rank"] for row in lists.rows(2)] == [1, 2] * 4


def test_equally_good_targets_all_receive_the_score() -> None:
    found = hubs(make_scores({("pk", "OK"): np.ones((4, 4))}, layers=2, heads=2))
    assert found.inlet.of("L1H0") == found.inlet.of("L1H1") == 2


def test_one_layer_has_no_hubs() -> None:
    with pytest.raises(HeadspanError, match="at least two layers"):
        hubs(random_scores(5, ("OK",), layers=1, heads=4))


def test_a_lone_candidate_has_no_corrected_score() -> None:
    found = hubs(make_scores({("pk", "OK"): np.ones((2, 2))}, layers=2, heads=1))
    assert found.inlet.of("L1H0") == 1
    assert np.isnan(found.inlet_corrected.of("L1H0"))
    assert found.inlet_corrected.top() == []


def test_hubs_command(tmp_path: Path) -> None:
    scores = random_scores(6, ("OQ", "OK", "OV"), layers=12, heads=12)
    for key in scores.arrays:
        scores.arrays[key] /= 2  # subspaces of 8 dimensions have a PK of 8 at most
    path = tmp_path / "result.safetensors"
    scores.save(path)
    run = CliRunner().invoke(app, ["hubs", str(path), "--json"])
    assert run.exit_code == 0, run.output
    outlets = [row for row in json.loads(run.stdout) if (row["kind"], row["pairing"]) == ("outlet", "OV")]
    expected = [(str(h), pytest.approx(s)) for _, h, s in hubs(scores, "OV").outlet.top(10)]
    assert [(row["head"], row["score"]) for row in outlets] == expected
    run = CliRunner().invoke(
        app, ["hubs", str(path), "--pairings", "OK", "--corrected", "--top", "3", "--labels", "gpt2", "--csv"]
    )
    lines = run.stdout.splitlines()
    assert lines[0] == "kind,pairing,rank,head,score,corrected,labels"
    assert lines[1].split(",")[3] == str(hubs(scores, "OK").inlet_corrected.top(1)[0].head)
    assert len(lines) == 7


def test_equal_scores_share_a_rank() -> None:
    """Most heads are not the best for any head: all have 0 and share a rank."""
    lists = hs.hubs("demo", "OK").outlet
    lines = lists.top(len(lists.heads))
    zeros = [line for line in lines if line.score == 0]
    assert len(zeros) > 1 and {line.rank for line in zeros} == {len(lines) - len(zeros) + 1}
    assert {lists.rank_of(line.head) for line in zeros} == {zeros[0].rank}
    assert [line.rank for line in lines] == [1 + sum(other.score > line.score for other in lines) for line in lines]
    assert lists.rows()[-1]["rank"] == zeros[0].rank
