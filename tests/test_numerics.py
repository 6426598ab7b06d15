"""Numerical edge cases: correct scores, or a refusal that names the head.

The oracle is ``definitions``: d×d matrices, explicit singular values, float64. Heads are brought to a common scale
before they go there (every similarity but Procrustes ignores the scale of a head), since it takes fourth powers.
"""

from __future__ import annotations

import numpy as np
import pytest

import definitions
import headspan as hs
from headspan.subspaces.bases import orthonormal_bases, orthonormal_basis, projection_kernel
from headspan.subspaces.metrics import WEIGHT_METRICS
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import PAIRINGS, ROLES

D, M, HEADS, LAYERS = 12, 4, 2, 2
Arrays = dict[str, np.ndarray]


def random_arrays(seed: int = 0, *, heads: int = HEADS, layers: int = LAYERS, d: int = D, m: int = M) -> Arrays:
    rng = np.random.default_rng(seed)
    return {str(role): rng.normal(size=(layers, heads, d, m)) for role in ROLES}


def all_scores(arrays: Arrays, pairs: str = "all") -> hs.Scores:
    return hs.score(hs.open(arrays), "all", "all", pairs)  # type: ignore[arg-type]


def check(arrays: Arrays, scale_free: Arrays | None = None, tolerance: float = 2e-5) -> None:
    """Every score of every pairing and similarity against the definitions (float64)."""
    scores = all_scores(arrays)
    exact = {k: np.asarray(a, dtype=np.float64) for k, a in (scale_free or arrays).items()}
    for metric in WEIGHT_METRICS if scale_free is None else [m for m in WEIGHT_METRICS if m != "procrustes"]:
        for pairing in PAIRINGS:
            matrix = scores[metric, pairing]
            for i, j, value in zip(*matrix.pairs(), strict=True):
                a, b = (
                    {k: w[h.layer, h.index] for k, w in exact.items()} for h in (matrix.sources[i], matrix.targets[j])
                )
                expected = definitions.similarity(metric, a, b, str(pairing))
                assert value == pytest.approx(expected, abs=tolerance), (metric, str(pairing), i, j)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_weights(scale: float, dtype: type) -> None:
    plain = random_arrays(1)
    scaled = {k: (a * scale).astype(dtype) for k, a in plain.items()}
    check(scaled, {k: a.astype(np.float64) / scale for k, a in scaled.items()})
    procrustes = all_scores(scaled)["procrustes", "OK"].values  # a common scale does not change it
    np.testing.assert_allclose(procrustes, all_scores(plain)["procrustes", "OK"].values, atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_huge_weights_of_one_sign(sign: int) -> None:
    """The largest entry by size sets the scale: not the largest, nor the least, where all have one sign or are zero."""
    plain = {k: sign * np.abs(a) for k, a in random_arrays(1).items()}
    for array in plain.values():
        array[..., 0, 0] = 0
    check({k: a * 1e200 for k, a in plain.items()}, plain)


@pytest.mark.parametrize("metric", ["linear_cka", "procrustes"])
def test_what_compares_columns_refuses_heads_with_other_numbers_of_them(metric: str) -> None:
    arrays = random_arrays(4)
    arrays |= {role: arrays[role][..., :3] for role in "VO"}
    weights = hs.open(arrays)
    with pytest.raises(HeadspanError, match=f"{metric}.*O has 3.*Q has 4"):
        hs.score(weights, metric, "OQ")
    assert hs.score(weights, metric, "OV")[metric, "OV"].pairs()[2].size == 4
    assert hs.score(weights, ["pk", "cs", "simple_cs"], "OQ")["pk", "OQ"].pairs()[2].size == 4


def test_scales_that_differ_between_heads() -> None:
    """From the smallest to the largest that float32 holds, all in one model."""
    plain = random_arrays(2)
    scales = np.array([[1e-37, 1e30], [1.0, 1e37]])[:, :, None, None]
    scaled = {k: (a * scales).astype(np.float32) for k, a in plain.items()}
    check(scaled, {k: a.astype(np.float64) / scales for k, a in scaled.items()})
    procrustes = all_scores({k: np.tile(a[:1, :1], (2, 2, 1, 1)) * scales for k, a in plain.items()})[
        "procrustes", "OO"
    ]
    values = procrustes.values[~np.isnan(procrustes.values)]
    assert (values < 1e-6).all()  # heads of incomparable size have nothing in common for Procrustes


def test_two_tiny_heads_among_huge_ones_keep_their_procrustes_similarity() -> None:
    plain = random_arrays(3, heads=3)
    scales = np.array([1e-44, 1.0, 1e38])[None, :, None, None]
    values = all_scores({k: a * scales for k, a in plain.items()})["procrustes", "OK"]
    expected = all_scores(plain)["procrustes", "OK"]
    assert values.at("L0H0", "L1H0") == pytest.approx(expected.at("L0H0", "L1H0"), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_heads_have_no_similarity(dtype: type) -> None:
    arrays = {k: a.astype(dtype) for k, a in random_arrays(4).items()}
    for array in arrays.values():
        array[0, 1] = 0
    scores = all_scores(arrays)
    for metric in WEIGHT_METRICS:
        for pairing in PAIRINGS:
            values = scores[metric, pairing].values
            assert np.nanmax(np.abs(values[1])) == 0, (metric, str(pairing))
            assert np.isfinite(values[0, 2:]).all()
    assert [scores.ranks(role)[1] for role in ROLES] == [0] * 4
    named = scores.provenance["rank_deficient"]
    assert len(named) == 4
    assert "L0H1.Q (layer 0) has rank 0 of 4" in named


def test_a_zero_partner_makes_a_zero_circuit_but_leaves_the_span() -> None:
    arrays = random_arrays(5)
    arrays["V"][0, 0] = 0
    scores = all_scores(arrays)
    assert scores["cs", "OQ"].at("L0H0", "L1H0") == 0
    assert scores["pk", "OQ"].at("L0H0", "L1H0") > 0.1


def test_duplicated_heads() -> None:
    arrays = random_arrays(6)
    for array in arrays.values():
        array[1, 1] = array[0, 0]
    check(arrays)
    scores = all_scores(arrays)
    for metric, best in (("pk", M), ("linear_cka", 1), ("procrustes", 1)):
        assert scores[metric, "KK"].at("L0H0", "L1H1") == pytest.approx(best, abs=1e-6)
        assert scores[metric, "KK"].top(1)[0][3:5] == (hs.Head(0, 0), hs.Head(1, 1))


@pytest.mark.parametrize("small", [1e-2, 1e-4, 1e-5])
def test_nearly_rank_deficient_heads_above_the_noise(small: float) -> None:
    """A direction a hundred thousand times weaker than the others still counts when the storage can hold it."""
    arrays = random_arrays(7)
    arrays["O"][0, 0, :, 3] = arrays["O"][0, 0, :, 0] + small * np.random.default_rng(8).normal(size=D)
    check(arrays)
    assert all_scores(arrays).ranks("O")[0] == M


@pytest.mark.parametrize(("dtype", "small"), [("float32", 1e-9), ("float16", 1e-5), ("float64", 1e-17)])
def test_directions_below_the_noise_of_the_storage_do_not_count(dtype: str, small: float) -> None:
    """A rank-3 weight and the rounding of its storage: the fourth direction is rounding, not a direction."""
    rng = np.random.default_rng(9)
    arrays = random_arrays(10)
    thin = rng.normal(size=(D, 3))
    arrays["O"][0, 0] = np.c_[thin, thin @ [1.0, -0.5, 0.25] + small * rng.normal(size=D)]
    stored = {k: a.astype(dtype) for k, a in arrays.items()}
    scores = all_scores(stored)
    assert scores.ranks("O")[0] == 3
    assert "L0H0.O (layer 0) has rank 3 of 4" in scores.provenance["rank_deficient"]
    basis = orthonormal_basis(stored["O"][0, 0], dtype).vectors
    for head in range(HEADS):
        target = orthonormal_basis(stored["K"][1, head], dtype).vectors
        expected = projection_kernel(basis, target)
        assert scores["pk", "OK"].values[0, HEADS + head] == pytest.approx(expected, abs=1e-5)


def test_float16_that_overflowed_is_named() -> None:
    with np.errstate(over="ignore"):
        arrays = {k: (a * 1e5).astype(np.float16) for k, a in random_arrays(11).items()}
    assert np.isinf(arrays["Q"]).any()
    with pytest.raises(HeadspanError, match=r"of head L\dH\d \(layer \d\).*NaN or infinite"):
        all_scores(arrays)


def test_largest_float16_does_not_overflow() -> None:
    arrays = {k: (a / np.abs(a).max() * 65504).astype(np.float16) for k, a in random_arrays(12).items()}
    check(arrays, {k: a.astype(np.float64) / 65504 for k, a in arrays.items()})


@pytest.mark.parametrize(
    ("d", "m", "heads"),
    [(12, 8, 2), (8, 8, 2), (4, 8, 2), (1, 1, 1), (1, 3, 2), (6, 1, 2)],
    ids=["m > d/heads", "m = d", "m > d", "one number", "m > d = 1", "m = 1"],
)
def test_unusual_head_sizes(d: int, m: int, heads: int) -> None:
    arrays = random_arrays(13, d=d, m=m, heads=heads)
    check(arrays)
    scores = all_scores(arrays)
    assert (scores.ranks("Q") == min(m, d)).all()
    if m >= d:  # every head fills the space
        values = scores["pk", "OK"].pairs()[2]
        np.testing.assert_allclose(values, d, rtol=1e-6)


def test_one_layer_has_no_forward_pairs() -> None:
    scores = hs.score(hs.open(random_arrays(14, layers=1)), "all", "all")
    for metric in WEIGHT_METRICS:
        assert len(scores[metric, "OK"].pairs()[2]) == 0
        assert scores[metric, "OK"].top(3) == []
        assert len(scores[metric, "QQ"].pairs()[2]) == 1


def test_one_head() -> None:
    scores = hs.score(hs.open(random_arrays(15, layers=1, heads=1)), "all", "all")
    assert all(np.isnan(scores[metric, p].values).all() for metric in WEIGHT_METRICS for p in PAIRINGS)


def test_equal_columns_leave_nothing_for_linear_cka() -> None:
    """Centring removes everything; the rounding of the mean must not count as a weight."""
    arrays = random_arrays(16, m=3)
    arrays["O"][0, 0] = np.full((D, 3), 0.1) * np.arange(1, D + 1)[:, None]
    scores = all_scores(arrays)
    assert np.nanmax(scores["linear_cka", "OK"].values[0]) == 0
    assert np.nanmin(scores["simple_cs", "OK"].values[0]) > 0


def test_many_bases_at_once_are_those_made_one_by_one() -> None:
    """Well-conditioned, nearly singular, singular and zero heads in one layer."""
    rng = np.random.default_rng(17)
    weights = rng.normal(size=(5, D, M))
    weights[1, :, 3] = weights[1, :, 0] + 1e-6 * rng.normal(size=D)
    weights[2, :, 3] = weights[2, :, 0]
    weights[3] = 0
    weights[4] *= 1e-300
    bases, ranks = orthonormal_bases(weights, "float64")
    assert ranks.tolist() == [4, 4, 3, 0, 4]
    for weight, basis, rank in zip(weights, bases, ranks, strict=True):
        one = orthonormal_basis(weight)
        assert one.rank == rank
        assert not basis[:, rank:].any()
        np.testing.assert_allclose(basis @ basis.T, one.vectors @ one.vectors.T, atol=1e-8)
        np.testing.assert_allclose(basis[:, :rank].T @ basis[:, :rank], np.eye(rank), atol=1e-8)
