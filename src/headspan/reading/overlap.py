"""How far the subspaces of two weights overlap: PK, principal angles, shared directions, and chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.statistics.dimension import pair_dimension_of
from headspan.subspaces.bases import orthonormal_basis, principal_angles, projection_kernel
from headspan.subspaces.random_subspaces import moments
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Port

if TYPE_CHECKING:
    from headspan.models.families.latent_attention import Chance

SHARED_LEVEL = 0.99
# Quantile of the Tracy–Widom distribution of order 1 at SHARED_LEVEL.
_TRACY_WIDOM = 2.0234
# Neighbouring cosines closer than this count as equal: small changes in the weights would rotate their directions.
DEGENERATE_GAP = 0.01
LATENT_NOTE = (
    "both weights share the latent of one layer: chance is that of random subspaces of the latent, not of the stream"
)
CENTRED_NOTE = "folding has centred both weights: chance is that of random subspaces of {} dimensions"


class SubspaceOverlap(NamedTuple):
    """The numbers of two weights, as in `headspan.reading.pair.PairReport`, and their orthonormal bases."""

    bases: tuple[np.ndarray, np.ndarray]
    pk: float
    principal_angles: np.ndarray
    random_mean: float
    random_sd: float
    shared_directions: int
    shared_threshold: float
    forced_directions: int
    notes: list[str]

    @property
    def dimensions(self) -> tuple[int, int]:
        return self.bases[0].shape[1], self.bases[1].shape[1]

    @property
    def pk_normalised(self) -> float:
        return self.pk / min(self.dimensions)

    @property
    def z(self) -> float | None:
        return (self.pk - self.random_mean) / self.random_sd if self.random_sd > 0 else None


def overlap(weights: AttentionWeights, source: Port | str, target: Port | str) -> SubspaceOverlap:
    """Compare two weights with each other and with random subspaces of their dimensions."""
    first, second = (_basis(weights, name) for name in (source, target))
    angles = principal_angles(first, second)
    m, m2 = first.shape[1], second.shape[1]
    d = max(pair_dimension_of(weights, source, target), m, m2)
    mean, variance = (float(value) for value in moments(d, m, m2))
    latent = _latent_chance(weights, source, target, (m, m2))
    if latent is not None:
        mean, variance = latent.mean, latent.sd**2
    forced = max(0, m + m2 - d)
    threshold = largest_random_square(d, m, m2)
    shared = max(0, int(np.count_nonzero(np.cos(angles) ** 2 > threshold)) - forced)
    centred = [CENTRED_NOTE.format(d)] if d < weights.d_model and not latent else []
    return SubspaceOverlap(
        (first, second), projection_kernel(first, second), angles, mean, variance**0.5, shared, threshold, forced,
        [*([LATENT_NOTE] if latent else []), *centred],
    )  # fmt: skip


def notes_on_shared_heads(weights: AttentionWeights, *names: Port | str) -> list[str]:
    """A note for each query head whose name refers to its KV head."""
    parsed = [head for name in names if (head := Port.parse(name)).head.kind != "QR"]
    found = [weights.ports.note(head, role) for head, role in parsed]
    return [sentence for sentence in found if sentence is not None]


def _latent_chance(
    weights: AttentionWeights, source: Port | str, target: Port | str, ranks: tuple[int, int]
) -> Chance | None:
    """PK by chance if both weights share the latent of one layer; otherwise None."""
    (first, role), (second, role2) = Port.parse(source), Port.parse(target)
    if first.layer != second.layer or "KR" in (first.kind, second.kind):
        return None
    return weights.same_layer_chance(role, role2, first.layer, ranks)


def participation_ratio(squares: np.ndarray) -> float:
    """(Σcos²)² / Σcos⁴: the effective number of shared directions; 0 if nothing is shared.

    >>> participation_ratio(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    fourth = float(np.square(squares).sum())
    return float(squares.sum()) ** 2 / fourth if fourth > 0 else 0.0


def largest_random_square(d: int, m: int, m2: int) -> float:
    """The 99 % quantile of the largest cos² between uniform random m- and m2-dimensional subspaces of R^d.

    The squared cosines are the roots of a Jacobi (double Wishart) ensemble; the logit of the largest one follows the
    Tracy–Widom distribution of order 1 with the centring and scale of Johnstone (2008, Annals of Statistics 36, 2638).
    For a single dimension it is a Beta distribution. If m + m2 > d, the directions that must be shared (cos² = 1) are
    excluded: the remaining cosines are those between the two orthogonal complements.

    >>> round(largest_random_square(768, 64, 64), 3)
    0.324
    """
    if m + m2 > d:
        m, m2 = d - m, d - m2
    small, large = min(m, m2), max(m, m2)
    if small == 0:
        return 1.0
    if small == 1:
        from scipy.special import betaincinv

        return float(betaincinv(large / 2, (d - large) / 2, SHARED_LEVEL))
    if m + m2 == d:
        # The largest cosine is close to 1: its sine is distributed like the smallest singular value of a square random
        # matrix, P(√(m·m2)·sin θ > y) = exp(−y − y²/2) (Edelman 1988).
        y = np.sqrt(1 - 2 * np.log(SHARED_LEVEL)) - 1
        return float(1 - y**2 / (m * m2))
    gamma, phi = (2 * np.arcsin(np.sqrt((k - 0.5) / (d - 1))) for k in (small, large))
    centre = 2 * np.log(np.tan((phi + gamma) / 2))
    scale = (16 / (d - 1) ** 2 / (np.sin(phi + gamma) ** 2 * np.sin(phi) * np.sin(gamma))) ** (1 / 3)
    return float(1 / (1 + np.exp(-(centre + scale * _TRACY_WIDOM))))


def degenerate_blocks(cosines: np.ndarray, gap: float = DEGENERATE_GAP) -> list[tuple[int, ...]]:
    """For each direction, the ranks (from 1) of its block of nearly equal cosines.

    >>> degenerate_blocks(np.array([0.9, 0.5, 0.495, 0.1]))
    [(1,), (2, 3), (2, 3), (4,)]
    """
    starts: list[int] = np.flatnonzero(np.diff(cosines, prepend=np.inf) < -gap).tolist()
    blocks = [tuple(range(a + 1, b + 1)) for a, b in zip(starts, [*starts[1:], len(cosines)], strict=True)]
    return [block for block in blocks for _ in block]


def _basis(weights: AttentionWeights, name: Port | str) -> np.ndarray:
    head, role = Port.parse(name) if isinstance(name, str) else name
    weight = weights.read_head(Port(head, role))
    basis = orthonormal_basis(weight, weights.storage_dtype(role, head.layer))
    if basis.rank == 0:
        raise HeadspanError(f"the weight {head}.{role} is zero, so it spans nothing to compare")
    return basis.vectors
