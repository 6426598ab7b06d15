"""Single subspaces and pairs of them: orthonormal bases with their rank, principal angles, Projection Kernel.

All arithmetic is float64. These functions are for single pairs; :mod:`headspan.scoring.contraction` scores all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headspan.subspaces.accurate_products import accurate_product
from headspan.system.threads import one_thread, scratch
from headspan.vocabulary.errors import HeadspanError

# Spacing of numbers next to 1 in the dtype in which a weight was stored: the relative noise of every entry.
# Quantised formats have far more noise, but it adds dimensions rather than hiding them, so the float16 precision
# of their scales is what limits a rank decision.
_STORAGE_EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
_QUANTISED_EPS = 2.0**-10

# Below this condition number a basis made by Cholesky from the float64 Gram matrix is orthonormal to 1e-8.
_SAFE_CONDITION = 1e4
# Above this condition number the weakest directions of a float64 SVD have errors above 1e-10.
_SAFE_FOR_SVD = 1e6
_PART = 2**19  # entries processed at once, over several heads
_SMALL = 16  # triangular matrices up to this size are inverted by LAPACK directly
_ROW_BLOCKS = 4  # row blocks of a triangular product: five eighths of the operations of a full product
_SQUARABLE = 1e-140  # squares of larger numbers keep all their digits in float64


class Basis(NamedTuple):
    """An orthonormal basis of a column span.

    vectors: (d, rank), orthonormal columns, float64.
    rank: number of directions above the noise of the storage dtype.
    singular_values: of the weight, descending.
    tolerance: singular values up to this count as noise.
    """

    vectors: np.ndarray
    rank: int
    singular_values: np.ndarray
    tolerance: float


def rank_tolerance(shape: tuple[int, ...], norm: np.floating | np.ndarray, storage_dtype: str) -> np.ndarray:
    """Largest singular value that rounding alone can explain, for a (d, m) weight of Frobenius norm ``norm``.

    Rounding changes an entry by up to ε/2 of itself, and a weight computed in float32 has a further error of a few ε of
    float32. Independent errors of size δ·rms(entry) form a matrix of spectral norm δ·rms·(√d + √m).
    """
    d, m = shape[-2:]
    eps = _STORAGE_EPS.get(storage_dtype, _QUANTISED_EPS)
    rounding = (eps / 2 + 8 * min(eps, 2.0**-23)) * (np.sqrt(d) + np.sqrt(m)) / np.sqrt(d * m)
    return np.asarray(norm) * max(rounding, 2.0**-52 * max(d, m))


def orthonormal_basis(weight: np.ndarray, storage_dtype: str = "float64") -> Basis:
    """Orthonormal basis of the column span of a (d, m) weight, by SVD, with its numerical rank.

    An SVD has errors of 1e-16 relative to the *largest* singular value; much weaker directions are recomputed.

    >>> orthonormal_basis(np.array([[1.0, 2.0], [0.0, 0.0], [2.0, 4.0]])).rank
    1
    """
    weight = np.asarray(weight, dtype=np.float64)
    if weight.ndim != 2 or 0 in weight.shape:
        raise HeadspanError(f"a subspace needs a d×m matrix with d, m ≥ 1, not an array of shape {weight.shape}")
    if not np.isfinite(weight).all():
        raise HeadspanError("a subspace needs finite numbers, but this weight contains NaN or infinity")
    scale = float(power_of_two(np.abs(weight).max()))
    weight = weight / scale
    with one_thread():
        left, values, right = np.linalg.svd(weight, full_matrices=False)
        tolerance = float(rank_tolerance(weight.shape, np.linalg.norm(values), storage_dtype))
        rank = int(np.count_nonzero(values > tolerance))
        vectors = np.ascontiguousarray(left[:, :rank])
        if rank and values[0] > _SAFE_FOR_SVD * values[rank - 1]:
            vectors = _sharpened(weight, right[:rank], vectors)
    return Basis(vectors, rank, values * scale, tolerance * scale)


def _sharpened(weight: np.ndarray, right: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Left singular vectors (d, r), recomputed as W·V.

    The columns of W·V span the same space as those of W, whatever the rounding errors of V. Each is nearly a
    multiple of one left singular vector, so after scaling to unit length they are well conditioned.
    """
    columns = accurate_product(weight, right.T)[0]
    sharp = np.asarray(np.linalg.qr(columns / np.linalg.norm(columns, axis=0))[0])
    return sharp * np.where(np.einsum("dr,dr->r", sharp, left) < 0, -1.0, 1.0)


