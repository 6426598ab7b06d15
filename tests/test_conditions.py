"""Ill-conditioned heads, heads of any scale and nearly orthogonal heads, against definitions in numpy's longdouble.

Conditions go up to where the rank of a float64 weight falls; a longdouble has 11 bits more than a float64 on most
machines, and a range of 1e±4932. Elsewhere these tests are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.scoring.screening import screen
from headspan.subspaces.accurate_products import accurate_product
from headspan.subspaces.bases import orthonormal_basis
from headspan.subspaces.sketches import gaussian_sketch, sketched_bases, sketched_spans
from headspan.vocabulary.heads import parse_pairings

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="longdouble has no more digits here")

D, M, LAYERS, HEADS = 40, 5, 2, 3
Arrays = dict[str, np.ndarray]
Wide = np.ndarray  # of longdouble


def frame(rng: np.random.Generator, d: int, m: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(d, m)))[0]


def wide(weight: np.ndarray) -> Wide:
    """Entries of at most 1."""
    weight = weight.astype(np.longdouble)
    return weight / max(np.abs(weight).max(), np.finfo(np.longdouble).tiny)


def basis(weight: np.ndarray) -> Wide:
    found = wide(weight)
    for j in range(found.shape[1]):
        for _ in range(3):
            found[:, j] -= found[:, :j] @ (found[:, :j].T @ found[:, j])
            found[:, j] /= norm(found[:, j])
    return found


def norm(matrix: Wide) -> np.longdouble:
    return np.sqrt(np.square(matrix).sum())


def ratio(first: Wide, second: Wide) -> float:
    first, second = wide(first), wide(second)
    return float(norm(first.T @ second) / (norm(first) * norm(second)))


def definition(metric: str, source: Arrays, target: Arrays, pairing: str) -> float:
    a, b = wide(source[pairing[0]]), wide(target[pairing[1]])
    if metric == "pk":
        return float(np.square(basis(a).T @ basis(b)).sum())
    if metric == "simple_cs":
        return ratio(a, b)
    if metric == "cs":
        partner = {"Q": "K", "K": "Q", "V": "O", "O": "V"}
        circuits = [w @ wide(h[partner[r]]).T for w, h, r in zip((a, b), (source, target), pairing, strict=True)]
        return ratio(*circuits)
    a, b = (w - w.mean(axis=1, keepdims=True) for w in (a, b))
    return float(np.square(norm(a @ b.T)) / (norm(a @ a.T) * norm(b @ b.T)))


def of_head(arrays: Arrays, head: Any) -> Arrays:
    return {role: array[head.layer, head.index] for role, array in arrays.items()}


def worst(arrays: Arrays, metrics: tuple[str, ...], **options: str) -> float:
    """The largest error of any score."""
    scores = hs.score(arrays, metrics, ["OQ", "OK", "OO", "QK"], "all", **options)  # type: ignore[arg-type]
    errors = [0.0]
    for metric in metrics:
        for pairing in scores.pairings:
            matrix = scores[metric, pairing]
            for i, j, value in zip(*matrix.pairs(), strict=True):
                ends = (
                    {r: a[h.layer, h.index] for r, a in arrays.items()} for h in (matrix.sources[i], matrix.targets[j])
                )
                errors.append(abs(float(value) - definition(metric, *ends, str(pairing))))
    return max(errors)


def conditioned(condition: float, kind: str) -> Arrays:
    """Weights of one condition; ``cancel``: each is large exactly where its partner is small."""
    rng = np.random.default_rng(int(np.log10(condition)))
    arrays = {role: np.zeros((LAYERS, HEADS, D, M)) for role in "QKVO"}
    sizes = np.geomspace(1, 1 / condition, M) if kind != "one" else np.array([1.0] * (M - 1) + [1 / condition])
    for place in np.ndindex(LAYERS, HEADS):
        for own, partner in ("QK", "OV"):
            turn = frame(rng, M, M)
            arrays[own][place] = frame(rng, D, M) * sizes @ turn.T
            arrays[partner][place] = frame(rng, D, M) * (sizes[::-1] if kind == "cancel" else sizes) @ turn.T
    return arrays


@pytest.mark.parametrize("condition", [1e3, 1e7, 1e10, 1e13])
@pytest.mark.parametrize("kind", ["many", "one", "cancel"])
def test_scores_of_ill_conditioned_heads(condition: float, kind: str) -> None:
    assert worst(conditioned(condition, kind), ("pk", "cs", "simple_cs", "linear_cka")) < 1e-5


@pytest.mark.parametrize("condition", [1e3, 1e5])
def test_scores_of_ill_conditioned_float32_heads(condition: float) -> None:
    arrays = {role: array.astype(np.float32) for role, array in conditioned(condition, "cancel").items()}
    assert worst(arrays, ("pk", "cs", "simple_cs", "linear_cka")) < 1e-5


@pytest.mark.parametrize("scales", [(1e-290, 1.0, 1e290), (1e-300, 1e300, 1e-150), (1e-310, 1e10, 1e100)])
@pytest.mark.parametrize("condition", [10.0, 1e7])
def test_scales_that_differ_by_any_power(scales: tuple[float, ...], condition: float) -> None:
    """Heads of one layer, and a head and its partner, each in every combination with the next head's scale."""
    arrays = conditioned(condition, "cancel")
    for shift, role in enumerate("QKVO"):
        arrays[role] *= np.roll(scales, shift)[:, None, None]
    assert worst(arrays, ("pk", "cs", "simple_cs", "linear_cka")) < 1e-5


