"""Which pairs score more than chance? z, p and q of each, against random subspaces and against impossible pairs.

Two nulls, for two questions:

``random``
    Both subspaces are uniform and independent, in d dimensions, or in d − 1 where folding has centred both. Moments are
    exact and p-values come from a beta distribution with the exact first three, which is the law itself for single
    directions. Trained weights are never like this (all heads share a few directions), so nearly every pair looks
    significant.
``reversed``
    A head cannot write into what an *earlier* head reads. Pairs in that impossible direction have the same heads,
    the same shared directions and the same distances between layers, but no information can flow along them.
    The p-value of a forward pair is its rank among them, and beyond the largest 5 % of them the tail of a generalised
    Pareto distribution where one fits. See docs/statistics.md for assumptions and calibration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from headspan.analysis.dimension import pair_dimension
from headspan.analysis.given import ScoresLike, given_scores
from headspan.analysis.random_subspaces import Approximation, Moments, RandomLaw, bounded_law, moments, random_law
from headspan.analysis.tails import Tail, fit_tail
from headspan.errors import HeadspanError
from headspan.heads import Pairing, layers_of, pair_mask
from headspan.scores import ScoreMatrix, Scores
from headspan.system.arguments import checked
from headspan.system.ordering import descending
from headspan.system.tabular import Tabular

Null = Literal["random", "reversed"]

_ROUNDING = 1e-6
DISCOVERY_RATE = 0.05  # the q that counts as significant wherever no other is asked for


@dataclass(frozen=True, repr=False, eq=False)
class Significance(Tabular):
    """z, p and q of every pair of one pairing; arrays shaped like ``matrix.values``, NaN where there is no pair.

    z: distance from the null mean in null standard deviations.
    p: chance of a score at least this large under the null (one-sided).
    q: Benjamini–Hochberg adjusted p over the pairs of this pairing.
    tail: the fit that gave the smallest p-values of the reversed null, None where they were counted.
    note: a sentence on where the p-values of the reversed null come from.
    """

    null: Null
    matrix: ScoreMatrix
    z: np.ndarray
    p: np.ndarray
    q: np.ndarray
    tail: Tail | None = None
    note: str = ""

    @checked
    def rows(self, k: int | None = None) -> list[dict[str, Any]]:
        """One record per pair, largest score first: pairing, rank, source, target, score, z, p, q; the first k."""
        matrix = self.matrix
        rows, columns, values = matrix.pairs()
        order = descending(values)[:k]
        return [
            {
                "pairing": str(matrix.pairing),
                "rank": rank,
                "source": str(matrix.sources[i]),
                "target": str(matrix.targets[j]),
                "score": float(matrix.values[i, j]),
                **{name: float(getattr(self, name)[i, j]) for name in ("z", "p", "q")},
            }
            for rank, (i, j) in enumerate(zip(rows[order], columns[order], strict=True), start=1)
        ]

    def _headline(self) -> str:
        return f"{self.matrix.metric} {self.matrix.pairing} against the {self.null} null"

    @checked
    def count(self, q: float = DISCOVERY_RATE) -> int:
        """How many pairs are significant at a false-discovery rate of q."""
        with np.errstate(invalid="ignore"):
            return int(np.count_nonzero(self.q <= q))

    @property
    def smallest_q(self) -> float:
        """The least false-discovery rate at which a pair is significant; NaN without pairs."""
        present = self.q[~np.isnan(self.q)]
        return float(present.min()) if present.size else float("nan")

    @checked
    def nothing(self, q: float) -> str:
        """The sentence for a choice of q that leaves no pair: what would not be empty."""
        pairing, least = self.matrix.pairing, self.smallest_q
        if np.isnan(least):
            return f"{pairing} has no forward pairs"
        return (
            f"no {pairing} pair has q ≤ {q:g} against the {self.null} null; the smallest q is {least:.3g}, which "
            f"{_pairs(self.count(least))}"
        )


def _pairs(count: int) -> str:
    return "one pair has" if count == 1 else f"{count:,} pairs have"


@checked
def significance(
    scores: ScoresLike,
    pairing: str | Pairing,
    *,
    null: Null = "random",
    metric: str = "pk",
    approximation: Approximation = "tight",
) -> Significance:
    """z, p and q for the pairs of one pairing under one of the two nulls.

    ``random`` is for ``pk`` only, over the paper's pair set; its p-values come from the beta distribution of
    `random_law`. With the approximation ``loose`` they are the tail of a normal distribution with the loose variance,
    which is there for comparison. ``reversed`` takes any similarity and needs the scores of the reversed pairing (KO
    for OK) too; the four same-type pairings have no reverse.
    """
    if not isinstance(scores, Scores):
        one = Pairing.parse(pairing)
        scores = given_scores(scores, [metric], [one, Pairing(one.target, one.source)])
    scores.check_all_pairs("a false-discovery rate")
    matrix = scores[metric, pairing]
    if null == "reversed":
        return _against_reversed(matrix, scores)
    if null != "random":
        raise HeadspanError(f"unknown null {null!r}: choose random or reversed")
    if metric != "pk":
        raise HeadspanError(f"the random null is known for pk only, not for {metric}: choose the reversed null")
    return _against_random(matrix, scores, approximation)


def _against_random(matrix: ScoreMatrix, scores: Scores, approximation: Approximation) -> Significance:
    matrix = _compared(matrix)
    chances = list(_chances(scores, matrix, approximation))
    z = _random_z(matrix, chances)
    p = np.full(z.shape, np.nan)
    for part, random, law in chances:
        tail = law.upper_tail(matrix.values[part]) if approximation == "tight" else p_values(z[part])
        # PK that cannot vary always reaches its mean.
        p[part] = np.where((random.variance > 0) | np.isnan(tail), tail, 1.0)
    return Significance("random", matrix, z, p, benjamini_hochberg(p))


def z_scores(scores: Scores, pairing: str | Pairing, approximation: Approximation = "tight") -> np.ndarray:
    """Distance of every PK from its mean between random subspaces, in standard deviations; NaN where no pair."""
    matrix = _compared(scores["pk", pairing])
    return _random_z(matrix, _chances(scores, matrix, approximation))


def _compared(matrix: ScoreMatrix) -> ScoreMatrix:
    """Only the pairs of the paper's pair set."""
    mask = pair_mask(matrix.pairing, matrix.sources, matrix.targets, "default")
    return replace(matrix, values=np.where(mask, matrix.values, np.nan).astype(matrix.values.dtype))


