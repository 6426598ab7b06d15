"""The rounding floor: how far a head's subspace moves when nothing happens but the storing of its numbers.

Where one model is stored in a narrower type than the other, the rounding of these very numbers is known: the numbers of
the other are rounded to that type (gains and latent factors too, before folding and multiplying), and the drift of that
is measured (:meth:`StoredPort.rounded_like`). Otherwise it is expected from the steps of the stored numbers. A weight
W = U·diag(s)·Vᵀ with noise E of independent entries spans, to first order, U turned by (I − UUᵀ)·E·V·diag(1/s). So
noise of variance v_jk in entry jk makes the drift

    1 − PK/m  ≈  (1/m) Σ_i (1/s_i²) Σ_k V_ki² Σ_j c_j v_jk,      c_j = 1 − ‖row j of U‖²,

which for one variance v is (d − m)·v·Σ 1/s_i² / m. Rounding to the nearest number moves an entry uniformly within
half a step to both sides, which has the variance step²/12. Directions that drown in the noise count as at most 1.

The floor is twice the larger of the two: half way, as ratios go, to the drift of noise of twice the size, which is four
times as large. Numbers that lie on a grid already have errors of up to 1.5 times the variance, which this covers too.
Where nothing is measured, small weights may drift farther than twice the mean: there the floor is what a gamma law of
that mean and variance exceeds once in a million weights, if that is more.

Under latent attention a weight is a product of stored matrices, and each of them moves it (:class:`LatentNoise`).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.special import gammainccinv

from headspan.models.families.latent_attention import LatentFactors
from headspan.models.folding import fold, unfolded
from headspan.models.rounded import (
    HeldPort,
    RoundedWeights,
    StoredTypes,
    narrower,
    norm_of,
    rounding_steps,
    stored_types,
)
from headspan.models.weights import AttentionWeights
from headspan.subspaces.bases import orthonormal_bases, span_drift
from headspan.system.threads import one_thread
from headspan.vocabulary.heads import Role

_MARGIN = 2.0  # of the floor over the drift that rounding makes
_RARE = 1e-6  # of weights may drift farther by rounding than their floor, where their own rounding is not known
ARITHMETIC = 1e-20  # no change either: what the float64 of these very computations leaves of equal weights


class StoredPort:
    """The weights of one role in one layer of a model as they are stored, their subspaces, and their noise.

    arithmetic: the numbers were computed in float32 from those they are compared with, not stored (an adapter).
    """

    def __init__(self, weights: AttentionWeights, role: Role, layer: int, arithmetic: bool = False) -> None:
        self.role, self.layer, self.folded = role, layer, unfolded(weights) is not weights
        self.raw = HeldPort(unfolded(weights), role, layer)
        self.read = self._as_compared(self.raw)
        self.types = stored_types(self.raw, role, layer, self.folded)
        self.dtype = narrower(self.raw.storage_dtype(role, layer), self.types.weights, self.types.heads)
        self.bases, self.ranks = orthonormal_bases(self.read, self.dtype)
        self.arithmetic = arithmetic

    def _as_compared(self, raw: AttentionWeights) -> np.ndarray:
        return (fold(raw) if self.folded else raw).read(self.role, self.layer)

    def rounded_like(self, other: StoredPort) -> np.ndarray:
        """The drift of every head when these numbers are rounded to the types of another model's, (n,)."""
        rounded = self._as_compared(RoundedWeights(self.raw, other.types))
        if self.arithmetic or np.array_equal(rounded, self.read):
            return np.zeros(len(self.read))
        return span_drift(self.bases, self.ranks, *orthonormal_bases(rounded, other.dtype))[0]

    def expected(self, other: StoredPort) -> Expected:
        """The drift of every head that rounding these numbers is expected to have made, against another model."""
        return PortNoise(self).expected(self._has_gains_of(other))

    def _has_gains_of(self, other: StoredPort) -> bool:
        """Whether the gains that were folded are the same numbers, so that rounding them moved nothing."""
        first, second = (norm_of(port.raw, port.role, port.layer) for port in (self, other))
        return first is None or second is None or np.array_equal(first.gain, second.gain)


def rounding_floor(first: StoredPort, second: StoredPort, drift: np.ndarray) -> np.ndarray:
    """The drift of every head that is still no change, (n,).

    NaN where a format is not known, unless the drift is no more than rounding one model to the types of the other.
    """
    measured = first.rounded_like(second) + second.rounded_like(first)
    mean, variance = (sum(part) for part in zip(first.expected(second), second.expected(first), strict=True))
    relative = np.clip(variance / np.maximum(mean, 1e-150) ** 2, 1e-12, None)  # of a gamma law: 1 / its shape
    rare = np.where((mean > 0) & (measured == 0), relative * gammainccinv(1 / relative, _RARE), 0.0)
    expected = mean * np.maximum(rare, _MARGIN) / np.maximum(np.maximum(first.ranks, second.ranks), 1)
    floor = np.clip(np.fmax(expected, _MARGIN * measured), ARITHMETIC, 1.0)
    return np.where(np.isnan(expected) & (drift > _MARGIN * measured), np.nan, floor)


