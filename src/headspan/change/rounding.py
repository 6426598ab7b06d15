"""The rounding floor: how far a head's subspace moves only because its numbers were stored.

If one model is stored in a narrower type than the other, the effect of rounding can be measured: the numbers of the
other are rounded to that type (gains and latent factors too, before folding and multiplying), and the drift is computed
(:meth:`StoredPort.rounded_like`). Otherwise it is estimated from the spacing of the stored numbers. To first order,
noise E with independent entries rotates the span of a weight W = U·diag(s)·Vᵀ by (I − UUᵀ)·E·V·diag(1/s). Noise of
variance v_jk in entry jk therefore causes the drift

    1 − PK/m  ≈  (1/m) Σ_i (1/s_i²) Σ_k V_ki² Σ_j c_j v_jk,      c_j = 1 − ‖row j of U‖²,

which for a common variance v is (d − m)·v·Σ 1/s_i² / m. Rounding to the nearest number moves an entry uniformly within
half a step in either direction, which has the variance step²/12. Directions lost in the noise count as at most 1.

The floor is twice the larger of the two. Noise of twice the size would cause four times the drift, so a factor of two
is the geometric middle. Numbers that already lie on a grid have errors of up to 1.5 times the variance, which this also
covers. If the drift is estimated rather than measured, small weights may drift by more than twice the mean; the floor
is then at least the value that a gamma distribution of that mean and variance exceeds once in a million weights.

Under latent attention a weight is a product of stored matrices, and the rounding of each moves it
(:class:`LatentNoise`).
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

_MARGIN = 2.0  # ratio of the floor to the drift caused by rounding
_RARE = 1e-6  # share of weights that may exceed their floor by rounding, if their rounding is estimated
ARITHMETIC = 1e-20  # drift of equal weights due to float64 arithmetic, which also counts as no change


class StoredPort:
    """The stored weights of one role in one layer of a model, their subspaces, and their noise.

    arithmetic: the numbers were computed in float32 from the other model's, not stored (an adapter).
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
        """The drift of every head if these numbers are rounded to the types of another model, (n,)."""
        rounded = self._as_compared(RoundedWeights(self.raw, other.types))
        if self.arithmetic or np.array_equal(rounded, self.read):
            return np.zeros(len(self.read))
        return span_drift(self.bases, self.ranks, *orthonormal_bases(rounded, other.dtype))[0]

    def expected(self, other: StoredPort) -> Expected:
        """The estimated drift of every head caused by rounding these numbers, relative to another model."""
        return PortNoise(self).expected(self._has_gains_of(other))

    def _has_gains_of(self, other: StoredPort) -> bool:
        """Whether no gains are folded in, or equal ones in both models, so that rounding them causes no drift."""
        if not self.folded:
            return True
        first, second = (norm_of(port.raw, port.role, port.layer) for port in (self, other))
        return first is None or second is None or np.array_equal(first.gain, second.gain)


def rounding_floor(first: StoredPort, second: StoredPort, drift: np.ndarray) -> np.ndarray:
    """The largest drift of every head that does not count as a change, (n,).

    NaN if a format is unknown, unless the drift is within that of rounding one model to the types of the other.
    """
    measured = first.rounded_like(second) + second.rounded_like(first)
    mean, variance = (sum(part) for part in zip(first.expected(second), second.expected(first), strict=True))
    relative = np.clip(variance / np.maximum(mean, 1e-150) ** 2, 1e-12, None)  # 1 / shape of the gamma distribution
    rare = np.where((mean > 0) & (measured == 0), relative * gammainccinv(1 / relative, _RARE), 0.0)
    expected = mean * np.maximum(rare, _MARGIN) / np.maximum(np.maximum(first.ranks, second.ranks), 1)
    floor = np.clip(np.fmax(expected, _MARGIN * measured), ARITHMETIC, 1.0)
    return np.where(np.isnan(expected) & (drift > _MARGIN * measured), np.nan, floor)


class Expected(NamedTuple):
    """Mean and variance of rank times drift, (n,) both; NaN if a format is unknown."""

    mean: np.ndarray
    variance: np.ndarray


def _largest(values: np.ndarray) -> float:
    """The largest absolute value, or 1 if all are zero."""
    return float(np.abs(values).max(initial=0)) or 1.0


def _variance(steps: np.ndarray) -> np.ndarray:
    return np.square(steps, dtype=np.float64) / 12