def test_stacked_partners_of_different_scales() -> None:
    """Two query heads share a key: their scales differ by 1e250 in one group, and the groups' by 1e500."""
    rng = np.random.default_rng(5)
    plain = {role: rng.normal(size=(2, 2 if role in "KV" else 4, D, M)) for role in "QKVO"}
    scales = np.array([1e-250, 1e0, 1e250, 1e250])[:, None, None]
    scaled = plain | {role: plain[role] * scales for role in "QO"}
    found = hs.score(scaled, "cs", "KV", "all")["cs", "KV"]
    alone = plain | {role: plain[role] * np.array([0.0, 1.0, 1.0, 1.0])[:, None, None] for role in "QO"}
    np.testing.assert_allclose(found.values, hs.score(alone, "cs", "KV", "all")["cs", "KV"].values, atol=1e-6)


@pytest.mark.parametrize("route", ["gram", "direct"])
@pytest.mark.parametrize("weak", [1e-3, 1e-5, 1e-7, 0.0])
def test_small_composition_scores(weak: float, route: str) -> None:
    """Heads that overlap only in weak directions: Gram matrices would lose the root of a small kernel."""
    rng = np.random.default_rng(3)
    space, arrays = frame(rng, 64, 64), {role: np.zeros((2, 2, 64, 16)) for role in "QKVO"}
    for role, place in ((role, place) for role in "QKVO" for place in np.ndindex(2, 2)):
        strong, other = (space[:, :32], space[:, 32:]) if role in "OV" else (space[:, 32:], space[:, :32])
        columns = np.hstack([strong @ frame(rng, 32, 8), weak * other @ frame(rng, 32, 8)])
        arrays[role][place] = columns @ frame(rng, 16, 16)
    assert worst(arrays, ("cs", "simple_cs"), route=route) < 1e-7


def test_linear_cka_of_columns_that_are_nearly_equal() -> None:
    """Centring leaves 1e-13 of the weight: rounding of the mean must not show."""
    rng = np.random.default_rng(2)
    arrays = {role: rng.normal(size=(2, 2, D, 1)) + 1e-13 * rng.normal(size=(2, 2, D, M)) for role in "QKVO"}
    assert worst(arrays, ("linear_cka",)) < 1e-5


def test_a_product_that_cancels() -> None:
    """Against longdouble, where all but 1e-16 of the product cancels."""
    rng = np.random.default_rng(0)
    turn, sizes = frame(rng, 30, 30), np.geomspace(1, 1e-16, 30)
    first, second = frame(rng, 50, 30) * sizes @ turn, turn.T * sizes[::-1] @ frame(rng, 30, 30)
    high, low = accurate_product(first, second)
    exact = first.astype(np.longdouble) @ second.astype(np.longdouble)
    assert np.abs(high + low.astype(np.longdouble) - exact).max() < 1e-18
    assert np.abs(low).max() < 1e-15 * np.abs(high).max()


def test_bases_of_ill_conditioned_weights_keep_their_order_and_sign() -> None:
    rng = np.random.default_rng(1)
    weight = frame(rng, D, M) * np.geomspace(1, 1e-10, M) @ frame(rng, M, M)
    left = np.linalg.svd(weight, full_matrices=False)[0]
    np.testing.assert_allclose(orthonormal_basis(weight).vectors, left, atol=1e-4)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e9, 1e13])
@pytest.mark.parametrize("make", [sketched_bases, sketched_spans])
def test_sketches_of_heads_of_any_condition_side_by_side(condition: float, make: object) -> None:
    """One ill-conditioned head among ordinary ones: the span of each sketch is that of the sketched span."""
    rng = np.random.default_rng(4)
    weights = rng.normal(size=(3, D, M))
    weights[1] = frame(rng, D, M) * np.geomspace(1, 1 / condition, M) @ frame(rng, M, M)
    sketch = gaussian_sketch(D, 20, seed=0)
    found, ranks = make(weights, sketch, "float64")  # type: ignore[operator]
    assert ranks.tolist() == [M] * 3
    for made, weight in zip(found.astype(np.float64), weights, strict=True):
        exact = np.linalg.qr(sketch.astype(np.float64) @ basis(weight).astype(np.float64))[0]
        np.testing.assert_allclose(np.linalg.svd(exact.T @ np.linalg.qr(made)[0])[1], 1.0, atol=1e-6)


def test_exact_values_of_a_screened_result_at_any_condition() -> None:
    arrays = conditioned(1e12, "many")
    arrays["K"][1, 0] = arrays["O"][0, 0] @ np.linalg.qr(np.random.default_rng(0).normal(size=(M, M)))[0]
    found = screen(hs.open(arrays), parse_pairings("OK"), "default", 3, memory=10**9)
    for edge in found["pk", "OK"].top(3):
        exact = definition("pk", of_head(arrays, edge.source), of_head(arrays, edge.target), "OK")
        assert edge.score == pytest.approx(exact, abs=1e-5)
