"""What a Gaussian sketch of two subspaces says about their Projection Kernel, exactly.

With S of d×s, entries N(0, 1/s), one side becomes Q_A = orth(SᵀU_A) and the other G_B = SᵀU_B. T = ‖Q_AᵀG_B‖_F² costs
s² operations a pair instead of d², and its law is known (m, m' the dimensions, c_j the cosines of the angles, 0 beyond
min(m, m')):

    E[T] = PK·(1 − m/s) + m·m'/s
    E exp(−λsT) = (1+2λ)^(−s·m'/2) · Π_j (1+2λ(1−c_j²))^((s−m)/2)        j = 1 … m'

(Given SᵀU_A, the columns of Q_AᵀG_B are normal around c_j·R·v_j with variances 1−c_j², and RᵀR is a Wishart matrix.)
The product is largest, at a given PK, for equal cosines, because log(1+2λ(1−x)) is concave. By Chernoff's bound a pair
of at least this PK has T ≤ t with a probability of at most exp(λst)·E exp(−λsT), for every λ.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_LAMBDAS = np.geomspace(1e-4, 1e3, 400)
_GRID = 1024  # steps of PK in the table of thresholds


def gaussian_sketch(d: int, size: int, seed: int) -> np.ndarray:
    """Sᵀ, (s, d) float32."""
    return np.random.default_rng(seed).standard_normal((size, d), dtype=np.float32) / np.float32(np.sqrt(size))


def log_laplace(rate: np.ndarray | float, pk: np.ndarray | float, m: int, m2: int, s: int) -> np.ndarray:
    """log E exp(−λsT) for λ = ``rate``, at most, over all pairs of this PK: that of equal cosines."""
    r = min(m, m2)
    aligned = np.log1p(2 * np.asarray(rate) * (1 - np.minimum(np.asarray(pk) / r, 1.0)))
    plain = np.log1p(2 * np.asarray(rate))
    return -s * m2 / 2 * plain + (s - m) / 2 * (r * aligned + (m2 - r) * plain)


def threshold(pk: np.ndarray | float, probability: float, m: int, m2: int, s: int) -> np.ndarray:
    """A T that a pair of at least this PK stays below with at most this probability; it rises with PK.

    >>> bool(threshold(100.0, 1e-4, 128, 128, 384) > threshold(50.0, 1e-4, 128, 128, 384) > 0)
    True
    """
    pk = np.asarray(pk, dtype=np.float64)[..., None]
    bounds = (np.log(probability) - log_laplace(_LAMBDAS, pk, m, m2, s)) / (_LAMBDAS * s)
    return np.maximum(bounds.max(axis=-1), 0.0)  # every λ gives a valid bound: the best of many


def upper_bounds(t: np.ndarray, probability: float, m: int, m2: int, s: int) -> np.ndarray:
    """A PK that a pair with this T stays below, but for this probability.

    >>> bool(upper_bounds(np.array([50.0]), 1e-4, 128, 128, 384)[0] > estimates(50.0, 128, 128, 384))
    True
    """
    grid, thresholds = _table(probability, m, m2, s)
    return grid[np.minimum(np.searchsorted(thresholds, t, side="right"), _GRID)]


@lru_cache(maxsize=64)
def _table(probability: float, m: int, m2: int, s: int) -> tuple[np.ndarray, np.ndarray]:
    """PK in steps, and its thresholds: every pairing of a model asks for the same ones."""
    grid = np.linspace(0.0, min(m, m2), _GRID + 1)
    return grid, threshold(grid, probability, m, m2, s)


def estimates(t: np.ndarray | float, m: int, m2: int, s: int) -> np.ndarray:
    """PK from T, without bias."""
    return (np.asarray(t) - m * m2 / s) / (1 - m / s)
