"""The five similarities.

Four of them are one number: ‖F_AᵀF_B‖_F² for a *factor* F that each makes of a weight, scaled so that nothing is
left to divide by. ``contraction`` computes that number for all pairs at once. To add a similarity of this kind is
to write its factor and add one line to ``FACTOR_METRICS``:

=============  ==============================================  ===============================================
similarity     factor F of the weight A (P its partner)        score from s = ‖F_AᵀF_B‖_F²
=============  ==============================================  ===============================================
``pk``         U, an orthonormal basis of the span of A        s
``cs``         A·chol(PᵀP), divided by its Frobenius norm      √s   (the d×d circuit matrix is never made)
``simple_cs``  A, divided by its Frobenius norm                √s
``linear_cka`` √(A_cᵀA_c), divided by √‖A_cᵀA_c‖_F; A_c = A − s
               its mean column
=============  ==============================================  ===============================================

Procrustes needs singular values for each pair and so has its own all-pairs function.

In ``cs`` the partner P of a weight is the other weight of its circuit: K for Q, Q for K, V for O, O for V. Under
GQA a query head's partner is the K or V of its group; a shared K or V head has several partners, and takes them
stacked (PᵀP summed over the group's query heads).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headspan.errors import HeadspanError
from headspan.scoring.subspaces import orthonormal_bases
from headspan.system.threads import parallel_map

METRIC_TITLES = {
    "pk": "Projection Kernel",
    "cs": "Composition Score",
    "simple_cs": "Simple-CS",
    "linear_cka": "Linear CKA",
    "procrustes": "Procrustes similarity",
}
METRICS = tuple(METRIC_TITLES)


class LayerWeight(NamedTuple):
    """One role's weights in one layer, with those of its partner, (n, d, m) each."""

    own: np.ndarray
    partner: np.ndarray
    storage_dtype: str


class FactorMetric(NamedTuple):
    """A similarity that is ‖F_AᵀF_B‖_F² up to a final map.

    factor: makes (n, p, q) float64 factors of a layer's weights, already normalised.
    finish: the map from ‖F_AᵀF_B‖_F² to the score.
    """

    factor: Callable[[LayerWeight], np.ndarray]
    finish: Callable[[np.ndarray], np.ndarray]