class Expected(NamedTuple):
    """Mean and variance of rank times drift, (n,) both; NaN where a format is not known."""

    mean: np.ndarray
    variance: np.ndarray


def _largest(values: np.ndarray) -> float:
    """The largest size of a number, 1 if all are zero."""
    return float(np.abs(values).max(initial=0)) or 1.0


def _variance(steps: np.ndarray) -> np.ndarray:
    return np.square(steps, dtype=np.float64) / 12


class PortNoise:
    """What storing does to the weights of one role in one layer of one model, folded or not.

    All in units of each head's largest entry, so that weights may be as large or small as numbers can be.

    weights: (n, d, m), of the head; scale: (n, 1, 1), its unit.
    variance: (n, d, m), of every entry; None where the format is not known.
    rows: (d,), relative variance that whole rows share, from the rounding of folded gains.
    latent: what else is rounded where the weights are products, None where they are stored themselves.
    """

    def __init__(self, port: StoredPort) -> None:
        self.port, read, role = port, port.read, port.role
        scale = np.abs(read).max(axis=(1, 2), keepdims=True)
        self.scale = np.where(scale > 0, scale, 1.0)
        self.weights = read / self.scale
        stored, factors = port.raw.read(role, port.layer), port.raw.latent_factors(role, port.layer)
        self.rows, gains = np.zeros(read.shape[1]), np.ones(read.shape[1])
        if port.folded:
            gains = _row_gains(stored, port.read)
            self.rows = self._of_gains()
        if factors is None:
            self.latent, steps = None, rounding_steps(stored, "float32" if port.arithmetic else port.dtype, role)
        else:
            kinds = ("float32",) * 3 if port.arithmetic else _kinds(factors, port.types)
            self.latent = LatentNoise(factors, kinds, gains)
            steps = _composed_steps(stored, factors, kinds[0], role)
        self.variance = None
        if steps is not None:
            self.variance = _variance(steps / self.scale * gains[:, None])

    def _of_gains(self) -> np.ndarray:
        """Relative variance of the gains that were folded, (d,)."""
        norm, kind = norm_of(self.port.raw, self.port.role, self.port.layer), self.port.types.gains
        if norm is None or kind is None or self.port.arithmetic:
            return np.zeros(self.port.read.shape[1])
        gain = norm.gain.astype(np.float64)
        steps = rounding_steps((gain - kind.added)[None, :, None], kind.dtype, self.port.role)
        assert steps is not None  # a floating point type
        return _variance(np.divide(steps[0, :, 0], gain, out=np.zeros_like(gain), where=gain != 0))

    def expected(self, same_gains: bool) -> Expected:
        """Of the drift that this noise makes; without that of the gains where both models have the same."""
        bases, ranks = self.port.bases, self.port.ranks
        n, _, m = self.weights.shape
        if self.variance is None or (self.latent is not None and not self.latent.known):
            return Expected(np.full(n, np.nan), np.full(n, np.nan))
        with one_thread():  # of the m×m weights in their own bases, which keeps the digits of small singular values
            _, values, turns = np.linalg.svd(np.matmul(bases.transpose(0, 2, 1), self.weights))
        kept = np.arange(m)[None, :] < ranks[:, None]
        mixed = turns.transpose(0, 2, 1) * np.divide(1, values, out=np.zeros_like(values), where=kept)[:, None, :]
        inside = np.square(bases).sum(axis=2)  # (n, d)
        outside = self.variance * np.clip(1 - inside, 0, 1)[:, :, None]
        with one_thread():
            spread = _spread(mixed, outside.sum(axis=1))
            squared = 2 * np.square(spread).sum(axis=(1, 2)) / _that_count(outside.sum(axis=2))
            if self.latent is not None:
                for h in range(len(self.latent.heads)):
                    more, further = self.latent.spread(h, inside[h], mixed[h], float(self.scale[h, 0, 0]))
                    spread[h] += more
                    squared[h] += further
        shares = np.diagonal(spread, axis1=1, axis2=2)
        mean = (shares / (1 + shares)).sum(axis=1)
        squared *= np.square(mean / np.maximum(shares.sum(axis=1), 1e-300))
        rows = (0 if same_gains else self.rows) * inside * (1 - inside)
        return Expected(mean + rows.sum(axis=1), squared + 2 * np.square(rows).sum(axis=1))


def _row_gains(stored: np.ndarray, folded: np.ndarray) -> np.ndarray:
    """Folding multiplies the rows by gains, whatever norm they come from: the ratio of the rows tells them, (d,)."""
    units = [_largest(weights) for weights in (stored, folded)]
    before, after = (
        np.square(weights / unit, dtype=np.float64).sum(axis=(0, 2))
        for weights, unit in zip((stored, folded), units, strict=True)
    )
    ratios = np.divide(after, before, out=np.zeros_like(before), where=before > 0)
    return np.sqrt(ratios) * (units[1] / units[0])


