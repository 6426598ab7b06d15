"""Number types: the narrowest type that holds a tensor exactly, and weights rounded to a narrower type.

The declared type of a file may not be the type to which its numbers were rounded: bfloat16 numbers are often stored as
float32. Each tensor is therefore checked for a narrower type that holds all its numbers.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import ml_dtypes
import numpy as np

from headspan.models.families.latent_attention import LatentFactors
from headspan.models.weights import AttentionWeights, Norm
from headspan.models.wrapped import WrappedWeights
from headspan.vocabulary.heads import Role

# Mantissa bits, and the smallest exponent of a normal number.
MANTISSAS = {
    "float8_e5m2": (2, -14),
    "float8_e4m3fn": (3, -6),
    "bfloat16": (7, -126),
    "float16": (10, -14),
    "float32": (23, -126),
    "float64": (52, -1022),
}
_KINDS = {
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}  # narrowest first
# Round-to-nearest formats of GGUF: numbers per block, and the block's range (from its extremes) over one step.
_SYMMETRIC = {"Q8_0": 127.0, "Q5_0": 16.0, "Q4_0": 8.0}
_RANGED = {"Q5_1": 31.0, "Q4_1": 15.0}
_BLOCK = 32
_SAMPLE = 4096  # numbers checked first, before checking all
_MANTISSAS_SEEN = 4  # with fewer distinct mantissas (small integers, powers of two) rounding cannot be seen


def narrowest(values: np.ndarray) -> str:
    """The narrowest floating point type that holds every number exactly.

    >>> w = np.random.default_rng(0).normal(size=100)
    >>> narrowest(w), narrowest(w.astype(ml_dtypes.bfloat16).astype(np.float32)), narrowest(np.eye(9))
    ('float64', 'bfloat16', 'float32')
    """
    flat = np.asarray(values).ravel()
    sample = flat[:: max(1, flat.size // _SAMPLE)]
    various = np.unique(np.abs(np.frexp(sample[sample != 0])[0])).size >= _MANTISSAS_SEEN
    for name in _KINDS:
        wide = name in ("float32", "float64")
        if (various or wide) and all(np.array_equal(round_to(part, name), part) for part in (sample, flat)):
            return name
    return "float64"


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to a type but kept in their own dtype; values out of range become the largest number."""
    kind = _KINDS[dtype]
    largest = float(ml_dtypes.finfo(kind).max)
    with np.errstate(over="ignore", under="ignore"):
        return np.clip(values, -largest, largest).astype(kind).astype(values.dtype)


def rounding_steps(weights: np.ndarray, storage_dtype: str, role: Role) -> np.ndarray | None:
    """Spacing of the storable numbers around each entry of (n, d, m) weights; None for unknown formats.

    >>> w = np.full((1, 2, 2), 1.5)
    >>> bool((rounding_steps(w, "bfloat16", Role.Q) == 2.0**-7).all())
    True
    """
    if storage_dtype in MANTISSAS:
        bits, smallest = MANTISSAS[storage_dtype]
        if storage_dtype.startswith("float8") and not np.array_equal(round_to(weights, storage_dtype), weights):
            smallest = -200  # these types come with scales, so small exponents do not limit them
        exponents = np.frexp(weights)[1] - 1
        steps = np.ldexp(1.0, np.maximum(exponents, smallest) - bits)
        return np.where(weights == 0, 0.0, steps)  # a zero is stored exactly
    if storage_dtype in _SYMMETRIC or storage_dtype in _RANGED:
        return _block_steps(weights, storage_dtype, role)
    return None


def _block_steps(weights: np.ndarray, storage_dtype: str, role: Role) -> np.ndarray | None:
    """Steps as a share of the range of their block; blocks run along the rows of the file."""
    n, d, m = weights.shape
    rows = weights.transpose(1, 0, 2).reshape(d, n * m) if role is Role.O else weights.transpose(0, 2, 1).reshape(-1, d)
    if rows.shape[1] % _BLOCK:
        return None
    blocks = rows.reshape(len(rows), -1, _BLOCK)
    if storage_dtype in _SYMMETRIC:
        steps = np.abs(blocks).max(axis=2, keepdims=True) / _SYMMETRIC[storage_dtype]
    else:
        steps = np.ptp(blocks, axis=2, keepdims=True) / _RANGED[storage_dtype]
    steps = np.broadcast_to(steps, blocks.shape).reshape(rows.shape)
    return steps.reshape(d, n, m).transpose(1, 0, 2) if role is Role.O else steps.reshape(n, m, d).swapaxes(1, 2)