def parse_metrics(names: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Metric names from ``"all"``, ``"pk,cs"`` or a list of them, each once, in the table's order.

    >>> parse_metrics(["cs", "pk"])
    ('pk', 'cs')
    """
    given = [names] if isinstance(names, str) else names
    parts = [part.strip().lower() for name in given for part in name.split(",")]
    for part in parts:
        if part != "all" and part not in METRIC_TITLES:
            raise HeadspanError(f"unknown similarity {part!r}: choose from {', '.join(METRICS)} or all")
    return METRICS if "all" in parts else tuple(name for name in METRICS if name in parts)


def subspace_factor(weight: LayerWeight) -> np.ndarray:
    """pk: orthonormal bases; columns beyond a head's rank are zero."""
    return orthonormal_bases(weight.own, weight.storage_dtype)[0]


def circuit_factor(weight: LayerWeight) -> np.ndarray:
    """cs: A·chol(PᵀP) has the singular values and left span of the d×d matrix A Pᵀ."""
    own = _rescaled(weight.own).astype(np.float32)  # only the Gram matrix squares a condition number
    partner = _rescaled(weight.partner, per_layer=True)
    grams = _match_groups(np.matmul(partner.transpose(0, 2, 1), partner), len(own))
    scale = np.sqrt(np.trace(grams, axis1=1, axis2=2))[:, None, None]
    roots = np.divide(_square_roots(grams), scale, out=np.zeros_like(grams), where=scale > 0)
    return _unit_norm(np.matmul(own, roots.astype(np.float32)))


def plain_factor(weight: LayerWeight) -> np.ndarray:
    """simple_cs: the weight itself."""
    return _unit_norm(_rescaled(weight.own))


def centred_factor(weight: LayerWeight) -> np.ndarray:
    """linear_cka: ‖A_cB_cᵀ‖_F² = ⟨A_cᵀA_c, B_cᵀB_c⟩, so any m×m square root of A_cᵀA_c will do for A_cᵀ."""
    own = _rescaled(weight.own)
    centred = own - own.mean(axis=2, keepdims=True)
    # Columns that are all equal leave nothing but the rounding of their mean, which must not be blown up to a score.
    size, noise = (np.linalg.norm(w, axis=(1, 2), keepdims=True) for w in (centred, own))
    centred *= size > own.shape[2] * 2.0**-52 * noise
    grams = np.matmul(centred.transpose(0, 2, 1), centred)
    norms = np.linalg.norm(grams, axis=(1, 2), keepdims=True)
    return _square_roots(grams / np.where(norms > 0, norms, 1.0))


FACTOR_METRICS = {
    "pk": FactorMetric(subspace_factor, lambda s: s),
    "cs": FactorMetric(circuit_factor, np.sqrt),
    "simple_cs": FactorMetric(plain_factor, np.sqrt),
    "linear_cka": FactorMetric(centred_factor, lambda s: s),
}


def triangular_factor(weight: LayerWeight) -> np.ndarray:
    """procrustes: R of the thin QR of A, since the singular values of A Bᵀ are those of R_A R_Bᵀ."""
    return np.asarray(np.linalg.qr(np.asarray(weight.own, dtype=np.float64), mode="r"))


def procrustes_all_pairs(first: np.ndarray, second: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """2‖A Bᵀ‖_* / (‖A‖_F² + ‖B‖_F²) for the needed pairs of triangular factors, (n_a, n_b); 0 where both are zero.

    ‖R_A R_Bᵀ‖_* is the sum of the square roots of the eigenvalues of MMᵀ, M = R_A R_Bᵀ. Eigenvalues are three
    times as fast as singular values, and lose nothing that shows: an error of 1e-16·σ₁² under the root is at most
    1e-8·σ₁ in a sum that is at least σ₁.
    """
    # Every head on its own scale, so that fourth powers of 1e±45 neither overflow nor vanish: with A = aA', B = bB'
    # the score is 2‖A'B'ᵀ‖_* / (‖A'‖²·a/b + ‖B'‖²·b/a).
    scales_a, scales_b = (_largest(f)[:, 0, 0] for f in (first, second))
    first, second = _rescaled(first), _rescaled(second)
    norms_a, norms_b = (np.square(f).sum(axis=(1, 2)) for f in (first, second))
    scores = np.full(needed.shape, np.nan)

    def fill(i: int) -> None:
        columns = np.flatnonzero(needed[i])
        products = np.matmul(first[i], second[columns].transpose(0, 2, 1))
        eigenvalues = np.linalg.eigvalsh(np.matmul(products, products.transpose(0, 2, 1)))
        nuclear = np.sqrt(np.clip(eigenvalues, 0.0, None)).sum(axis=1)
        with np.errstate(over="ignore", divide="ignore"):  # one weight immeasurably larger: the score is 0
            ratio = scales_a[i] / scales_b[columns]
            total = norms_a[i] * ratio + norms_b[columns] / ratio
        scores[i, columns] = np.divide(2 * nuclear, total, out=np.zeros_like(total), where=total > 0)

    for _ in parallel_map(fill, np.flatnonzero(needed.any(axis=1)).tolist()):
        pass
    return scores


def _rescaled(weight: np.ndarray, per_layer: bool = False) -> np.ndarray:
    """Float64, with entries of at most 1, so that squares of 1e±30 neither overflow nor vanish.

    Every similarity is unchanged by the scale of a head; of partners that are stacked, only by a common scale.
    """
    return np.divide(weight, _largest(weight, per_layer), dtype=np.float64)


def _largest(weight: np.ndarray, per_layer: bool = False) -> np.ndarray:
    """The largest entry of every head, or of the layer, by size; 1 where all are zero."""
    axes = None if per_layer else (1, 2)
    largest = np.maximum(weight.max(axis=axes, keepdims=True), -weight.min(axis=axes, keepdims=True))
    return np.where(largest > 0, largest, 1.0)


def _unit_norm(factors: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.einsum("nij,nij->n", factors, factors, dtype=np.float64))[:, None, None]
    return np.divide(factors, norms, out=np.zeros_like(factors), where=norms > 0, casting="same_kind")


def _match_groups(grams: np.ndarray, n: int) -> np.ndarray:
    """Grams of the partners, one per own head: repeated for query heads, summed for shared K/V heads."""
    if len(grams) < n:
        return np.repeat(grams, n // len(grams), axis=0)
    return grams.reshape(n, len(grams) // n, *grams.shape[1:]).sum(axis=1)


def _square_roots(grams: np.ndarray) -> np.ndarray:
    """L with L Lᵀ = G for each symmetric positive semidefinite G; Cholesky, or eigenvectors when one is singular."""
    try:
        return np.linalg.cholesky(grams)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(grams)
        return vectors * np.sqrt(np.clip(values, 0.0, None))[:, None, :]