class PortNoise:
    """The rounding noise in the weights of one role in one layer of one model, folded or not.

    Everything is in units of each head's largest entry, so that weights of any magnitude work.

    weights: (n, d, m), of the head; scale: (n, 1, 1), its unit.
    variance: (n, d, m), of every entry; None if the format is unknown.
    rows: (d,), relative variance shared by whole rows, from the rounding of folded gains.
    latent: further noise if the weights are products; None if they are stored directly.
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
        """Relative variance of the folded gains, (d,)."""
        norm, kind = norm_of(self.port.raw, self.port.role, self.port.layer), self.port.types.gains
        if norm is None or kind is None or self.port.arithmetic:
            return np.zeros(self.port.read.shape[1])
        gain = norm.gain.astype(np.float64)
        steps = rounding_steps((gain - kind.added)[None, :, None], kind.dtype, self.port.role)
        assert steps is not None  # a floating point type
        return _variance(np.divide(steps[0, :, 0], gain, out=np.zeros_like(gain), where=gain != 0))

    def expected(self, same_gains: bool) -> Expected:
        """The expected drift from this noise, without that of the gains if both models have the same gains."""
        bases, ranks = self.port.bases, self.port.ranks
        n, _, m = self.weights.shape
        if self.variance is None or (self.latent is not None and not self.latent.known):
            return Expected(np.full(n, np.nan), np.full(n, np.nan))
        with one_thread():  # on the m×m weights in their own bases, to keep the digits of small singular values
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
    """The gains by which folding multiplied the rows, from the ratio of the rows, (d,)."""
    units = [_largest(weights) for weights in (stored, folded)]
    before, after = (
        np.square(weights / unit, dtype=np.float64).sum(axis=(0, 2))
        for weights, unit in zip((stored, folded), units, strict=True)
    )
    ratios = np.divide(after, before, out=np.zeros_like(before), where=before > 0)
    return np.sqrt(ratios) * (units[1] / units[0])


def _kinds(factors: LatentFactors, types: StoredTypes) -> tuple[str, ...]:
    """The types to which the factors of a latent were rounded: the map into it, the map to heads, the gains."""
    found = types.weights, types.heads, types.latent_gains
    return tuple(narrower(declared, kind) for declared, kind in zip(factors.dtypes, found, strict=True))


def _composed_steps(weights: np.ndarray, factors: LatentFactors, kind: str, role: Role) -> np.ndarray | None:
    """Steps of composed weights: those of sums, then those of the rotary key, which is stored directly."""
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
    """The rounding noise of the matrices whose products are the heads of one latent: W = P·Bᵀ, P = Aᵀ·diag(g).

    To first order W changes by δAᵀ·diag(g)·Bᵀ + P·diag(δg/g)·Bᵀ + P·δBᵀ, three noise terms of known variance.

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
        """(r, r): the Gram matrix of the map into the latent."""
        return self.inner.T @ self.inner

    def spread(self, h: int, inside: np.ndarray, mixed: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
        """How one head's rounded factors add to the summed covariance of its rotated rows, and to its variance.

        inside: (d,), the part of each row inside the head's span. mixed: (m, m), V·diag(1/s) of the head, over
        ``scale``.
        """
        m, r = mixed.shape[0], self.inner.shape[1]
        heads, in_heads = np.zeros((m, r)), np.zeros((m, r))
        width = self.heads.shape[1]  # a head may be narrower than the array: keys with a wide rotary key
        heads[:width] = self.heads[h] * self.unit / scale
        in_heads[:width] = _variance(self.head_steps[h] * self.unit / scale)
        turned = heads.T @ mixed  # (r, m)
        through = turned.T @ self.products  # (m, r): the head's basis times the map into the latent
        left = self.products - through.T @ through  # the part of the Gram matrix outside the head's span
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
        alike = left * (turned @ turned.T)  # one gain affects a whole column, so there are r independent numbers
        squared += 2 * float(in_gains @ np.square(alike) @ in_gains)
        return made[0] + made[1] + made[2], float(squared)


def _spread(mixed: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Summed covariance of rotated rows, (…, m, m), for noise of these variances in the columns of a weight."""
    return np.matmul(np.swapaxes(mixed, -1, -2) * columns[..., None, :], mixed)


def _that_count(rows: np.ndarray) -> np.ndarray:
    """The effective number of independent rows, (…); a few large rows may hold most of the noise."""
    return np.maximum(np.square(rows.sum(axis=-1)) / np.maximum(np.square(rows).sum(axis=-1), 1e-300), 1)
