"""The weights of one layer, and the factors that similarities make of them (see :mod:`headspan.subspaces.metrics`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headspan.subspaces.accurate_products import accurate_product
from headspan.subspaces.bases import (
    largest,
    orthonormal_bases,
    orthonormal_basis,
    parts,
    power_of_two,
    subspace_ranks,
)
from headspan.system.threads import parallel_map, scratch


@dataclass(frozen=True)
class LayerWeight:
    """One role's weights in one layer, (n, d, m), with those of its partner if a similarity needs them."""

    own: np.ndarray
    partner: np.ndarray | None
    storage_dtype: str
    observed: np.ndarray | None = None  # folded, times the root of the statistics of a run
    _made: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    @property
    def bases(self) -> tuple[np.ndarray, np.ndarray]:
        """Orthonormal bases, (n, d, m) float32, and ranks, (n,); computed once."""
        # Not a cached_property: before Python 3.12 all objects share one lock, so threads would wait for each other.
        if "bases" not in self._made:
            self._made["bases"] = orthonormal_bases(self.own, self.storage_dtype, np.float32)
        return self._made["bases"]

    @property
    def ranks(self) -> np.ndarray:
        """The rank of each weight, taken from the bases if they were computed."""
        return self.bases[1] if self._made else subspace_ranks(self.own, self.storage_dtype)

    def parts(self) -> Iterator[tuple[slice, LayerWeight]]:
        """A few heads at a time, with their partners, so that intermediate results stay in the cache."""
        n, d, m = self.own.shape
        groups = n if self.partner is None else math.gcd(n, len(self.partner))
        for part in parts(groups, d * m * (n // groups)):
            heads, partner = _of_groups(part, n // groups), None
            if self.partner is not None:
                partner = self.partner[_of_groups(part, len(self.partner) // groups)]
            observed = None if self.observed is None else self.observed[heads]
            yield heads, LayerWeight(self.own[heads], partner, self.storage_dtype, observed)


def _of_groups(groups: slice, each: int) -> slice:
    return slice(groups.start * each, groups.stop * each)


def subspace_factor(weight: LayerWeight) -> np.ndarray:
    """pk: orthonormal bases; columns beyond a head's rank are zero."""
    return weight.bases[0]


def circuit_factor(weight: LayerWeight) -> np.ndarray:
    """cs: A·chol(PᵀP) has the singular values and left span of the d×d matrix A Pᵀ.

    If A is large exactly where P is small, the product loses digits. A head whose ‖A·chol(PᵀP)‖ is far below that of
    random weights is therefore recomputed in float64 from a QR factorisation, which does not square P's condition.
    """
    assert weight.partner is not None
    # Only the Gram matrix squares a condition number; float32 is enough for the rest.
    own = np.divide(weight.own, _scale(weight.own)).astype(np.float32, copy=False)
    partner = scratch("partners", weight.partner.shape)
    np.divide(weight.partner, _group_scale(weight.partner, len(own)), out=partner, dtype=np.float64)
    grams = _match_groups(np.matmul(partner.transpose(0, 2, 1), partner), len(own))
    scale = np.sqrt(np.trace(grams, axis1=1, axis2=2))[:, None, None]
    roots = np.divide(square_roots(grams), scale, out=np.zeros_like(grams), where=scale > 0)
    factors = np.matmul(roots.astype(np.float32).transpose(0, 2, 1), own.transpose(0, 2, 1)).transpose(0, 2, 1)
    sizes = _norms(factors)
    for i in np.flatnonzero(sizes * np.sqrt(own.shape[2]) < _CANCELLATION * _norms(own)):
        factors[i] = _careful_factor(weight.own[i], _partners_of(partner, int(i), len(own)))
        sizes[i] = np.linalg.norm(factors[i])
    factors /= np.where(sizes > 0, sizes, 1.0).astype(np.float32)[:, None, None]
    return factors


_CANCELLATION = 0.05  # relative to random weights; float32 keeps five digits above this
_DEEP_CANCELLATION = 1e-9  # float64 keeps seven digits above this


def _careful_factor(own: np.ndarray, partner: np.ndarray) -> np.ndarray:
    """A·Rᵀ in float64 with P = QR, scaled to the range of float32; in twice the precision where float64 cancels."""
    own, m = _rescaled(own[None])[0], own.shape[1]
    frame, root = np.linalg.qr(partner)
    factor = own @ root.T
    if np.linalg.norm(factor) < _DEEP_CANCELLATION * np.linalg.norm(own) * np.linalg.norm(root):
        basis = orthonormal_basis(partner)
        high, low = accurate_product(partner.T, basis.vectors if basis.rank == m else frame)
        factor = np.add(*accurate_product(own, high)) + own @ low
    return _rescaled(np.pad(factor, ((0, 0), (0, m - factor.shape[1])))[None])[0]


def _partners_of(partner: np.ndarray, index: int, n: int) -> np.ndarray:
    """The partner of one head as one matrix: that of its group, or the stacked partners of the group."""
    if len(partner) < n:
        return partner[index * len(partner) // n]
    per_head = len(partner) // n
    return partner[index * per_head : (index + 1) * per_head].reshape(-1, partner.shape[2])


def weight_itself(weight: LayerWeight) -> np.ndarray:
    """The weights as they are: for similarities that a caller gives."""
    return weight.own


def plain_factor(weight: LayerWeight) -> np.ndarray:
    """simple_cs: the weight itself."""
    own = _rescaled(weight.own)
    norms = _norms(own)
    return own / np.where(norms > 0, norms, 1.0)[:, None, None]


def centred_factor(weight: LayerWeight) -> np.ndarray:
    """linear_cka: ‖A_cB_cᵀ‖_F² = ⟨A_cᵀA_c, B_cᵀB_c⟩, so any m×m square root of A_cᵀA_c can replace A_cᵀ."""
    own = _rescaled(weight.own)
    centred = own - own.mean(axis=2, keepdims=True)
    centred -= centred.mean(axis=2, keepdims=True)  # removes the rounding error of the mean
    # Equal columns leave only the rounding of their mean, which normalisation must not turn into a score.
    size, noise = (np.linalg.norm(w, axis=(1, 2), keepdims=True) for w in (centred, own))
    centred *= size > own.shape[2] * 2.0**-52 * noise
    grams = np.matmul(centred.transpose(0, 2, 1), centred)
    norms = np.linalg.norm(grams, axis=(1, 2), keepdims=True)
    return square_roots(grams / np.where(norms > 0, norms, 1.0))


def observed_factor(weight: LayerWeight) -> np.ndarray:
    """influence: the folded weight times the root of its statistics, divided by its size (see `factor_sizes`)."""
    assert weight.observed is not None
    sizes = factor_sizes(weight)
    return weight.observed / np.where(sizes > 0, sizes, 1.0)[:, None, None]


def factor_sizes(weight: LayerWeight) -> np.ndarray:
    """The norms by which `observed_factor` divides, (n,)."""
    assert weight.observed is not None
    return _norms(weight.observed)


def triangular_factor(weight: LayerWeight) -> np.ndarray:
    """procrustes: R of the thin QR of A, since the singular values of A Bᵀ are those of R_A R_Bᵀ."""
    return np.asarray(np.linalg.qr(np.asarray(weight.own, dtype=np.float64), mode="r"))


def procrustes_all_pairs(first: np.ndarray, second: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """2‖A Bᵀ‖_* / (‖A‖_F² + ‖B‖_F²) for the needed pairs of triangular factors, (n_a, n_b); 0 where both are zero.

    ‖R_A R_Bᵀ‖_* is the sum of the square roots of the eigenvalues of MMᵀ, M = R_A R_Bᵀ. Eigenvalues are three
    times as fast as singular values and accurate enough: an error of 1e-16·σ₁² under the root is at most
    1e-8·σ₁ in a sum that is at least σ₁.
    """
    # Scale every head separately, so that fourth powers of 1e±45 neither overflow nor vanish: with A = aA', B = bB'
    # the score is 2‖A'B'ᵀ‖_* / (‖A'‖²·a/b + ‖B'‖²·b/a).
    scales_a, scales_b = (_scale(f)[:, 0, 0] for f in (first, second))
    first, second = _rescaled(first), _rescaled(second)
    norms_a, norms_b = (np.square(f).sum(axis=(1, 2)) for f in (first, second))
    scores = np.full(needed.shape, np.nan)

    def fill(i: int) -> None:
        columns = np.flatnonzero(needed[i])
        products = np.matmul(first[i], second[columns].transpose(0, 2, 1))
        eigenvalues = np.linalg.eigvalsh(np.matmul(products, products.transpose(0, 2, 1)))
        nuclear = np.sqrt(np.clip(eigenvalues, 0.0, None)).sum(axis=1)
        with np.errstate(over="ignore", divide="ignore"):  # one weight is vastly larger: the score is 0
            ratio = scales_a[i] / scales_b[columns]
            total = norms_a[i] * ratio + norms_b[columns] / ratio
        scores[i, columns] = np.divide(2 * nuclear, total, out=np.zeros_like(total), where=total > 0)

    for _ in parallel_map(fill, np.flatnonzero(needed.any(axis=1)).tolist()):
        pass
    return scores


def _rescaled(weight: np.ndarray) -> np.ndarray:
    """Float64, with entries below 2, so that squares of 1e±200 neither overflow nor vanish.

    No similarity depends on the scale of a head; stacked partners must share one scale.
    """
    return np.divide(weight, _scale(weight), dtype=np.float64)


def _scale(weight: np.ndarray) -> np.ndarray:
    """A power of two near every head's largest entry, (n, 1, 1)."""
    return power_of_two(largest(weight))


def _group_scale(partner: np.ndarray, n: int) -> np.ndarray:
    """The scale of the partners of each of n heads, the same for stacked partners, (len(partner), 1, 1)."""
    sizes = largest(partner)
    per_head = max(1, len(partner) // n)
    return power_of_two(np.repeat(sizes.reshape(-1, per_head, 1, 1).max(axis=1), per_head, axis=0))


def _norms(factors: np.ndarray) -> np.ndarray:
    """Frobenius norms, (n,)."""
    return np.sqrt(np.einsum("nij,nij->n", factors, factors, dtype=np.float64))


def _match_groups(grams: np.ndarray, n: int) -> np.ndarray:
    """Grams of the partners, one per own head: repeated for query heads, summed for shared K/V heads."""
    if len(grams) < n:
        return np.repeat(grams, n // len(grams), axis=0)
    return grams.reshape(n, len(grams) // n, *grams.shape[1:]).sum(axis=1)


def square_roots(grams: np.ndarray) -> np.ndarray:
    """L with L Lᵀ = G for each symmetric positive semidefinite G; Cholesky, or eigenvectors when one is singular."""
    try:
        return np.linalg.cholesky(grams)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(grams)
        return vectors * np.sqrt(np.clip(values, 0.0, None))[:, None, :]