def _kinds(factors: LatentFactors, types: StoredTypes) -> tuple[str, ...]:
    """How the factors of a latent were rounded: their matrix, what heads make of it, the gains between."""
    found = types.weights, types.heads, types.latent_gains
    return tuple(narrower(declared, kind) for declared, kind in zip(factors.dtypes, found, strict=True))


def _composed_steps(weights: np.ndarray, factors: LatentFactors, kind: str, role: Role) -> np.ndarray | None:
    """Steps of products: those of sums, and of the rotary key behind them, which is stored itself."""
    found = rounding_steps(weights, factors.heads.dtype.name, role)
    assert found is not None  # a floating point type
    found *= np.sqrt(len(factors.gains))
    n = len(factors.heads)
    if len(weights) > n:
        stored = rounding_steps(weights[n:], kind, role)
        if stored is None:
            return None
        found[n:] = stored
    return found


class LatentNoise:
    """What storing does to the matrices that heads behind one latent are products of: W = P·Bᵀ, P = Aᵀ·diag(g).

    To first order W moves by δAᵀ·diag(g)·Bᵀ + P·diag(δg/g)·Bᵀ + P·δBᵀ, three noises of known variance.

    kinds: how A, B and g were rounded. in_front: (d,), gains that were folded into P.
    """

    def __init__(self, factors: LatentFactors, kinds: tuple[str, ...], in_front: np.ndarray) -> None:
        gains, stored = factors.gains.astype(np.float64), factors.stored.astype(np.float64)
        self.heads = factors.heads.astype(np.float64)
        inner = rounding_steps(stored[None], kinds[0], Role.K)
        heads = rounding_steps(self.heads.transpose(0, 2, 1), kinds[1], Role.K)
        own = rounding_steps(gains[None, :, None], kinds[2], Role.K)
        self.known = inner is not None and heads is not None and own is not None
        if inner is None or heads is None or own is None:
            return
        through = gains * factors.factor * in_front[:, None]
        unit = _largest(stored * through)
        self.unit, self.inner, self.in_inner = unit, stored * through / unit, _variance(inner[0] * through / unit)
        self.head_steps = heads.transpose(0, 2, 1)
        self.in_gains = _variance(np.divide(own[0, :, 0], gains, out=np.zeros_like(gains), where=gains != 0))

    @cached_property
    def products(self) -> np.ndarray:
        """(r, r), of what the latent reads."""
        return self.inner.T @ self.inner

    def spread(self, h: int, inside: np.ndarray, mixed: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
        """What rounding the factors of one head adds to the summed covariance of its turned rows, and to its variance.

        inside: (d,), the part of each row inside the head's span. mixed: (m, m), V·diag(1/s) of the head, over
        ``scale``.
        """
        m, r = mixed.shape[0], self.inner.shape[1]
        heads, in_heads = np.zeros((m, r)), np.zeros((m, r))
        width = self.heads.shape[1]  # a head may be narrower than what is read: keys beside a wide rotary one
        heads[:width] = self.heads[h] * self.unit / scale
        in_heads[:width] = _variance(self.head_steps[h] * self.unit / scale)
        turned = heads.T @ mixed  # (r, m)
        through = turned.T @ self.products  # (m, r): the head's basis with what the latent reads
        left = self.products - through.T @ through  # products of what the latent reads outside of the head's span
        outside = np.clip(np.diagonal(left), 0, None)
        rows = np.clip(1 - inside, 0, 1)[:, None] * self.in_inner
        in_gains = self.in_gains
        made = (
            _spread(turned, rows.sum(axis=0)),
            _spread(mixed, in_heads @ outside),
            _spread(turned, in_gains * outside),
        )
        counts = _that_count(rows.sum(axis=1)), max(outside.sum() ** 2 / max(np.square(left).sum(), 1e-300), 1)
        squared = sum(2 * np.square(one).sum() / count for one, count in zip(made[:2], counts, strict=True))
        alike = left * (turned @ turned.T)  # a gain moves a whole column, so there are as many numbers as columns
        squared += 2 * float(in_gains @ np.square(alike) @ in_gains)
        return made[0] + made[1] + made[2], float(squared)


def _spread(mixed: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Summed covariance of turned rows, (…, m, m), for noise of these variances in the columns of a weight."""
    return np.matmul(np.swapaxes(mixed, -1, -2) * columns[..., None, :], mixed)


def _that_count(rows: np.ndarray) -> np.ndarray:
    """Rows are independent, but few carry most of the noise where a few are large: their effective number, (…)."""
    return np.maximum(np.square(rows.sum(axis=-1)) / np.maximum(np.square(rows).sum(axis=-1), 1e-300), 1)
