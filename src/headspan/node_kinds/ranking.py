"""By what nodes and ports are ranked: chance among nodes of the same kind, chance of a random direction, or the share.

>>> kind_p(np.array([0.1, 0.2, 0.3], np.float32), np.array([0.25]), np.array([False]), fewest=1)
array([0.5])
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from headspan.subspaces.random_subspaces import moments, random_law

Sort = Literal["p_kind", "p", "share"]
FEWEST_OTHERS = 19  # with fewer, p cannot be as small as 1/20
_STEP = 1e5  # more than 1/p_kind, so that equal p_kind is ordered by share, and never the other way round


def random_p(share: ArrayLike, d: ArrayLike, m: ArrayLike, r: ArrayLike = 1) -> np.ndarray:
    """The probability that a random r-dimensional subspace has at least this share in one of m dimensions, both in R^d.

    >>> random_p([64 / 768, 1.0], 768, 64).round(2)
    array([0.48, 0.  ])
    """
    dimension = np.minimum(np.asarray(r, dtype=np.float64), d)
    return random_law(d, np.minimum(m, d), dimension).upper_tail(np.asarray(share, dtype=np.float64) * dimension)


def random_z(pk: ArrayLike, d: ArrayLike, m: ArrayLike, r: ArrayLike) -> np.ndarray:
    """z of a PK against random subspaces of m and r dimensions; NaN if PK cannot vary."""
    mean, variance = moments(d, np.minimum(m, d), np.minimum(r, d))
    spread = np.sqrt(np.where(variance > 0, variance, np.nan))
    return (np.asarray(pk, dtype=np.float64) - mean) / spread


def kind_p(null: np.ndarray, shares: np.ndarray, itself: np.ndarray, fewest: int = FEWEST_OTHERS) -> np.ndarray:
    """(1 + others with at least this share)/(1 + others) in one port; NaN with too few others.

    null: the shares of other nodes, ascending, NaN last. itself: whether a node is one of these others.
    """
    real = null[: int(np.count_nonzero(~np.isnan(null)))]
    # Tolerate rounding in the last digit, so that equal shares count as equal.
    as_large = len(real) - np.searchsorted(real, shares.astype(np.float32) * np.float32(1 - 1e-6))
    count = len(real) - itself
    p = (1 + np.maximum(0, as_large - itself)) / (1 + count)
    return np.where(count >= fewest, p, np.nan)


def keys_by_kind(shares: np.ndarray, nulls: np.ndarray, itself: np.ndarray) -> np.ndarray:
    """Larger for a smaller p_kind, and for a larger share where it is equal; by share, last, where it is unknown.

    shares: (nodes, ports), negative for pairs that are not compared. nulls: (ports, others), fewer ports if the last
    ones have none.
    """
    p = np.full(shares.shape, np.nan)
    for port, null in enumerate(nulls):
        p[:, port] = kind_p(null, shares[:, port], itself)
    return np.where(np.isnan(p) | (shares < 0), shares, _STEP * (2 - p) + shares)


def keys_by_p(shares: np.ndarray, d: np.ndarray, m: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Larger for a smaller p of a random direction, and for a larger share where p is equal."""
    p = random_p(np.maximum(shares, 0), d, m, np.maximum(r, 1)[:, None])
    return np.where(shares < 0, shares, -np.log(np.maximum(p, np.finfo(np.float64).tiny)) + 1e-9 * shares)
