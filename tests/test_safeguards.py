"""Silent errors from rounding, limited memory and biases."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, Run
from headspan.scoring.arrangement import Job
from headspan.scoring.contraction import cheaper_route, contract, route_cost
from headspan.subspaces import bases as subspaces
from headspan.subspaces.bases import orthonormal_bases, orthonormal_basis, rank_tolerance, subspace_ranks
from headspan.subspaces.sketches import sketched_bases, sketched_spans


def bfloat16(weights: np.ndarray) -> np.ndarray:
    return weights.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("deficient", [0, 2])
def test_storage_noise_does_not_fill_a_missing_dimension(deficient: int) -> None:
    """A head of rank 63 stored in bfloat16 has 64 nonzero singular values, and still rank 63."""
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(4, 256, 64))
    heads[deficient] = rng.normal(size=(256, 63)) @ rng.normal(size=(63, 64))
    stored = bfloat16(heads)
    assert np.linalg.matrix_rank(stored[deficient]) == 64
    bases, ranks = orthonormal_bases(stored, "bfloat16")
    expected = np.full(4, 64)
    expected[deficient] = 63
    assert ranks.tolist() == expected.tolist()
    for basis, rank in zip(bases, ranks, strict=True):
        np.testing.assert_allclose(basis.T @ basis, np.diag(np.arange(64) < rank).astype(float), atol=1e-8)
    assert subspace_ranks(stored, "bfloat16").tolist() == expected.tolist()
    # The same numbers in double precision are what they seem: 64 directions.
    assert orthonormal_bases(stored, "float64")[1].tolist() == [64] * 4
    assert subspace_ranks(stored, "float64").tolist() == [64] * 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ranks_without_bases_are_those_of_the_singular_values(dtype: str) -> None:
    """Smallest singular values from far below the noise to far above it, on both sides of its bound."""
    rng = np.random.default_rng(2)
    left, right = (np.linalg.qr(rng.normal(size=shape))[0] for shape in ((96, 12), (12, 12)))
    values = np.append(np.ones(11), 0.0)
    tolerance = orthonormal_basis((left * values) @ right.T, dtype).tolerance
    heads, expected = [], []
    for factor in (1e-4, 0.5, 0.99, 1.01, 1.5, 2.5, 10.0, 1e3):
        values[-1] = factor * tolerance
        heads.append((left * values) @ right.T)
        expected.append(12 if factor > 1.005 else 11)
    heads.append(np.zeros((96, 12)))
    for scale in (1.0, 1e-30, 1e30):
        assert subspace_ranks(np.stack(heads) * scale, dtype).tolist() == [*expected, 0]
    for head, rank in zip(heads, [*expected, 0], strict=True):  # alone, where no other head asks for a closer look
        assert subspace_ranks(head[None], dtype).tolist() == [rank]


def test_a_head_that_writes_to_few_rows_has_its_full_rank() -> None:
    """Not every row of a weight is looked at when the ones that are suffice; here they are all zero."""
    rng = np.random.default_rng(3)
    heads = np.zeros((3, 128, 8))
    heads[0] = rng.normal(size=(128, 8))
    heads[1, 1:16:2] = rng.normal(size=(8, 8))
    heads[2, 1:14:2] = rng.normal(size=(7, 8))
    assert subspace_ranks(heads, "float32").tolist() == [8, 8, 7]
    assert subspace_ranks(heads * 1e-170, "float64").tolist() == [8, 8, 7]  # whose squares are not numbers any more
    assert subspace_ranks(heads * 1e170, "float64").tolist() == [8, 8, 7]
    assert subspace_ranks(rng.normal(size=(2, 5, 8)), "float64").tolist() == [5, 5]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_tolerance_of_a_rank_is_what_rounding_makes(dtype: str) -> None:
    """Never less than the rounding of a weight, by its spacing next to 1, and of the order of it in coarse types."""
    exact = np.random.default_rng(4).normal(size=(200, 20))
    stored = exact.astype(getattr(ml_dtypes, dtype, dtype)).astype(np.float64)
    norm = float(np.linalg.norm(stored))
    tolerance = float(rank_tolerance(stored.shape, np.float64(norm), dtype))
    error = np.linalg.norm(stored - exact, 2) if dtype != "float64" else 0.0
    assert error < tolerance
    spacing = float(ml_dtypes.finfo(dtype).eps)
    if spacing > 1e-4:
        assert tolerance < 6 * error
    # Entries of one size, each wrong by half its spacing and by what float32 arithmetic adds to it.
    rounding = (spacing / 2 + 8 * min(spacing, 2.0**-23)) * (np.sqrt(200) + np.sqrt(20)) / np.sqrt(200 * 20)
    least = np.finfo(float).eps * 200  # numpy's own rule
    assert tolerance / norm == pytest.approx(max(rounding, least), rel=1e-9, abs=0)


def test_quantised_weights_are_judged_like_the_half_precision_of_their_scales() -> None:
    assert rank_tolerance((64, 8), np.float64(3), "Q4_1") == rank_tolerance((64, 8), np.float64(3), "float16")


_ORDERS = {  # how the axes of (n, d, m) weights may lie in memory
    "heads": lambda w: np.ascontiguousarray(w),
    "columns": lambda w: np.ascontiguousarray(w.transpose(0, 2, 1)).transpose(0, 2, 1),
    "rows": lambda w: np.ascontiguousarray(w.transpose(1, 0, 2)).transpose(1, 0, 2),
}


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e60])  # float32 ends at 1e±38
@pytest.mark.parametrize("at_once", [1, 2**19])
def test_sketches_are_those_of_the_bases(
    order: str, size: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subspaces, "_PART", at_once)
    rng = np.random.default_rng(5)
    weights, sketch = size * rng.normal(size=(4, 24, 5)), rng.normal(size=(9, 24)).astype(np.float32)
    weights[1] *= 1e-40  # heads of one layer have scales of their own
    for deficient in (None, 2):
        if deficient is not None:
            weights[deficient, :, 4] = weights[deficient, :, 0]
        given = _ORDERS[order](weights)
        bases, ranks = orthonormal_bases(given, "float64")
        for make in (sketched_bases, sketched_spans):
            found, found_ranks = make(given, sketch, "float64")
            assert found_ranks.tolist() == ranks.tolist() == [5, 5, 5 - (deficient == 2), 5]
            assert not found[ranks < 5, :, 4].any()
            for mine, basis, rank in zip(found, bases, ranks, strict=True):
                theirs = sketch @ basis
                if make is sketched_bases:  # bases of one span differ by a rotation
                    np.testing.assert_allclose(mine @ mine.T, theirs @ theirs.T, atol=1e-4)
                else:
                    mine, theirs = (np.linalg.qr(x[:, :rank].astype(np.float64))[0] for x in (mine, theirs))
                    np.testing.assert_allclose(mine @ mine.T, theirs @ theirs.T, atol=1e-4)


@pytest.mark.parametrize("order", _ORDERS)
def test_some_rows_tell_the_rank_of_most_weights_and_all_rows_that_of_the_others(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.random.default_rng(6).normal(size=(3, 64, 4))
    looked: list[tuple[int, ...]] = []
    stands_above = subspaces._stands_above
    monkeypatch.setattr(subspaces, "_stands_above", lambda w, least: looked.append(w.shape) or stands_above(w, least))
    assert subspace_ranks(_ORDERS[order](weights), "float32").tolist() == [4, 4, 4]
    assert looked == [(3, 8, 4)]
    weights[1, :8, 3] = 0  # what one head has there is in other rows
    weights[2, :, 3] = weights[2, :, 0]
    assert subspace_ranks(_ORDERS[order](weights), "float32").tolist() == [4, 4, 3]


@pytest.mark.parametrize("route", ["gram", "direct"])
def test_orthogonal_heads_score_0_and_never_nan(route) -> None:
    """Sums of squares that rounding makes negative would turn cs, a square root, into NaN."""
    rng = np.random.default_rng(1)
    frame = np.linalg.qr(rng.normal(size=(64, 64)))[0]
    layers, heads, m = 3, 6, 8
    arrays = {role: np.empty((layers, heads, 64, m)) for role in "QKVO"}
    for role, space in (("O", frame[:, :32]), ("V", frame[:, :32]), ("Q", frame[:, 32:]), ("K", frame[:, 32:])):
        arrays[role][:] = space @ rng.normal(size=(layers, heads, 32, m))
    scores = hs.score(hs.open(arrays), ["pk", "cs", "simple_cs"], ["OQ", "OK", "OO"], route=route)
    for metric in ("pk", "cs", "simple_cs"):
        for pairing in ("OQ", "OK"):
            values = scores[metric, pairing].pairs()[2]
            assert len(values) == 3 * heads**2, "a pair is missing"
            assert (values >= 0).all()
            assert values.max() < 1e-3
        assert scores[metric, "OO"].pairs()[2].min() > 1e-3


@pytest.mark.parametrize("route", ["gram", "direct"])
def test_a_sum_of_squares_is_never_negative(route) -> None:
    rng = np.random.default_rng(2)
    frame = np.linalg.qr(rng.normal(size=(96, 96)))[0]
    first, second = (frame[:, half] @ rng.normal(size=(40, 48, 12)) for half in (slice(0, 48), slice(48, 96)))
    (total,) = contract({"a": first, "b": second}, [Job("a", "b", np.ones((40, 40), dtype=bool))], route=route)
    assert (total >= 0).all()
    largest = max(np.square(f).sum(axis=(1, 2)).max() for f in (first, second))
    assert total.max() < 1e-7 * largest**2  # 0 but for rounding, of numbers of that size


def peak(route, factors: dict[str, np.ndarray], work_bytes: int) -> int:
    """Bytes held at once besides factors and results."""
    job = Job("a", "b", np.ones((len(factors["a"]), len(factors["b"])), dtype=bool))
    contract(factors, [job], route=route, work_bytes=work_bytes)  # whatever is made once and kept
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        (total,) = contract(factors, [job], route=route, work_bytes=work_bytes)
        return tracemalloc.get_traced_memory()[1] - before - total.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("route", "shape"), [("gram", (64, 384, 4)), ("direct", (64, 32, 32))])
def test_contraction_keeps_to_its_memory(route, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(3)
    factors = {key: rng.normal(size=shape).astype(np.float32) for key in "ab"}
    allowed = 2 * 2**20
    assert peak(route, factors, allowed) < 1.5 * allowed
    assert peak(route, factors, 64 * 2**20) > 3 * allowed  # the bound is what keeps it small


@pytest.mark.parametrize(("d", "m", "route"), [(24, 12, "gram"), (96, 3, "direct")])
def test_the_cheaper_route_is_taken(d: int, m: int, route: str) -> None:
    rng = np.random.default_rng(4)
    weights = hs.open({role: rng.normal(size=(6, 12, d, m)) for role in "QKVO"})
    assert hs.score(weights, "pk", "OK").provenance["routes"]["pk"] == route
    shapes = {"a": (72, d, m), "b": (72, d, m)}
    jobs = [Job("a", "b", np.ones((72, 72), dtype=bool))]
    cost = route_cost(shapes, jobs)
    assert cheaper_route(shapes, jobs) == route == min(cost, key=cost.__getitem__)
    # Operations counted by hand: per pair 2·d·m·m for the products, d² for the Gram entries, m·d² to make each.
    assert cost == {"gram": 72 * 72 * d**2 + 2 * 72 * m * d**2, "direct": 72 * 72 * 2 * d * m * m}


@pytest.mark.parametrize("name", ["gpt2", "phi"])
def test_the_bias_of_folded_logits_is_centred_as_the_logits_are(name: str, tmp_path: Path) -> None:
    """Rows of the folded unembedding have mean 0 over tokens; a bias that has not would move all logits."""
    run = Run(FAMILIES[name], tmp_path)
    weights = run.weights
    bias, norm = hs.fold(weights).unembedding_bias(), weights.final_norm()
    assert bias is not None
    assert norm is not None
    assert norm.bias is not None
    own = weights.unembedding_bias()
    plain = weights.unembedding() @ norm.bias + (0 if own is None else own)
    assert abs(plain.mean()) > 1e-3  # there is something to centre
    assert abs(bias.mean()) < 1e-6
    np.testing.assert_allclose(bias, plain - plain.mean(), atol=1e-5)
