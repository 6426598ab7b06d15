"""Subspaces against scipy: bases, ranks, principal angles down to 1e-9, principal vectors, PK; and real GPT-2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.linalg

import headspan as hs
from headspan.subspaces.bases import (
    orthonormal_bases,
    orthonormal_basis,
    principal_angles,
    principal_vectors,
    projection_kernel,
)
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES


def random_pair(d: int, m: int, m2: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(d, m)), rng.normal(size=(d, m2))


@pytest.mark.parametrize(("d", "m", "m2"), [(20, 4, 4), (20, 4, 7), (20, 7, 4), (5, 5, 2), (3, 1, 1), (6, 5, 5)])
def test_angles_and_kernel_equal_scipy(d: int, m: int, m2: int) -> None:
    a, b = random_pair(d, m, m2)
    u, v = orthonormal_basis(a).vectors, orthonormal_basis(b).vectors
    expected = np.sort(scipy.linalg.subspace_angles(a, b))
    angles = principal_angles(u, v)
    np.testing.assert_allclose(angles, expected, atol=3e-8)  # scipy takes some small angles from their cosines
    assert (np.diff(angles) >= 0).all()
    assert projection_kernel(u, v) == pytest.approx(np.sum(np.cos(expected) ** 2), abs=1e-12)
    np.testing.assert_allclose(principal_angles(v, u), angles, atol=1e-12)


@pytest.mark.parametrize("angle", [1e-3, 1e-6, 1e-9, 1e-12])
def test_small_angles_keep_their_digits(angle: float) -> None:
    """Planes rotated by known angles: an arc cosine alone would see nothing below 1e-8."""
    d, rng = 10, np.random.default_rng(1)
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    known = np.array([angle, 2 * angle, 0.3, 1.4])
    first = rotation[:, :4]
    second = first * np.cos(known) + rotation[:, 4:8] * np.sin(known)
    mixed = second @ np.linalg.qr(rng.normal(size=(4, 4)))[0]
    ours = principal_angles(first, np.linalg.qr(mixed)[0])
    np.testing.assert_allclose(ours, known, atol=2e-15, rtol=1e-6)


@pytest.mark.parametrize("angle", [1e-3, 1e-6, 1e-9, 1e-12])
def test_small_angles_equal_scipys(angle: float) -> None:
    """Where all angles are below 45° scipy takes them all from their sines, as we do."""
    rng = np.random.default_rng(2)
    first = np.linalg.qr(rng.normal(size=(10, 4)))[0]
    second = first + angle * rng.normal(size=(10, 4))
    ours = principal_angles(first, orthonormal_basis(second).vectors)
    expected = np.sort(scipy.linalg.subspace_angles(first, second))
    assert 0 < expected[0] < expected[-1] < 10 * angle
    np.testing.assert_allclose(ours, expected, atol=2e-15)


def test_equal_and_orthogonal_spaces() -> None:
    u = np.linalg.qr(random_pair(9, 3, 3)[0])[0]
    np.testing.assert_allclose(principal_angles(u, u), 0, atol=1e-15)
    np.testing.assert_allclose(principal_angles(np.eye(6)[:, :3], np.eye(6)[:, 3:]), np.pi / 2)


@pytest.mark.parametrize(("m", "m2"), [(4, 4), (2, 5), (5, 2)])
def test_principal_vectors(m: int, m2: int) -> None:
    a, b = random_pair(12, m, m2, seed=3)
    u, v = orthonormal_basis(a).vectors, orthonormal_basis(b).vectors
    first, second, cosines = principal_vectors(u, v)
    k = min(m, m2)
    assert first.shape == second.shape == (12, k)
    np.testing.assert_allclose(first.T @ second, np.diag(cosines), atol=1e-12)
    np.testing.assert_allclose(u @ u.T @ first, first, atol=1e-12)
    np.testing.assert_allclose(v @ v.T @ second, second, atol=1e-12)
    np.testing.assert_allclose(np.arccos(cosines), principal_angles(u, v), atol=1e-7)


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_rank_and_span(rank: int) -> None:
    rng = np.random.default_rng(rank)
    weight = rng.normal(size=(16, rank)) @ rng.normal(size=(rank, 5))
    basis = orthonormal_basis(weight)
    assert basis.rank == rank == np.linalg.matrix_rank(weight)
    assert basis.vectors.shape == (16, rank)
    np.testing.assert_allclose(basis.vectors.T @ basis.vectors, np.eye(rank), atol=1e-13)
    np.testing.assert_allclose(basis.vectors @ (basis.vectors.T @ weight), weight, atol=1e-12)
    np.testing.assert_allclose(basis.singular_values, np.linalg.svd(weight, compute_uv=False), atol=1e-13)


@pytest.mark.parametrize(("storage", "rounding"), [("float32", "f4"), ("float16", "f2"), ("bfloat16", None)])
def test_rounding_of_the_storage_is_not_a_direction(storage: str, rounding: str | None) -> None:
    """Rank-10 products kept in a coarse dtype have 64 singular values above zero, but rank 10."""
    import ml_dtypes

    for seed in range(20):
        rng = np.random.default_rng(seed)
        exact = rng.normal(size=(256, 10)) @ rng.normal(size=(10, 64))
        stored = exact.astype(rounding or ml_dtypes.bfloat16).astype(np.float64)
        assert orthonormal_basis(stored, storage).rank == 10
        assert orthonormal_basis(stored, "float64").rank == 64


def test_noise_is_not_an_excuse_for_a_weak_direction() -> None:
    """A direction ten times above the tolerance counts."""
    rng = np.random.default_rng(5)
    u, v = np.linalg.qr(rng.normal(size=(128, 32)))[0], np.linalg.qr(rng.normal(size=(32, 32)))[0]
    values = np.ones(32)
    values[-1] = 10 * orthonormal_basis(u @ v, "float16").tolerance
    assert orthonormal_basis((u * values) @ v, "float16").rank == 32
    assert values[-1] < 0.05


@pytest.mark.parametrize(
    "weight", [np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(3), np.zeros((2, 2, 2)), [[np.nan]], [[1.0, np.inf]]]
)
def test_what_spans_nothing_is_refused(weight: object) -> None:
    with pytest.raises(HeadspanError):
        orthonormal_basis(np.asarray(weight))


@pytest.mark.parametrize("function", [principal_angles, principal_vectors, projection_kernel])
def test_spaces_of_different_width_are_refused(function) -> None:
    with pytest.raises(HeadspanError, match=r"\(4, 2\) and \(5, 2\)"):
        function(np.eye(4)[:, :2], np.eye(5)[:, :2])


def test_a_zero_space_has_no_angles() -> None:
    nothing = orthonormal_basis(np.zeros((4, 2))).vectors
    assert nothing.shape == (4, 0)
    assert projection_kernel(nothing, np.eye(4)) == 0
    assert principal_angles(nothing, np.eye(4)).size == 0


# --------------------------------------------------------------------- the public functions, for any two matrices


@pytest.mark.parametrize(("d", "m", "m2"), [(12, 4, 3), (6, 1, 9)])
@pytest.mark.parametrize("scale", [1.0, 1e200, 1e-200])
def test_public_functions_equal_scipy(d: int, m: int, m2: int, scale: float) -> None:
    a, b = random_pair(d, m, m2)
    left = np.linalg.svd(a)[0]
    expected = np.sort(scipy.linalg.subspace_angles(a, b))
    np.testing.assert_allclose(hs.principal_angles(a * scale, b), expected, atol=3e-8)
    assert hs.projection_kernel(a * scale, b) == pytest.approx(np.sum(np.cos(expected) ** 2))
    for rank in range(1, m + 1):  # the strongest directions, however many are asked for
        basis = hs.subspace(a * scale, rank=rank)
        assert basis.shape == (d, rank)
        np.testing.assert_allclose(np.abs(left[:, :rank].T @ basis), np.eye(rank), atol=1e-10)
        other = scipy.linalg.orth(b)[:, :rank]
        angles = np.sort(scipy.linalg.subspace_angles(left[:, :rank], other))
        if rank <= min(d, m2):
            np.testing.assert_allclose(hs.principal_angles(a * scale, b, rank=rank), angles, atol=3e-8)


def test_the_dtype_of_a_matrix_decides_what_is_rounding() -> None:
    import ml_dtypes

    rng = np.random.default_rng(6)
    product = rng.normal(size=(64, 3)) @ rng.normal(size=(3, 8))
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        assert hs.subspace(product.astype(dtype)).shape == (64, 3)
    assert hs.subspace(product.astype(np.float16).astype(np.float64)).shape == (64, 8)
    whole = np.diag([10**12, 1])
    assert hs.subspace(whole).shape == hs.subspace(whole.astype(np.float64)).shape == (2, 2)  # integers are exact
    assert hs.subspace(whole > 0).shape == (2, 2)
    assert hs.subspace(np.zeros((3, 2)), rank=2).shape == (3, 2)


@pytest.mark.parametrize(
    ("matrix", "rank", "words"),
    [
        (np.zeros((3, 2)), None, "spans nothing"),
        (np.eye(3), 0, "rank cannot be 0"),
        (np.eye(3)[:, :2], 3, "has 1 to 2 directions"),
        (np.eye(3), True, "rank must be a whole number"),
        (np.eye(3), 1.5, "rank must be a whole number"),
        (np.ones(3), None, "but this one has shape"),
        (np.ones((1, 2, 3)), None, "but this one has shape"),
        (np.ones((3, 0)), None, "but this one has shape"),
        ([[1.0, np.nan]], None, "NaN or infinity"),
        ([[1.0, np.nan]], 1, "NaN or infinity"),
        ([[1.0, 1j]], None, "it holds complex128"),
        ([["a"]], None, "it holds <U1"),
        (np.zeros((2, 2), dtype=[("x", "f8")]), None, "it holds"),
    ],
)
def test_public_functions_refuse_what_is_not_a_subspace(matrix: object, rank: object, words: str) -> None:
    with pytest.raises(HeadspanError, match=words):
        hs.subspace(matrix, rank)  # type: ignore[arg-type]
    with pytest.raises(HeadspanError, match=words):
        hs.projection_kernel(np.eye(3), matrix, rank)  # type: ignore[arg-type]


def test_spaces_of_different_matrices_are_of_one_width() -> None:
    with pytest.raises(HeadspanError, match=r"different d: shapes \(4, 2\) and \(5, 2\)"):
        hs.principal_angles(np.eye(4)[:, :2], np.eye(5)[:, :2])


# ----------------------------------------------------------------------------------------- real GPT-2 small


def test_gpt2_small_has_144_heads_of_full_rank(gpt2_dir: Path) -> None:
    with hs.open(gpt2_dir) as weights:
        ranks = {
            role: np.concatenate(
                [orthonormal_bases(weights.read(role, n), weights.storage_dtype(role, n))[1] for n in weights.layers]
            )
            for role in ROLES
        }
    for found in ranks.values():
        assert len(found) == 144
        assert (found == 64).all()


PAIRS = [
    ("L4H11.O", "L5H1.K"),
    ("L4H11.O", "L5H5.K"),
    ("L0H1.O", "L5H5.Q"),
    ("L9H9.O", "L10H7.Q"),
    ("L2H2.O", "L3H0.V"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_gpt2_small_pairs_equal_scipy(gpt2_dir: Path, source: str, target: str) -> None:
    """The basis of one pair, and the all-pairs route, against scipy in float64."""
    with hs.open(gpt2_dir) as weights:
        a, b = (weights.read_head(name).astype(np.float64) for name in (source, target))
    angles = np.sort(scipy.linalg.subspace_angles(a, b))
    u, v = (orthonormal_basis(w, "float32").vectors for w in (a, b))
    np.testing.assert_allclose(principal_angles(u, v), angles, atol=1e-7)
    assert projection_kernel(u, v) == pytest.approx(np.sum(np.cos(angles) ** 2), abs=1e-5)
