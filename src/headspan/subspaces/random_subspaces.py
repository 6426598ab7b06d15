"""The Projection Kernel of two uniform random subspaces: its moments, its distribution, and samples."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from headspan.vocabulary.errors import HeadspanError

Approximation = Literal["tight", "loose"]

_HIGH = 0.999  # quantile of the random distribution above which pairs are counted
_SAMPLE_FLOATS = 2**22  # numbers that the samplers draw at once (32 MB)


class Moments(NamedTuple):
    """Mean and variance of the PK of two random subspaces; scalars or arrays, as the dimensions were given."""

    mean: np.ndarray
    variance: np.ndarray

    @property
    def sd(self) -> np.ndarray:
        return np.sqrt(self.variance)


def exact_moments(d: np.ndarray, m: np.ndarray, m2: np.ndarray) -> Moments:
    """The exact moments of :func:`moments`, for valid float64 arrays."""
    # In one dimension PK is constant, and numerator and denominator are both 0.
    return Moments(m * m2 / d, 2 * m * m2 * (d - m) * (d - m2) / (d**2 * np.maximum(d - 1, 1) * (d + 2)))


def moments(d: ArrayLike, m: ArrayLike, m2: ArrayLike | None = None, approximation: Approximation = "tight") -> Moments:
    """Mean and variance of PK for independent uniform m- and m2-dimensional subspaces of R^d (broadcast together).

    ``tight`` is the exact variance, ``loose`` the simpler bound 2·m·m2/d² that treats entries as independent.

    >>> mean, variance = moments(768, 64)
    >>> round(float(mean), 3), round(float(variance), 5)
    (5.333, 0.01166)
    >>> float(moments(5, 5, 2).variance)  # a subspace that fills the space: PK is always 2
    0.0
    """
    d, m = np.asarray(d, dtype=np.float64), np.asarray(m, dtype=np.float64)
    m2 = m if m2 is None else np.asarray(m2, dtype=np.float64)
    if np.any(d < 1) or np.any(m < 0) or np.any(m2 < 0) or np.any(m > d) or np.any(m2 > d):
        seen = (f"{name} from {np.min(x):g} to {np.max(x):g}" for name, x in (("d", d), ("m", m), ("m'", m2)))
        raise HeadspanError(f"random subspaces need 0 ≤ m ≤ d and d ≥ 1, but got {', '.join(seen)}")
    if approximation == "loose":
        return Moments(m * m2 / d, 2 * m * m2 / d**2)
    if approximation != "tight":
        raise HeadspanError(f"unknown approximation {approximation!r}: choose tight or loose")
    return exact_moments(d, m, m2)


class RandomLaw(NamedTuple):
    """The distribution of PK by chance: a beta distribution with shapes a and b between low and high.

    Where low and high are equal, PK is constant.
    """

    low: np.ndarray
    high: np.ndarray
    a: np.ndarray
    b: np.ndarray

    def upper_tail(self, pk: ArrayLike) -> np.ndarray:
        """The probability of a PK at least this large; NaN stays NaN.

        Computed from the distance to the upper end, so that small probabilities keep their digits.
        """
        from scipy.special import betainc

        pk, varies = np.asarray(pk, dtype=np.float64), self.high > self.low
        with np.errstate(invalid="ignore", divide="ignore"):
            left = np.clip((self.high - pk) / (self.high - self.low), 0.0, 1.0)
        return np.where(varies | np.isnan(pk), betainc(self.b, self.a, np.where(varies, left, pk)), 1.0)

    def quantile(self, level: float) -> np.ndarray:
        """The PK exceeded with probability 1 − level."""
        from scipy.special import betaincinv

        varies = self.high > self.low
        left = np.where(varies, betaincinv(self.b, self.a, 1 - level), 0.0)
        return self.high - (self.high - self.low) * left


def random_law(d: ArrayLike, m: ArrayLike, m2: ArrayLike) -> RandomLaw:
    """The distribution of PK for independent uniform m- and m2-dimensional subspaces of R^d (broadcast together).

    A beta distribution that ends at the largest possible PK and has the exact mean, variance and third moment. It is
    exact if one subspace is a line or a hyperplane; docs/statistics.md shows how close it is otherwise.

    >>> law = random_law(768, 1, 64)
    >>> float(law.low), float(law.high), round(float(law.a), 6), round(float(law.b), 6)
    (0.0, 1.0, 32.0, 352.0)
    """
    d, m, m2 = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (d, m, m2)))
    mean, variance = moments(d, m, m2)
    # E[(PK − mean)³]: up to a constant, m(d − m)(d − 2m) is the only cubic polynomial in m that vanishes at 0 and d and
    # changes sign when a subspace is replaced by its complement; the same holds for m'. Lines give the constant.
    third = 8 * m * m2 * (d - m) * (d - m2) * (d - 2 * m) * (d - 2 * m2)
    third = third / (d**3 * np.maximum(d - 1, 1) * np.maximum(d - 2, 1) * (d + 2) * (d + 4))
    high = np.minimum(m, m2)
    room = high - mean
    with np.errstate(divide="ignore", invalid="ignore"):
        width = (4 * variance**2 * room - third * (variance - room**2)) / (2 * variance**2 + room * third)
    return _beta(np.where(variance > 0, high - width, high), high, mean, variance)


def bounded_law(low: ArrayLike, high: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> RandomLaw:
    """The beta distribution on an interval with a given mean and variance."""
    low, high, mean, variance = (np.asarray(x, dtype=np.float64) for x in (low, high, mean, variance))
    possible = (variance > 0) & (variance < (mean - low) * (high - mean))
    return _beta(np.where(possible, low, high), high, mean, variance)


def _beta(low: np.ndarray, high: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> RandomLaw:
    """The shapes from mean and variance; 1 where the ends are equal."""
    varies = high > low
    with np.errstate(divide="ignore", invalid="ignore"):
        strength = (mean - low) * (high - mean) / variance - 1
        a, b = ((part / (high - low)) * strength for part in (mean - low, high - mean))
    return RandomLaw(low, high, np.where(varies, a, 1.0), np.where(varies, b, 1.0))


_WIDE = 2.0**17  # more than any dimension, and small enough for three of them in one float64


def random_quantile(d: ArrayLike, m: ArrayLike, m2: ArrayLike, level: float = _HIGH) -> np.ndarray:
    """The PK that two random subspaces stay below with probability ``level``, by :func:`random_law`.

    >>> round(float(random_quantile(768, 64, 64)), 3)
    5.672
    """
    d, m, m2 = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (d, m, m2)))
    if m.size > 1:  # many pairs share few combinations of dimensions, and the inverse is slow
        _, first, place = np.unique((d * _WIDE + m) * _WIDE + m2, return_index=True, return_inverse=True)
        if first.size < m.size:
            return random_quantile(*(x.ravel()[first] for x in (d, m, m2)), level=level)[place].reshape(m.shape)
    return random_law(d, m, m2).quantile(level)


def entry_density(x: ArrayLike, d: int) -> np.ndarray:
    """Density at x of one entry of a uniform random d×d orthogonal matrix: (1−x²)^((d−3)/2) / B(½, (d−1)/2).

    >>> entry_density([-0.5, 0.0, 0.9], 3)  # a coordinate of a point on the sphere is uniform
    array([0.5, 0.5, 0.5])
    """
    from scipy.special import betaln

    _check_entry_dimension(d)
    x = np.asarray(x, dtype=np.float64)
    inside = np.abs(x) <= 1
    with np.errstate(divide="ignore", invalid="ignore"):
        # 0·log 0 means (1−x²)^0 = 1 at the ends when d = 3.
        power = (d - 3) / 2 * np.log1p(-np.square(np.where(inside, x, 0.0))) if d != 3 else np.zeros_like(x)
    return np.where(inside, np.exp(power - betaln(0.5, (d - 1) / 2)), 0.0)


def squared_entry_density(y: ArrayLike, d: int) -> np.ndarray:
    """Density at y of the square of such an entry: Beta(½, (d−1)/2).

    >>> round(float(squared_entry_density(0.25, 3)), 6)  # of the square of a uniform number
    1.0
    """
    _check_entry_dimension(d)
    y = np.asarray(y, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.sqrt(y)
        return np.where((y >= 0) & (y <= 1), entry_density(root, d) / root, 0.0)


def _check_entry_dimension(d: int) -> None:
    if d < 2:
        raise HeadspanError(f"an entry of a random orthogonal matrix has a density only for d ≥ 2, but d = {d}")


def random_bases(n: int, d: int, m: int, seed: int | np.random.Generator = 0) -> np.ndarray:
    """n uniform orthonormal d×m frames, (n, d, m): QR of Gaussian matrices with a positive diagonal of R.

    Without this sign convention the span would still be uniform, but single entries would not.
    """
    if not 1 <= m <= d or n < 0:
        raise HeadspanError(f"cannot draw {n} frames of {m} vectors in {d} dimensions: need 1 ≤ m ≤ d and n ≥ 0")
    rng = np.random.default_rng(seed)
    q, r = np.linalg.qr(rng.standard_normal((n, d, m)))
    return q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :]


_CURVE_DRAWS = 24


@lru_cache(maxsize=256)
def expected_squares(d: int, m: int, m2: int) -> tuple[float, ...]:
    """The mean cos² of every principal angle of two random subspaces, largest first: a reference curve for angles.

    The curve is not flat: even random subspaces have a closest pair of directions. It is sampled with a fixed seed and
    scaled to the exact sum, m·m'/d.

    >>> squares = expected_squares(60, 6, 4)
    >>> len(squares), squares[0] > 0.2 > 0.05 > squares[-1] > 0, round(sum(squares), 9)
    (4, True, 0.4)
    """
    small, large = min(m, m2), max(m, m2)
    if not small:
        return ()
    # Rotate so that coordinate axes span the larger subspace: only the first rows of the smaller frame matter then.
    frames = random_bases(_CURVE_DRAWS, d, small, seed=0)[:, :large]
    cosines = np.linalg.svd(frames, compute_uv=False)
    squares = np.square(np.minimum(cosines, 1.0)).mean(axis=0)
    return tuple(np.minimum(squares * (m * m2 / d / squares.sum()), 1.0).tolist())


def sample_pk(n: int, d: int, m: int, m2: int | None = None, seed: int | np.random.Generator = 0) -> np.ndarray:
    """n draws of PK between independent uniform m- and m2-dimensional subspaces of R^d.

    PK does not change if both subspaces are rotated together, so the first can be spanned by coordinate axes.

    >>> bool(abs(sample_pk(400, 30, 6, 4).mean() - moments(30, 6, 4).mean) < 0.1)
    True
    """
    m2 = m if m2 is None else m2
    if not 1 <= m <= d:
        raise HeadspanError(f"cannot draw subspaces of dimension {m} in {d} dimensions: need 1 ≤ m ≤ d")
    rng = np.random.default_rng(seed)
    batch = max(1, _SAMPLE_FLOATS // (d * m2))
    draws = [
        np.square(random_bases(min(batch, n - start), d, m2, rng)[:, :m]).sum(axis=(1, 2))
        for start in range(0, n, batch)
    ]
    return np.concatenate(draws) if draws else np.empty(0)
