"""The rounding floor: how far a head's subspace moves when nothing happens but the storing of its numbers.

A weight W = U·diag(s)·Vᵀ with noise E of independent entries spans, to first order, U turned by
(I − UUᵀ)·E·V·diag(1/s). So noise of variance v_jk in entry jk makes the drift

    1 − PK/m  ≈  (1/m) Σ_i (1/s_i²) Σ_k V_ki² Σ_j c_j v_jk,      c_j = 1 − ‖row j of U‖²,

which for one variance v is (d − m)·v·Σ 1/s_i² / m. Rounding to the nearest number moves an entry uniformly within
half a step to both sides, which has the variance step²/12. Directions that drown in the noise count as at most 1.
The floor stands five standard deviations above that mean, but no higher than twice the mean (in very small weights):
half way, as ratios go, to the drift of noise of twice the size, which is four times as large.

Under latent attention a weight is a product of stored matrices, and each of them moves it (:class:`LatentNoise`).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from headspan.heads import Role
from headspan.models.folding import unfolded
from headspan.models.latent import LatentFactors
from headspan.models.weights import AttentionWeights, Norm
from headspan.system.threads import one_thread

# Bits after the leading one, and the smallest exponent before numbers lose digits.
_MANTISSAS = {
    "float64": (52, -1022),
    "float32": (23, -126),
    "float16": (10, -14),
    "bfloat16": (7, -126),
    "float8_e4m3fn": (3, -200),  # these come with scales, so small exponents are no limit
    "float8_e5m2": (2, -200),
}
# Round-to-nearest formats of GGUF: numbers a block, and the block's range (from its extremes) over one step.
_SYMMETRIC = {"Q8_0": 127.0, "Q5_0": 16.0, "Q4_0": 8.0}
_RANGED = {"Q5_1": 31.0, "Q4_1": 15.0}
_BLOCK = 32
DEVIATIONS = 5.0  # of the floor above the expected drift
ARITHMETIC = 1e-20  # no change either: what the float64 of these very computations leaves of equal weights
# Mean of (step/number)²/12 over numbers whose logarithms are spread evenly, for a mantissa of 0 bits.
_RELATIVE = 0.541 / 12


def rounding_variance(weights: np.ndarray, storage_dtype: str, role: Role) -> np.ndarray | None:
    """Variance of the rounding error of every entry of (n, d, m) weights; None where the format is not known.

    >>> w = np.full((1, 2, 2), 1.5)
    >>> bool(np.allclose(rounding_variance(w, "bfloat16", Role.Q), 2.0**-14 / 12))
    True
    """
    if storage_dtype in _MANTISSAS:
        bits, smallest = _MANTISSAS[storage_dtype]
        exponents = np.frexp(weights)[1] - 1
        steps = np.ldexp(1.0, np.maximum(exponents, smallest) - bits)
        return np.where(weights == 0, 0.0, steps**2 / 12)  # a zero is stored as it is
    if storage_dtype in _SYMMETRIC or storage_dtype in _RANGED:
        return _block_variance(weights, storage_dtype, role)
    return None


def _block_variance(weights: np.ndarray, storage_dtype: str, role: Role) -> np.ndarray | None:
    """A step is a share of the range of its block; blocks run along the rows that a file stores."""
    n, d, m = weights.shape
    rows = weights.transpose(1, 0, 2).reshape(d, n * m) if role is Role.O else weights.transpose(0, 2, 1).reshape(-1, d)
    if rows.shape[1] % _BLOCK:
        return None
    blocks = rows.reshape(len(rows), -1, _BLOCK)
    if storage_dtype in _SYMMETRIC:
        steps = np.abs(blocks).max(axis=2, keepdims=True) / _SYMMETRIC[storage_dtype]
    else:
        steps = np.ptp(blocks, axis=2, keepdims=True) / _RANGED[storage_dtype]
    variance = np.broadcast_to(steps**2 / 12, blocks.shape).reshape(rows.shape)
    return variance.reshape(d, n, m).transpose(1, 0, 2) if role is Role.O else variance.reshape(n, m, d).swapaxes(1, 2)


class PortNoise:
    """What storing does to the weights of one role in one layer of one model, folded or not.

    variance: (n, d, m), of every entry; None where the format is not known.
    rows: (d,), relative variance that whole rows share, from the rounding of folded gains.
    latent: what else is rounded where the weights are products, None where they are stored themselves.
    """

    def __init__(self, weights: AttentionWeights, role: Role, layer: int, read: np.ndarray, dtype: str) -> None:
        raw = unfolded(weights)
        stored = read if raw is weights else raw.read(role, layer)
        factors = raw.latent_factors(role, layer)
        if factors is not None and dtype != raw.storage_dtype(role, layer):
            factors = factors._replace(dtypes=(dtype,) * 3)
        self.latent = None if factors is None else LatentNoise(factors)
        self.variance = rounding_variance(stored, dtype, role) if factors is None else _composed(stored, factors, role)
        self.rows = np.zeros(read.shape[1])
        if raw is weights or self.variance is None:
            return
        # Folding multiplies the rows by gains, whatever norm they come from: the ratio of the rows tells them.
        sizes, folded = (np.square(w, dtype=np.float64).sum(axis=(0, 2)) for w in (stored, read))
        gains = np.divide(folded, sizes, out=np.zeros_like(sizes), where=sizes > 0)
        if self.latent is not None:
            self.latent.fold(gains)
        arithmetic = rounding_variance(read, "float32", role)
        assert arithmetic is not None  # float32 is known
        self.variance = self.variance * gains[:, None] + 2 * arithmetic
        self.rows += _gain_variance(raw.output_norm(layer) if role is Role.O else raw.norm(layer), dtype)


def _composed(weights: np.ndarray, factors: LatentFactors, role: Role) -> np.ndarray | None:
    """Variance of every entry of products: that of float32 sums, and of the rotary key behind them, stored itself."""
    found = rounding_variance(weights, "float32", role)
    assert found is not None  # float32 is known
    found *= len(factors.gains)
    n = len(factors.heads)
    if len(weights) > n:
        stored = rounding_variance(weights[n:], factors.dtypes[0], role)
        if stored is None:
            return None
        found[n:] = stored
    return found


class LatentNoise:
    """What storing does to the matrices that heads behind one latent are products of: W = P·Bᵀ, P = Aᵀ·diag(g).

    To first order W moves by δAᵀ·diag(g)·Bᵀ + P·diag(δg/g)·Bᵀ + P·δBᵀ, three noises of known variance.
    """

    def __init__(self, factors: LatentFactors) -> None:
        gains = factors.gains.astype(np.float64)
        self.inner, self.heads = factors.inner.astype(np.float64), factors.heads.astype(np.float64)
        plain = np.divide(self.inner, gains, out=np.zeros_like(self.inner), where=gains != 0)
        kinds = factors.dtypes
        inner = rounding_variance(plain[None], kinds[0], Role.K)
        heads = rounding_variance(self.heads.transpose(0, 2, 1), kinds[1], Role.K)
        own = rounding_variance(gains[None, :, None], kinds[2], Role.K)
        self.known = inner is not None and heads is not None and own is not None
        if inner is None or heads is None or own is None:
            return
        self.in_inner, self.in_heads = inner[0] * gains**2, heads.transpose(0, 2, 1)
        self.in_gains = np.divide(own[0, :, 0], gains**2, out=np.zeros_like(gains), where=gains != 0)  # relative

    def fold(self, gains: np.ndarray) -> None:
        """Multiply the rows by gains in front, given as squares (d,)."""
        self.inner = self.inner * np.sqrt(gains)[:, None]
        if self.known:
            self.in_inner = self.in_inner * gains[:, None]

    @cached_property
    def products(self) -> np.ndarray:
        """(r, r), of what the latent reads."""
        return self.inner.T @ self.inner


def _gain_variance(norm: Norm | None, dtype: str) -> float:
    """Relative variance of a rounded gain, if the gains look as if they were stored like the weights."""
    if norm is None or dtype not in ("float16", "bfloat16") or (norm.gain == 1).all():
        return 0.0
    import ml_dtypes

    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    alike = any(np.array_equal(gain.astype(kind).astype(np.float32), gain) for gain in (norm.gain, norm.gain - 1))
    return _RELATIVE * 4.0 ** -_MANTISSAS[dtype][0] if alike else 0.0


def rounding_floor(weights: np.ndarray, bases: np.ndarray, ranks: np.ndarray, noises: list[PortNoise]) -> np.ndarray:
    """The drift of every head that is still no change, (n,); NaN where a format is not known.

    weights: (n, d, m) of the first model; bases: (n, d, m), orthonormal columns, zero beyond the rank.
    """
    n, _, m = weights.shape
    latents = [noise.latent for noise in noises if noise.latent is not None]
    if any(noise.variance is None for noise in noises) or not all(latent.known for latent in latents):
        return np.full(n, np.nan)
    variance = sum((noise.variance for noise in noises if noise.variance is not None), np.zeros(weights.shape))
    weights = np.asarray(weights, dtype=np.float64)
    scale = np.abs(weights).max(axis=(1, 2), keepdims=True)
    scale = np.where(scale > 0, scale, 1.0)
    with one_thread():
        squares, turns = np.linalg.eigh(np.matmul(weights.transpose(0, 2, 1) / scale, weights / scale))
    inside = np.square(bases).sum(axis=2)  # (n, d)
    outside = variance / scale**2 * np.clip(1 - inside, 0, 1)[:, :, None]
    kept = np.arange(m)[::-1][None, :] < ranks[:, None]  # eigenvalues come in ascending order
    inverse = np.where(kept, 1 / np.sqrt(np.maximum(squares, np.finfo(float).tiny)), 0.0)
    mixed = turns * inverse[:, None, :]
    with one_thread():
        spread = _spread(mixed, outside.sum(axis=1))
        squared = 2 * np.square(spread).sum(axis=(1, 2)) / _that_count(outside.sum(axis=2))
        if latents:
            for h in range(len(latents[0].heads)):
                more, further = _through_latent(latents, h, inside[h], mixed[h], float(scale[h, 0, 0]))
                spread[h] += more
                squared[h] += further
    shares = np.diagonal(spread, axis1=1, axis2=2)
    expected = (shares / (1 + shares)).sum(axis=1)
    relative = np.sqrt(squared) / np.maximum(shares.sum(axis=1), 1e-300)
    rows = sum(noise.rows for noise in noises) * inside * (1 - inside)
    margin = np.minimum(DEVIATIONS * relative, 1.0)
    floor = expected * (1 + margin) + rows.sum(axis=1) + DEVIATIONS * np.sqrt(2 * (rows**2).sum(axis=1))
    return np.clip(floor / np.maximum(ranks, 1), ARITHMETIC, 1.0)


def _spread(mixed: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Summed covariance of turned rows, (…, m, m), for noise of these variances in the columns of a weight."""
    return np.matmul(np.swapaxes(mixed, -1, -2) * columns[..., None, :], mixed)