def orthonormal_bases(
    weights: np.ndarray, storage_dtype: str, dtype: type[np.floating] = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """Bases of many (d, m) weights at once, (n, d, m) of ``dtype`` computed in float64, and their ranks, (n,).

    Columns beyond a head's rank are zero, so that ‖UᵀU'‖² needs no special case. Well-conditioned heads use
    one batched Cholesky factorisation; the others use the SVD one by one.
    """
    n, d, m = weights.shape
    bases = np.empty((n, m, d), dtype)  # transposed, so that the columns of a basis are contiguous
    ranks = np.full(n, m, dtype=np.int32)
    for heads in parts(n, d * m):
        own = float64_copy(weights[heads])
        good, inverse = well_conditioned(own, storage_dtype)
        if inverse is not None:
            with one_thread(), np.errstate(all="ignore"):
                made = _lower_product(inverse, own.transpose(0, 2, 1), scratch("bases", (len(own), m, d)))
                bases[heads] = made
        for i in np.flatnonzero(~good):
            basis = orthonormal_basis(without_padding(own[i]), storage_dtype)
            ranks[heads.start + i] = basis.rank
            bases[heads.start + i] = 0.0
            bases[heads.start + i, : basis.rank] = basis.vectors.T
    return bases.transpose(0, 2, 1), ranks


def float64_copy(weights: np.ndarray) -> np.ndarray:
    """A copy in scratch memory with the memory layout of the weights."""
    by_columns = weights.strides[1] < weights.strides[2]
    own = scratch("weights", weights.transpose(0, 2, 1).shape if by_columns else weights.shape)
    own = own.transpose(0, 2, 1) if by_columns else own
    own[...] = weights
    return own


def parts(n: int, entries: int) -> Iterator[slice]:
    """Slices of n heads with ``entries`` numbers each, small enough to stay in the cache in float64.

    >>> [(part.start, part.stop) for part in parts(3, 200_000)]
    [(0, 2), (2, 3)]
    """
    at_once = max(1, _PART // entries)
    yield from (slice(first, min(first + at_once, n)) for first in range(0, n, at_once))


def largest(weights: np.ndarray) -> np.ndarray:
    """The largest absolute entry of every head, (n, 1, 1)."""
    # Reduce one axis at a time: whichever is contiguous, one of the two passes is over small arrays.
    high, low = weights.max(axis=1).max(axis=1), weights.min(axis=1).min(axis=1)
    return np.maximum(high, -low)[:, None, None]


def power_of_two(size: np.ndarray | float) -> np.ndarray:
    """The largest power of two up to each size, or 1 for a size of 0; dividing by it is exact.

    >>> power_of_two(np.array([5.0, 0.3, 0.0]))
    array([4.  , 0.25, 1.  ])
    """
    size = np.asarray(size)
    one = np.ones((), size.dtype)
    return np.where(size > 0, np.ldexp(one, np.frexp(size)[1] - 1), one)


def subspace_ranks(weights: np.ndarray, storage_dtype: str) -> np.ndarray:
    """The ranks that :func:`orthonormal_bases` finds, (n,), without computing bases.

    Adding rows can only increase singular values, so a weight has full rank if some of its rows clearly do. Twice as
    many rows as columns are enough for most weights. The others are examined one by one, with all their rows.
    """
    ranks = clear_ranks(weights, storage_dtype)
    for i in np.flatnonzero(ranks < 0):
        ranks[i] = orthonormal_basis(without_padding(weights[i]), storage_dtype).rank
    return ranks


def clear_ranks(weights: np.ndarray, storage_dtype: str) -> np.ndarray:
    """The ranks of weights that clearly have full rank and are well conditioned for float32; −1 for the others."""
    m = weights.shape[2]
    ranks = np.full(len(weights), m, dtype=np.int32)
    if not _stands_above(weights[:, : 2 * m], 2 * _clear_of_noise(weights, storage_dtype)):
        for i, weight in enumerate(map(without_padding, weights)):
            full = _stands_above(weight[None], 2 * _clear_of_noise(weight[None], storage_dtype))
            ranks[i] = weight.shape[1] if full else -1
    return ranks


def _clear_of_noise(weights: np.ndarray, storage_dtype: str) -> np.ndarray:
    """Singular values above this are not noise and are visible in a float64 Gram matrix, (n,)."""
    with np.errstate(all="ignore"):
        squares = np.einsum("nij,nij->n", weights, weights)
        if not ((squares > 1e-20) & (squares < 1e30)).all():  # float32 may not hold them
            squares = np.einsum("nij,nij->n", weights, weights, dtype=np.float64)
        norms = np.sqrt(squares)
        return np.maximum(rank_tolerance(weights.shape, norms, storage_dtype), norms / _SAFE_CONDITION)


def _stands_above(weights: np.ndarray, least: np.ndarray) -> bool:
    """Whether all singular values of all weights exceed ``least``: then WᵀW − least²·1 has a Cholesky factor."""
    weights = np.asarray(weights, dtype=np.float64)
    with one_thread(), np.errstate(all="ignore"):
        grams = np.matmul(weights.transpose(0, 2, 1), weights)
        grams -= np.square(least)[:, None, None] * np.eye(weights.shape[2])
        try:
            return bool(np.isfinite(np.linalg.cholesky(grams)).all() and (least > _SQUARABLE).all())
        except np.linalg.LinAlgError:
            return False


def without_padding(weight: np.ndarray) -> np.ndarray:
    """A (d, m) weight without the columns of zeros at its end, at least one column.

    These columns span nothing and have no rounding noise; dropping them keeps a direction stored among bases of 64
    columns cheap.
    """
    used = np.flatnonzero(weight.any(axis=0))
    return weight[:, : max(1, int(used[-1]) + 1 if used.size else 1)]


def well_conditioned(weights: np.ndarray, storage_dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Which of (n, d, m) weights clearly have full rank, and inverses of the Cholesky factors of WᵀW.

    The inverses are None if one of the heads is singular; then all use the SVD.
    """
    with one_thread(), np.errstate(all="ignore"):
        grams = np.matmul(weights.transpose(0, 2, 1), weights)
        norms = np.sqrt(np.trace(grams, axis1=1, axis2=2))
        try:
            inverse = lower_inverse(np.linalg.cholesky(grams))
        except np.linalg.LinAlgError:
            return np.zeros(len(weights), dtype=bool), None
        smallest = 1 / np.linalg.norm(inverse, axis=(1, 2))  # at most the smallest singular value
        noise = rank_tolerance(weights.shape, norms, storage_dtype)
        return (smallest > noise) & (norms < _SAFE_CONDITION * smallest), inverse


def lower_inverse(lower: np.ndarray) -> np.ndarray:
    """Inverses of lower triangular matrices, (n, m, m), by recursive halving, so that most work is matrix products.

    >>> lower_inverse(np.array([[[2.0, 0.0], [1.0, 1.0]]]))
    array([[[ 0.5,  0. ],
            [-0.5,  1. ]]])
    """
    m = lower.shape[1]
    if m <= _SMALL:
        return np.linalg.inv(lower)
    half = m // 2
    first, second = lower_inverse(lower[:, :half, :half]), lower_inverse(lower[:, half:, half:])
    inverse = np.zeros_like(lower)
    inverse[:, :half, :half], inverse[:, half:, half:] = first, second
    np.matmul(-second, np.matmul(lower[:, half:, :half], first), out=inverse[:, half:, :half])
    return inverse


def _lower_product(lower: np.ndarray, right: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Lower triangular matrices (n, m, m) times (n, m, d), by row blocks that skip later rows of ``right``."""
    m = lower.shape[1]
    for rows in np.array_split(np.arange(m), min(m, _ROW_BLOCKS)):
        first, last = int(rows[0]), int(rows[-1]) + 1
        np.matmul(lower[:, first:last, :last], right[:, :last], out=out[:, first:last])
    return out


def principal_angles(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Principal angles between the spans of two orthonormal bases, in radians, ascending.

    Angles below 45° come from their sines, the others from their cosines, so that small angles keep their
    digits (Björck & Golub 1973, as in ``scipy.linalg.subspace_angles``).

    >>> principal_angles(np.eye(3)[:, :2], np.eye(3)[:, 1:]).round(6)
    array([0.      , 1.570796])
    """
    _check_same_space(first, second)
    if first.shape[1] < second.shape[1]:
        first, second = second, first
    with one_thread():
        overlap = first.T @ second
        cosines = np.linalg.svd(overlap, compute_uv=False)
        sines = np.linalg.svd(second - first @ overlap, compute_uv=False)[::-1]
    by_cosine = np.arccos(np.clip(cosines, -1.0, 1.0))
    by_sine = np.arcsin(np.clip(sines, -1.0, 1.0))
    return np.where(cosines**2 >= 0.5, by_sine, by_cosine)


def principal_vectors(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Principal vectors of both spans, (d, k) each with k = min(m, m'), and their cosines, descending.

    Vectors whose cosines are equal are determined only up to a rotation among themselves.
    """
    _check_same_space(first, second)
    with one_thread():
        left, cosines, right = np.linalg.svd(first.T @ second, full_matrices=False)
    return first @ left, second @ right.T, np.clip(cosines, 0.0, 1.0)


def projection_kernel(first: np.ndarray, second: np.ndarray) -> float:
    """PK = Σ cos²θ = ‖UᵀU'‖_F² of two orthonormal bases; their dimensions may differ.

    >>> projection_kernel(np.eye(4)[:, :3], np.eye(4)[:, 2:])
    1.0
    """
    _check_same_space(first, second)
    return float(np.square(first.T @ second).sum())


def _check_same_space(first: np.ndarray, second: np.ndarray) -> None:
    if first.ndim != 2 or second.ndim != 2 or first.shape[0] != second.shape[0]:
        raise HeadspanError(
            f"two subspaces must be in the same space: got bases of shapes {first.shape} and {second.shape}"
        )


def span_drift(
    first: np.ndarray, first_ranks: np.ndarray, second: np.ndarray, second_ranks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """1 − PK/rank and the largest principal angle (radians) of each pair of bases, (n,) both.

    first, second: (n, d, m), orthonormal columns, zero beyond the ranks. Computed from the part of the larger subspace
    outside the other, so that small changes keep their digits.
    """
    swap = (first_ranks > second_ranks)[:, None, None]
    larger, smaller = np.where(swap, first, second), np.where(swap, second, first)
    with one_thread():  # many small products: more threads would be slower
        outside = larger - np.matmul(smaller, np.matmul(smaller.transpose(0, 2, 1), larger))
        squares = np.linalg.eigvalsh(np.matmul(outside.transpose(0, 2, 1), outside))
    ranks = np.maximum(first_ranks, second_ranks)
    total = np.clip(squares, 0.0, 1.0).sum(axis=1)
    return total / np.maximum(ranks, 1), np.arcsin(np.sqrt(np.clip(squares[:, -1], 0.0, 1.0)))