_Chance: TypeAlias = "tuple[tuple[Any, ...], Moments, RandomLaw]"


def _random_z(matrix: ScoreMatrix, chances: Iterable[_Chance]) -> np.ndarray:
    z = np.full(matrix.values.shape, np.nan)
    for part, random, _ in chances:
        values = matrix.values[part]
        with np.errstate(divide="ignore", invalid="ignore"):
            z[part] = np.where((random.variance > 0) | np.isnan(values), (values - random.mean) / random.sd, 0.0)
    return z


def _chances(scores: Scores, matrix: ScoreMatrix, approximation: Approximation) -> Iterator[_Chance]:
    """Parts of a matrix with moments and law of PK by chance: the whole, then pairs in one latent, which replace them.

    Heads of one layer under latent attention have a mean and a spread of their own, and no more is known of them.
    """
    ranks, ranks2 = (_few(scores.ranks(role)) for role in matrix.pairing)
    dimensions = pair_dimension(scores, matrix.pairing), ranks[:, None], ranks2[None, :]
    yield (slice(None), slice(None)), moments(*dimensions, approximation), random_law(*dimensions)
    ranks, ranks2 = (scores.ranks(role) for role in matrix.pairing)
    sources, targets = layers_of(matrix.sources), layers_of(matrix.targets)
    latent = [np.array([head.kind != "KR" for head in heads]) for heads in (matrix.sources, matrix.targets)]
    for layer, (mean, sd) in _inside_latents(scores, matrix).items():
        part = np.ix_((sources == layer) & latent[0], (targets == layer) & latent[1])
        high = np.minimum(ranks[part[0]], ranks2[part[1]])
        random = Moments(np.full(high.shape, mean), np.full(high.shape, sd**2))
        yield part, random, bounded_law(0.0, high, random.mean, random.variance)


def _few(ranks: np.ndarray) -> np.ndarray:
    """One number for all heads where all span as many dimensions: what is computed of it stays small."""
    return ranks[:1] if ranks.size and (ranks == ranks[0]).all() else ranks


