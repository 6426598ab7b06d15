"""Gaussian sketches of subspaces, and exact bounds on the Projection Kernel of two subspaces from their sketches.

With S of d×s, entries N(0, 1/s), one side becomes Q_A = orth(SᵀU_A) and the other G_B = SᵀU_B. T = ‖Q_AᵀG_B‖_F² costs
s² operations per pair instead of d², and its distribution is known (with dimensions m and m', and cosines c_j of the
angles, 0 beyond min(m, m')):

    E[T] = PK·(1 − m/s) + m·m'/s
    E exp(−λsT) = (1+2λ)^(−s·m'/2) · Π_j (1+2λ(1−c_j²))^((s−m)/2)        j = 1 … m'

(Given SᵀU_A, the columns of Q_AᵀG_B are normal around c_j·R·v_j with variances 1−c_j², and RᵀR is a Wishart matrix.)
For a given PK the product is largest for equal cosines, because log(1+2λ(1−x)) is concave. By Chernoff's bound, a pair
of at least this PK has T ≤ t with probability at most exp(λst)·E exp(−λsT), for every λ.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from headspan.subspaces.bases import (
    clear_ranks,
    float64_copy,
    largest,
    orthonormal_bases,
    parts,
    power_of_two,
    well_conditioned,
)
from headspan.system.threads import one_thread

_LAMBDAS = np.geomspace(1e-4, 1e3, 400)
_GRID = 1024  # steps of PK in the table of thresholds


def gaussian_sketch(d: int, size: int, seed: int) -> np.ndarray:
    """Sᵀ, (s, d) float32."""
    return np.random.default_rng(seed).standard_normal((size, d), dtype=np.float32) / np.float32(np.sqrt(size))


def sketched_bases(weights: np.ndarray, sketch: np.ndarray, storage_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """SᵀU for the bases U of many (d, m) weights, without computing U where that is safe, and their ranks.

    sketch: Sᵀ, (s, d) float32. (n, s, m) float32 and (n,); columns beyond a head's rank are zero.
    """
    n, d, m = weights.shape
    inverse, ranks = np.zeros((n, m, m), np.float32), np.full(n, -1, np.int32)
    narrow, scale = _sketched(weights, sketch)
    for heads in parts(n, d * m):
        good, found = well_conditioned(float64_copy(weights[heads]), storage_dtype)
        if found is not None:
            with np.errstate(all="ignore"):  # ill-conditioned heads are replaced below
                inverse[heads] = found * scale[heads]
            ranks[heads][good] = m
    with one_thread(), np.errstate(all="ignore"):
        made = np.matmul(inverse, narrow.transpose(0, 2, 1)).transpose(0, 2, 1)
    return _with_careful(made, ranks, weights, sketch, storage_dtype)


def sketched_spans(weights: np.ndarray, sketch: np.ndarray, storage_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Like :func:`sketched_bases`, for any basis of each span: the weight itself if it is well conditioned.

    A float32 product has errors of 1e-7 relative to a head's strongest direction. Weaker directions, and overlaps along
    them, would be lost, so ill-conditioned heads are orthonormalised first.
    """
    ranks = clear_ranks(weights, storage_dtype)
    return _with_careful(_sketched(weights, sketch)[0], ranks, weights, sketch, storage_dtype)


def _with_careful(
    made: np.ndarray, ranks: np.ndarray, weights: np.ndarray, sketch: np.ndarray, storage_dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Sketches and ranks; heads whose rank is still unknown (−1) are sketched from orthonormal bases."""
    made = made[:, :, : min(weights.shape[1:])]
    left = np.flatnonzero(ranks < 0)
    if len(left):
        bases, ranks[left] = orthonormal_bases(weights[left], storage_dtype, np.float32)
        made[left] = _product(sketch, bases[:, :, : made.shape[2]])
    return made, ranks


def _sketched(weights: np.ndarray, sketch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SᵀW in float32 for weights divided by a power of two, and that power, (n, 1, 1): 1 for ordinary sizes."""
    size = largest(weights)
    usual = (size > 1e-15) & (size < 1e15)
    scale = np.where(usual, 1.0, power_of_two(size))
    own = weights if usual.all() else np.divide(weights, scale)
    return _product(sketch, own.astype(np.float32, copy=False)), scale


def _product(sketch: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """SᵀW of all heads in one product, (n, s, m), with contiguous columns."""
    n, d, m = weights.shape
    with one_thread():
        if weights.strides[1] < weights.strides[2]:
            made = (weights.transpose(0, 2, 1).reshape(n * m, d) @ sketch.T).reshape(n, m, -1)
        else:  # a tensor stored with d rows is reshaped without a copy
            made = (sketch @ weights.transpose(1, 0, 2).reshape(d, n * m)).reshape(-1, n, m).transpose(1, 2, 0)
    return np.ascontiguousarray(made).transpose(0, 2, 1)


def log_laplace(rate: np.ndarray | float, pk: np.ndarray | float, m: int, m2: int, s: int) -> np.ndarray:
    """The largest log E exp(−λsT), λ = ``rate``, over all pairs of this PK: the value for equal cosines."""
    r = min(m, m2)
    aligned = np.log1p(2 * np.asarray(rate) * (1 - np.minimum(np.asarray(pk) / r, 1.0)))
    plain = np.log1p(2 * np.asarray(rate))
    return -s * m2 / 2 * plain + (s - m) / 2 * (r * aligned + (m2 - r) * plain)


def threshold(pk: np.ndarray | float, probability: float, m: int, m2: int, s: int) -> np.ndarray:
    """A T that a pair of at least this PK stays below with at most this probability; it increases with PK.

    >>> bool(threshold(100.0, 1e-4, 128, 128, 384) > threshold(50.0, 1e-4, 128, 128, 384) > 0)
    True
    """
    pk = np.asarray(pk, dtype=np.float64)[..., None]
    bounds = (np.log(probability) - log_laplace(_LAMBDAS, pk, m, m2, s)) / (_LAMBDAS * s)
    return np.maximum(bounds.max(axis=-1), 0.0)  # every λ gives a valid bound; take the best of many


def upper_bounds(t: np.ndarray, probability: float, m: int, m2: int, s: int) -> np.ndarray:
    """An upper bound on the PK of a pair with this T, which fails with at most this probability.

    >>> bool(upper_bounds(np.array([50.0]), 1e-4, 128, 128, 384)[0] > estimates(50.0, 128, 128, 384))
    True
    """
    grid, thresholds = _table(probability, m, m2, s)
    return grid[np.minimum(np.searchsorted(thresholds, t, side="right"), _GRID)]


@lru_cache(maxsize=64)
def _table(probability: float, m: int, m2: int, s: int) -> tuple[np.ndarray, np.ndarray]:
    """A grid of PK values and their thresholds, cached because every pairing of a model uses the same."""
    grid = np.linspace(0.0, min(m, m2), _GRID + 1)
    return grid, threshold(grid, probability, m, m2, s)


def estimates(t: np.ndarray | float, m: int, m2: int, s: int) -> np.ndarray:
    """Unbiased estimates of PK from T."""
    return (np.asarray(t) - m * m2 / s) / (1 - m / s)
