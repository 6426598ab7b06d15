"""What rounding, limited memory and biases would spoil without anybody noticing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, Run
from headspan.scoring.contraction import Job, cheaper_route, contract, route_cost
from headspan.scoring.subspaces import orthonormal_bases


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
    # The same numbers in double precision are what they seem: 64 directions.
    assert orthonormal_bases(stored, "float64")[1].tolist() == [64] * 4


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
