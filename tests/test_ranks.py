"""Equal values share a rank, wherever a rank is printed."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
from scipy.stats import rankdata
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.explorer.report import report
from headspan.results.scores import Scores
from headspan.statistics.hubs import hubs
from headspan.statistics.significance import significance
from headspan.system.ordering import median, places, shared_ranks
from headspan.vocabulary.heads import Pairing
from report_models import payload_edges
from science_helpers import make_scores

OK = Pairing.parse("OK")


def tied() -> Scores:
    """Scores with five distinct values, so that nearly all pairs have a tie."""
    rng = np.random.default_rng(0)
    arrays = {("pk", pairing): 1.0 + rng.integers(0, 5, (12, 12)) for pairing in ("OQ", "OK", "OV", "KO")}
    return make_scores(arrays, layers=4, heads=3)


def expected(values: np.ndarray) -> np.ndarray:
    """Ranks by scipy: the smallest rank of the tied values, largest value first."""
    found = np.zeros(values.shape, dtype=int)
    known = ~np.isnan(values)
    found[known] = rankdata(-values[known], method="min")
    return found


def test_places_are_scipys_least_ranks() -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 4, (7, 9)).astype(np.float32)
    values[rng.random(values.shape) < 0.2] = np.nan
    assert np.array_equal(places(values), expected(values))
    assert np.array_equal(places(np.full((2, 2), np.nan)), np.zeros((2, 2)))
    rows = -np.sort(-rng.integers(0, 3, (5, 8)), axis=1)
    assert np.array_equal(shared_ranks(rows), rankdata(-rows, method="min", axis=1))
    assert shared_ranks(np.array([])).tolist() == []


def test_edges_tests_and_the_page_agree() -> None:
    scores = tied()
    matrix = scores["pk", "OK"]
    ranks = expected(matrix.values)
    assert len(np.unique(ranks[ranks > 0])) == 5
    listed = {(str(e.source), str(e.target)): e.rank for e in matrix.top(1000)}
    tested = {(r["source"], r["target"]): r["rank"] for r in significance(scores, OK).rows()}
    around = [*hs.around(scores, "L1H0").outgoing, *hs.around(scores, "L2H1").incoming]
    kept = payload_edges(report(scores).payload, "pk", "OK")
    for i, source in enumerate(matrix.sources):
        for j, target in enumerate(matrix.targets):
            if ranks[i, j]:
                name = str(source), str(target)
                assert listed[name] == matrix.rank_of(*name) == tested[name] == kept[name][0] == ranks[i, j]
    assert all(e.rank == scores["pk", e.pairing].rank_of(e.source, e.target) for e in around)


def test_the_csv_of_top_and_of_hubs(tmp_path: Path) -> None:
    scores = tied()
    scores.save(tmp_path / "r.safetensors")
    done = CliRunner().invoke(app, ["top", str(tmp_path / "r.safetensors"), "--pairing", "OK", "-k", "30", "--csv"])
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert len(rows) == 30 and len({row["rank"] for row in rows}) <= 5
    assert all(int(r["rank"]) == scores["pk", "OK"].rank_of(r["source"], r["target"]) for r in rows)
    for hub in (hubs(scores, OK).inlet, hubs(scores, OK).outlet_corrected):
        ranks = dict(zip(map(str, hub.heads), expected(hub.values).tolist(), strict=True))
        assert {str(line.head): line.rank for line in hub.top(100)} == {h: r for h, r in ranks.items() if r}


def test_a_training_run() -> None:
    """With k as large as the number of pairs every edge is kept, so all ranks follow from the scores of a step."""
    rng = np.random.default_rng(2)
    arrays = {role: rng.normal(size=(2, 3, 24, 4)) for role in "QKVO"}
    for role in arrays:
        arrays[role][:, 1] = arrays[role][:, 0]
    series = hs.track([arrays, {role: a + 0.1 * rng.normal(size=a.shape) for role, a in arrays.items()}], k=9)
    pairings = np.array([str(edge.pairing) for edge in series.edges])
    for step in (0, 1):
        for pairing in ("OQ", "OK", "OV"):
            mine = pairings == pairing
            assert np.array_equal(series.ranks[step, mine], expected(series.scores[step, mine]))
    assert len(np.unique(series.scores[0, pairings == "OK"])) < 9, "two heads with the same weights tie"


def test_medians_are_those_of_numpy_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    for shape in ((5, 4, 3), (2, 7), (3, 2, 8, 6), (9, 1)):
        values = rng.integers(-3, 4, shape) * rng.normal(size=shape)
        for first in (values.flat[0], np.nan, np.inf):
            values.flat[0] = first
            for axis in range(-1, len(shape)):
                np.testing.assert_array_equal(median(values, axis), np.median(values, axis=axis, keepdims=True))
