"""A caller's own similarity: a function of two weights or a Metric, from the run to the page, and without it later."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs

GQA: dict[str, Any] = {
    role: np.random.default_rng(ord(role)).normal(size=(3, n, 20, 3))
    for role, n in zip("QKVO", (4, 2, 2, 4), strict=True)
}


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.square(np.linalg.qr(a)[0].T @ np.linalg.qr(b)[0]).sum())


def one_sided(source: np.ndarray, target: np.ndarray) -> float:
    """Depends on which of the two is the source."""
    return float(np.linalg.norm(source) - 3 * target[0, 0])


def basis(weight: Any) -> np.ndarray:
    return np.linalg.qr(weight.own)[0]


def by_matrices(a: np.ndarray, b: np.ndarray, needed: np.ndarray) -> np.ndarray:
    return np.square(np.einsum("idm,jdn->ijmn", a, b)).sum(axis=(2, 3))


OWN: dict[str, Any] = {
    "function": overlap,
    "pair": hs.Metric("overlap", pair=overlap),
    "factor": hs.Metric("overlap", factor=basis),
    "pair of factors": hs.Metric("overlap", factor=basis, pair=lambda a, b: np.square(a.T @ b).sum()),
    "all pairs": hs.Metric("overlap", "Overlap", factor=basis, all_pairs=by_matrices),
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("pairs", ["default", "all"])
def test_all_kinds_agree_with_pk(kind: str, pairs: Any) -> None:
    scores = hs.score(GQA, metric=["pk", OWN[kind]], pairs=pairs)
    assert scores.metrics == ("pk", "overlap") and len(scores.pairings) == 16
    for pairing in scores.pairings:
        np.testing.assert_allclose(scores["overlap", pairing].values, scores["pk", pairing].values, atol=1e-5)


@pytest.mark.parametrize("memory", [None, "250MB"])
def test_a_function_gets_the_source_first(memory: str | None) -> None:
    scores = hs.score(GQA, one_sided, memory=memory)
    usual = hs.score(GQA, "pk")
    for pairing in scores.pairings:
        matrix, present = scores["one_sided", pairing], ~np.isnan(usual["pk", pairing].values)
        assert np.array_equal(present, ~np.isnan(matrix.values)) and present.any()
        source, target = (GQA[role].reshape(-1, 20, 3) for role in pairing)
        for i, j in np.argwhere(present):
            assert matrix.values[i, j] == np.float32(one_sided(source[i], target[j]))


def test_a_function_of_two_orders_must_be_symmetric() -> None:
    with pytest.raises(hs.HeadspanError, match=r"one_sided differs between the two orders .* pairs='default'"):
        hs.score(GQA, one_sided, ["OQ", "QO"], "all")
    assert hs.score(GQA, one_sided, "OQ", "all")["one_sided", "OQ"].at("L2H0", "L0H0") == np.float32(
        one_sided(GQA["O"][2, 0], GQA["Q"][0, 0])
    )


def test_a_function_gets_only_the_columns_of_a_node() -> None:
    shapes = set()

    def kept(a: np.ndarray, b: np.ndarray) -> float:
        shapes.update({a.shape, b.shape})
        assert not a.flags.writeable and not b.flags.writeable
        return overlap(a, b)

    node = hs.Node(np.eye(20)[:2].T, "plane", layer=1)
    scores = hs.score(GQA, ["pk", kept], "OK", nodes=node)
    assert shapes == {(20, 3), (20, 2)}
    for pairing in scores.pairings:
        np.testing.assert_allclose(scores["kept", pairing].values, scores["pk", pairing].values, atol=1e-5)


WRONG: dict[str, tuple[Any, str]] = {
    "a lambda": (lambda a, b: 1.0, r"'<lambda>' cannot be the name of a similarity.*hs\.Metric"),
    "no name": (partial(overlap), r"'' cannot be the name"),
    "upper case": (hs.Metric("Overlap", pair=overlap), r"'Overlap' cannot be the name"),
    "taken": (hs.Metric("cs", pair=overlap), r"there is another similarity cs"),
    "taken by files": (hs.Metric("effect", pair=overlap), r"there is another similarity effect"),
    "twice": ([overlap, overlap], r"there is another similarity overlap"),
    "nothing": ([], r"nothing to score"),
    "a number": (3, r"not a list of similarities"),
    "unknown": (["overlap", overlap], r"unknown similarity 'overlap'"),
    "statistics": (hs.Metric("x", observed=True), r"x cannot use statistics"),
    "not finite": (hs.Metric("x", pair=lambda a, b: np.inf), r"x of L\dKV\d\.K and L\dH\d\.O is inf"),
    "not finite factor": (hs.Metric("x", factor=lambda w: w.own * np.nan), r"is nan\. It must be a finite number"),
    "arrays": (hs.Metric("x", pair=lambda a, b: a[0]), r"x must return a number for each pair, not a ndarray"),
    "one factor": (hs.Metric("x", factor=lambda w: w.own[0]), r"the factors of x have the shape \(20, 3\)"),
    "wide factor": (hs.Metric("x", factor=lambda w: w.own[:, :, [0, 0, 0, 0]]), r"need \(\d, 20, 3 or less\)"),
    "one score": (hs.Metric("x", all_pairs=lambda a, b, needed: np.zeros(2)), r"x gave an array of shape \(2,\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_similarities_are_refused(case: str) -> None:
    metric, said = WRONG[case]
    with pytest.raises(hs.HeadspanError, match=said):
        hs.score(GQA, metric, "OK")


def test_a_cluster_and_screening_refuse_them() -> None:
    with pytest.raises(hs.HeadspanError, match=r"a cluster cannot compute your own similarity overlap"):
        hs.score("demo", overlap, dask="local")
    with pytest.raises(hs.HeadspanError, match="screening works with pk only, not with overlap"):
        hs.score("demo", overlap, screen=3)


def test_errors_of_the_function_are_its_own() -> None:
    def broken(a: np.ndarray, b: np.ndarray) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hs.score(GQA, broken, "OK")


def test_a_run_does_not_take_over_tiles_of_another_function(tmp_path: Path) -> None:
    out, calls = tmp_path / "own.safetensors", []

    def score(value: float, fail_at: int | None = None) -> hs.Scores:
        def mine(a: np.ndarray, b: np.ndarray) -> float:
            calls.append(1)
            if len(calls) == fail_at:
                raise KeyboardInterrupt
            return value

        return hs.score(GQA, ["pk", mine], "OK", out=out)

    with pytest.raises(KeyboardInterrupt):
        score(1.0, fail_at=12)
    assert not out.exists()
    assert {edge.score for edge in score(2.0)["mine", "OK"].top()} == {2.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.safetensors"
    hs.score("demo", ["pk", overlap, one_sided], out=path)
    return path


def test_a_result_with_its_scores_works_like_any_other(saved: Path, tmp_path: Path) -> None:
    scores = hs.Scores.load(saved)
    assert scores.metrics == ("pk", "overlap", "one_sided")
    pairs = [(edge.source, edge.target) for edge in hs.top(saved, "OK", 5, "pk")]
    assert [(edge.source, edge.target) for edge in hs.top(saved, "OK", 5, "overlap")] == pairs
    drawn = hs.wiring(scores, "OK", metric="overlap", k=5)
    strengths = drawn.strengths()
    assert strengths == sorted(strengths, reverse=True) and strengths[0] == 1.0 and strengths[-1] > 0
    assert hs.around(scores, "L1H2", 3, "overlap").rows()[0]["metric"] == "overlap"
    assert hs.hubs(scores, "OK", metric="overlap").rows()[0]["score"] > 0
    assert hs.compare(scores, saved, metric="overlap")[0].spearman == pytest.approx(1.0)
    labels = {"L0H3": "early", "L0H1": "early", "L1H0": "late", "L1H5": "late"}
    judged, usual = (hs.evaluate(saved, labels, name).rows() for name in ("overlap", "pk"))
    assert [row["value"] for row in judged] == pytest.approx([row["value"] for row in usual], nan_ok=True)
    hs.figures(scores, tmp_path, "wiring,scatter", dpi=40)
    assert hs.significance(scores, "OK", metric="overlap", null="reversed").rows()
    with pytest.raises(hs.HeadspanError, match="the random null is known for pk only"):
        hs.significance(scores, "OK", metric="overlap")


def test_the_page_claims_no_chance_level_for_it(saved: Path) -> None:
    payload = hs.report(saved).payload
    about = {metric["key"]: metric for metric in payload["metrics"]}
    assert list(about) == ["pk", "overlap", "one_sided"]
    scores = hs.Scores.load(saved)
    for name in ("overlap", "one_sided"):
        values = [scores.arrays[key] for key in scores.arrays if key[0] == name]
        assert about[name]["max"] == pytest.approx(max(np.nanmax(value) for value in values))
    assert not [name for name in payload["chance"] if name.startswith(("overlap", "one_sided"))]


def test_the_saved_result_does_not_need_the_function(saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "own.html"
    for words in (
        ["top", str(saved), "--metric", "overlap", "-k", "2"],
        ["wiring", str(saved), "--metric", "overlap"],
        ["hubs", str(saved), "--metric", "overlap"],
        ["report", str(saved), "--out", str(page)],
    ):
        done = subprocess.run([sys.executable, "-m", "headspan", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert words[0] == "report" or "L0H3" in done.stdout
    assert "overlap" in page.read_text(encoding="utf-8")