def narrower(declared: str, *found: str) -> str:
    """The type to which numbers were rounded: as declared, or a narrower type that holds them exactly."""
    if declared not in MANTISSAS:
        return declared  # not a plain floating-point type
    return min((declared, *found), key=lambda name: MANTISSAS[name][0])


class GainType(NamedTuple):
    """How the gains of a norm are stored: the type, and the number added after reading (1 if γ − 1 is stored)."""

    dtype: str
    added: float


def gain_type(norm: Norm | None) -> GainType | None:
    """The narrowest type of a norm's gains, or of γ − 1 in families that store it."""
    if norm is None:
        return None
    found = [GainType(narrowest(norm.gain - norm.gain.dtype.type(added)), added) for added in (0.0, 1.0)]
    return min(found, key=lambda one: MANTISSAS[one.dtype][0])


class StoredTypes(NamedTuple):
    """The narrowest types of the tensors that make up the weights of one role in one layer."""

    weights: str  # of the weights themselves, or of the map into their latent
    heads: str = "float64"  # under latent attention: of the map from the latent to heads, and of its gains
    latent_gains: str = "float64"
    gains: GainType | None = None  # of the norm that folding moves into the weights


def stored_types(weights: AttentionWeights, role: Role, layer: int, folded: bool) -> StoredTypes:
    """The types of unfolded weights, with those of the gains if the weights will be folded."""
    gains = gain_type(norm_of(weights, role, layer)) if folded else None
    factors = weights.latent_factors(role, layer)
    if factors is None:
        # The most common type: a head edited in a wider type does not change how the others were rounded.
        types = Counter(narrowest(head) for head in weights.read(role, layer))
        return StoredTypes(types.most_common(1)[0][0], gains=gains)
    return StoredTypes(narrowest(factors.stored), narrowest(factors.heads), narrowest(factors.gains), gains)


def norm_of(weights: AttentionWeights, role: Role, layer: int) -> Norm | None:
    """The norm whose gains folding moves into the weights of a role."""
    return weights.output_norm(layer) if role is Role.O else weights.norm(layer)


class HeldPort(WrappedWeights):
    """Weights with one role of one layer cached in float64, so that folding adds almost no rounding."""

    def __init__(self, weights: AttentionWeights, role: Role, layer: int) -> None:
        super().__init__(weights)
        self._read = weights.read(role, layer).astype(np.float64)
        self._factors = weights.latent_factors(role, layer)

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        return self._read

    def latent_factors(self, role: Role | str, layer: int) -> LatentFactors | None:
        return self._factors


class RoundedWeights(WrappedWeights):
    """Weights rounded to other types; numbers that these types hold exactly are unchanged."""

    def __init__(self, weights: AttentionWeights, types: StoredTypes) -> None:
        super().__init__(weights)
        self.types = types

    def read(self, role: Role | str, layer: int) -> np.ndarray:
        weights, factors = self.inner.read(role, layer), self.inner.latent_factors(role, layer)
        if factors is None:
            return round_to(weights, self.types.weights)
        made = self._rounded(factors).product()
        rounded = round_to(weights, self.types.weights)  # correct for a rotary key, which is stored directly
        rounded[: len(made)] = 0
        rounded[: len(made), :, : made.shape[2]] = made
        return rounded

    def _rounded(self, factors: LatentFactors) -> LatentFactors:
        return factors._replace(
            stored=round_to(factors.stored, self.types.weights),
            heads=round_to(factors.heads, self.types.heads),
            gains=round_to(factors.gains, self.types.latent_gains),
        )

    def norm(self, layer: int) -> Norm | None:
        return self._with_rounded_gains(self.inner.norm(layer))

    def output_norm(self, layer: int) -> Norm | None:
        return self._with_rounded_gains(self.inner.output_norm(layer))

    def _with_rounded_gains(self, norm: Norm | None) -> Norm | None:
        if norm is None or self.types.gains is None:
            return norm
        added = norm.gain.dtype.type(self.types.gains.added)
        return Norm(norm.kind, round_to(norm.gain - added, self.types.gains.dtype) + added, norm.bias, norm.eps)