def _inside_latents(scores: Scores, matrix: ScoreMatrix) -> dict[int, tuple[float, float]]:
    """Mean and standard deviation by chance of pairs in one latent, by layer."""
    try:
        found = (scores.provenance.get("same_layer_chance") or {}).get(str(matrix.pairing)) or {}
        known = {int(layer): (float(mean), float(sd)) for layer, (mean, sd) in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise HeadspanError("the result's chance levels of one layer are damaged: score the model again") from None
    # Heads that fill their latent always have one PK; what is drawn of it varies by rounding alone.
    return {layer: (mean, sd if sd > _ROUNDING * mean else 0.0) for layer, (mean, sd) in known.items()}


def p_values(z: ArrayLike) -> np.ndarray:
    """Upper tail of the normal distribution: the chance of a z at least this large, with the loose variance.

    >>> p_values([0.0, 1.6448536])
    array([0.5 , 0.05])
    """
    from scipy.special import ndtr

    return np.asarray(ndtr(-np.asarray(z, dtype=np.float64)))


def benjamini_hochberg(p: ArrayLike) -> np.ndarray:
    """False-discovery-rate adjusted p-values, in the shape given; NaN entries are left out and stay NaN.

    >>> benjamini_hochberg([0.01, 0.02, 0.9]).round(3)
    array([0.03, 0.03, 0.9 ])
    """
    p = np.asarray(p, dtype=np.float64)
    q = np.full(p.shape, np.nan)
    present = ~np.isnan(p)
    values = p[present]
    order = np.argsort(values)[::-1]  # largest p first, so that minima accumulate downwards; equal ones get one q
    adjusted = values[order] * len(values) / np.arange(len(values), 0, -1)
    sorted_back = np.empty_like(values)
    sorted_back[order] = np.minimum(np.minimum.accumulate(adjusted), 1.0)
    q[present] = sorted_back
    return q


def has_reverse(scores: Scores, metric: str, pairing: Pairing) -> bool:
    """Whether a result holds what the reversed null of a pairing needs."""
    return not pairing.same_type and (metric, Pairing(pairing.target, pairing.source)) in scores


def _against_reversed(matrix: ScoreMatrix, scores: Scores) -> Significance:
    """Rank of every forward pair among the pairs in which the source comes after the target."""
    pairing = matrix.pairing
    if pairing.same_type:
        raise HeadspanError(
            f"{pairing} has no reversed null: both sides have the same role, so the reversed pairs are the same "
            "pairs; choose the random null"
        )
    back = Pairing(pairing.target, pairing.source)
    if (matrix.metric, back) not in scores:
        raise HeadspanError(
            f"the reversed null of {pairing} needs the {matrix.metric} scores of {back}, which this result lacks: "
            f"score again with --pairing {pairing} --pairing {back}"
        )
    # Every similarity here is symmetric: XY with the source after the target is YX with the source before it.
    control = np.sort(scores[matrix.metric, back].forward().pairs()[2].astype(np.float64))
    matrix = matrix.forward()
    if len(control) < 2:
        raise HeadspanError("the reversed null needs heads in at least two layers, this result has only one")
    values = matrix.values.astype(np.float64)
    present = ~np.isnan(values)
    p = np.full(values.shape, np.nan)
    # A reversed pair with the same score has reached it: ties count against the forward pair.
    p[present] = (1 + _reached(control, values[present])) / (1 + len(control))
    tail, note = _use_tail(fit_tail(control), len(control), values, p)
    spread = control.std()
    z = (values - control.mean()) / spread if spread > 0 else np.where(present, 0.0, np.nan)
    return Significance("reversed", matrix, z, p, benjamini_hochberg(p), tail, note)


def _reached(control: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How many of the ascending controls are at least as large as each value; in order of size they are found fast."""
    order = np.argsort(values)
    found = np.empty(len(values), dtype=np.int64)
    found[order] = len(control) - np.searchsorted(control, values[order], side="left")
    return found


def _use_tail(fitted: Tail | str, controls: int, values: np.ndarray, p: np.ndarray) -> tuple[Tail | None, str]:
    """Put the p-values of a fitted tail in place of counted ones, and say what was done."""
    if isinstance(fitted, str):
        return None, f"{fitted}: p-values are counted, and none can be below {1 / (1 + controls):.2g}"
    with np.errstate(invalid="ignore"):
        beyond = values > fitted.threshold
    p[beyond] = fitted.p_values(values[beyond])
    return fitted, (
        f"p-values of scores above {fitted.threshold:.4g} come from a generalised Pareto distribution fitted to the "
        f"{fitted.count} reversed pairs above it (shape {fitted.shape:.2f}, Anderson–Darling p = {fitted.fit:.2g})"
    )
