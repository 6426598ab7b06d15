"""The rounding floor: how far a head's subspace moves when nothing happens but the storing of its numbers.

A weight W = U·diag(s)·Vᵀ with noise E of independent entries spans, to first order, U turned by
(I − UUᵀ)·E·V·diag(1/s). So noise of variance v_jk in entry jk makes the drift

    1 − PK/m  ≈  (1/m) Σ_i (1/s_i²) Σ_k V_ki² Σ_j c_j v_jk,      c_j = 1 − ‖row j of U‖²,

which for one variance v is (d − m)·v·Σ 1/s_i² / m. Rounding to the nearest number moves an entry uniformly within
half a step to both sides, which has the variance step²/12. Directions that drown in the noise count as at most 1.
The floor stands five standard deviations above that mean, but no higher than twice the mean (in very small weights):
half way, as ratios go, to the drift of noise of twice the size, which is four times as large.
"""

from __future__ import annotations

import numpy as np

from headspan.heads import Role
from headspan.models.weights import AttentionWeights
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
    """

    def __init__(self, weights: AttentionWeights, role: Role, layer: int, read: np.ndarray, dtype: str) -> None:
        raw = getattr(weights, "unfolded", None)
        stored = read if raw is None else raw.read(role, layer)
        self.variance = rounding_variance(stored, dtype, role)
        self.rows = np.zeros(read.shape[1])
        if raw is None or self.variance is None:
            return
        # Folding multiplies the rows by gains, whatever norm they come from: the ratio of the rows tells them.
        sizes, folded = (np.square(w, dtype=np.float64).sum(axis=(0, 2)) for w in (stored, read))
        gains = np.divide(folded, sizes, out=np.zeros_like(sizes), where=sizes > 0)
        arithmetic = rounding_variance(read, "float32", role)
        assert arithmetic is not None  # float32 is known
        self.variance = self.variance * gains[:, None] + 2 * arithmetic
        if role is not Role.O or weights.norm_place in ("output", "sandwich"):
            self.rows += _gain_variance(raw, layer, dtype)


def _gain_variance(weights: AttentionWeights, layer: int, dtype: str) -> float:
    """Relative variance of a rounded gain, if the gains look as if they were stored like the weights."""
    norm = weights.norm(layer)
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
    if any(noise.variance is None for noise in noises):
        return np.full(n, np.nan)
    variance = sum((noise.variance for noise in noises if noise.variance is not None), np.zeros(weights.shape))
    weights = np.asarray(weights, dtype=np.float64)
    scale = np.abs(weights).max(axis=(1, 2), keepdims=True)
    scale = np.where(scale > 0, scale, 1.0)
    with one_thread():
        squares, turns = np.linalg.eigh(np.matmul(weights.transpose(0, 2, 1) / scale, weights / scale))
    inside = np.square(bases).sum(axis=2)  # (n, d)
    outside = variance / scale**2 * np.clip(1 - inside, 0, 1)[:, :, None]
    columns, per_row = outside.sum(axis=1), outside.sum(axis=2)
    # Rows are independent, but few of them carry most of the noise where a few rows are large: their effective number.
    rows_that_count = np.square(per_row.sum(axis=1)) / np.maximum(np.square(per_row).sum(axis=1), 1e-300)
    kept = np.arange(m)[::-1][None, :] < ranks[:, None]  # eigenvalues come in ascending order
    inverse = np.where(kept, 1 / np.sqrt(np.maximum(squares, np.finfo(float).tiny)), 0.0)
    mixed = turns * inverse[:, None, :]
    with one_thread():
        spread = np.matmul(mixed.transpose(0, 2, 1) * columns[:, None, :], mixed)  # summed covariance of turned rows
    shares = np.diagonal(spread, axis1=1, axis2=2)
    expected = (shares / (1 + shares)).sum(axis=1)
    deviation = np.sqrt(2 * np.square(spread).sum(axis=(1, 2)) / np.maximum(rows_that_count, 1))
    relative = deviation / np.maximum(shares.sum(axis=1), 1e-300)
    rows = sum(noise.rows for noise in noises) * inside * (1 - inside)
    margin = np.minimum(DEVIATIONS * relative, 1.0)
    floor = expected * (1 + margin) + rows.sum(axis=1) + DEVIATIONS * np.sqrt(2 * (rows**2).sum(axis=1))
    return np.clip(floor / np.maximum(ranks, 1), ARITHMETIC, 1.0)