def _that_count(rows: np.ndarray) -> np.ndarray:
    """Rows are independent, but few carry most of the noise where a few are large: their effective number, (…)."""
    return np.maximum(np.square(rows.sum(axis=-1)) / np.maximum(np.square(rows).sum(axis=-1), 1e-300), 1)


def _through_latent(
    latents: list[LatentNoise], h: int, inside: np.ndarray, mixed: np.ndarray, scale: float
) -> tuple[np.ndarray, float]:
    """What rounding the factors of one head adds to the summed covariance of its turned rows, and to its variance.

    inside: (d,), the part of each row inside the head's span. mixed: (m, m), V·diag(1/s) of the head over ``scale``.
    """
    inner, m = latents[0].inner, mixed.shape[0]
    heads, in_heads = np.zeros((m, inner.shape[1])), np.zeros((m, inner.shape[1]))
    width = latents[0].heads.shape[1]  # a head may be narrower than what is read: keys beside a wide rotary one
    heads[:width] = latents[0].heads[h] / scale
    in_heads[:width] = sum(latent.in_heads[h] for latent in latents) / scale**2
    turned = heads.T @ mixed  # (r, m)
    products = latents[0].products
    through = turned.T @ products  # (m, r): the head's basis with what the latent reads
    left = products - through.T @ through  # products of what the latent reads outside of the head's span
    outside = np.clip(np.diagonal(left), 0, None)
    rows = np.clip(1 - inside, 0, 1)[:, None] * sum(latent.in_inner for latent in latents)
    in_gains = np.asarray(sum(latent.in_gains for latent in latents))
    made = _spread(turned, rows.sum(axis=0)), _spread(mixed, in_heads @ outside), _spread(turned, in_gains * outside)
    counts = _that_count(rows.sum(axis=1)), max(outside.sum() ** 2 / max(np.square(left).sum(), 1e-300), 1)
    squared = sum(2 * np.square(one).sum() / count for one, count in zip(made[:2], counts, strict=True))
    alike = left * (turned @ turned.T)  # a gain moves a whole column, so there are as many numbers as columns
    squared += 2 * float(in_gains @ np.square(alike) @ in_gains)
    return made[0] + made[1] + made[2], float(squared)
