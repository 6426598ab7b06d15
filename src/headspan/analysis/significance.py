"""Which pairs score more than chance? z, p and q of each, against random subspaces and against impossible pairs.

Two nulls, for two questions:

``random``
    Both subspaces are uniform and independent. Moments are exact, the tail is a normal approximation, but for single
    directions, where it is exact too. Trained
    weights are never like this (all heads share a few directions), so nearly every pair looks significant.
``reversed``
    A head cannot write into what an *earlier* head reads. Pairs in that impossible direction have the same heads,
    the same shared directions and the same distances between layers, but no information can flow along them.
    The p-value of a forward pair is its rank among them, and beyond the largest 5 % of them the tail of a generalised
    Pareto distribution where one fits. See docs/statistics.md for assumptions and calibration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from headspan.analysis.given import ScoresLike, given_scores
from headspan.analysis.random_subspaces import Approximation, moments
from headspan.analysis.tails import Tail, fit_tail
from headspan.errors import HeadspanError
from headspan.heads import Pairing, layers_of, pair_mask
from headspan.scores import ScoreMatrix, Scores
from headspan.system.arguments import checked
from headspan.system.ordering import descending
from headspan.system.tabular import Tabular

Null = Literal["random", "reversed"]

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

    ``random`` is for ``pk`` only, over the paper's pair set; where one side is a single direction its p-values are
    exact, otherwise they come from a normal approximation. ``reversed`` takes any similarity and needs the
    scores of the reversed pairing (KO for OK) too; the four same-type pairings have no reverse.
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
    mask = pair_mask(matrix.pairing, matrix.sources, matrix.targets, "default")
    matrix = replace(matrix, values=np.where(mask, matrix.values, np.nan).astype(matrix.values.dtype))
    ranks, ranks2 = (_few(scores.ranks(role)) for role in matrix.pairing)
    random = moments(scores.d_model, ranks[:, None], ranks2[None, :], approximation)
    mean, sd = _inside_latents(scores, matrix, random.mean, random.sd)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(sd > 0, (matrix.values - mean) / sd, 0.0)
    z[np.isnan(matrix.values)] = np.nan
    p = p_values(z)
    if approximation == "tight":
        _put_exact(p, matrix.values, scores.d_model, ranks, ranks2)
    p[np.broadcast_to(sd == 0, p.shape) & ~np.isnan(z)] = 1.0  # PK cannot vary, so it always reaches its mean
    return Significance("random", matrix, z, p, benjamini_hochberg(p))


def _few(ranks: np.ndarray) -> np.ndarray:
    """One number for all heads where all span as many dimensions: what is computed of it stays small."""
    return ranks[:1] if ranks.size and (ranks == ranks[0]).all() else ranks


def _put_exact(p: np.ndarray, values: np.ndarray, d: int, ranks: np.ndarray, ranks2: np.ndarray) -> None:
    """Exact p-values where one side is a direction: its share in an m-dimensional subspace is Beta(m/2, (d − m)/2)."""
    from scipy.special import betainc

    m = np.broadcast_to(np.maximum(ranks[:, None], ranks2[None, :]), p.shape)
    lines = np.broadcast_to(np.minimum(ranks[:, None], ranks2[None, :]) == 1, p.shape) & (m < d) & ~np.isnan(p)
    share = np.clip(values[lines].astype(np.float64), 0.0, 1.0)
    p[lines] = betainc((d - m[lines]) / 2, m[lines] / 2, 1 - share)  # the upper tail, without loss where it is small


def _inside_latents(
    scores: Scores, matrix: ScoreMatrix, mean: np.ndarray, sd: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and spread by chance with those of pairs in one latent put in: heads of one layer under latent attention."""
    try:
        found = (scores.provenance.get("same_layer_chance") or {}).get(str(matrix.pairing)) or {}
        chances = {int(layer): (float(mean), float(sd)) for layer, (mean, sd) in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise HeadspanError("the result's chance levels of one layer are damaged: score the model again") from None
    if not chances:
        return mean, sd
    mean, sd = (np.broadcast_to(array, matrix.values.shape).copy() for array in (mean, sd))
    sources, targets = layers_of(matrix.sources), layers_of(matrix.targets)
    latent = [np.array([head.kind != "KR" for head in heads]) for heads in (matrix.sources, matrix.targets)]
    for layer, chance in chances.items():
        rows, columns = (sources == layer) & latent[0], (targets == layer) & latent[1]
        mean[np.ix_(rows, columns)], sd[np.ix_(rows, columns)] = chance
    return mean, sd


def z_scores(scores: Scores, pairing: str | Pairing, approximation: Approximation = "tight") -> np.ndarray:
    """Distance of every PK from its mean between random subspaces, in standard deviations; NaN where no pair."""
    return _against_random(scores["pk", pairing], scores, approximation).z


def p_values(z: ArrayLike) -> np.ndarray:
    """Upper tail of the normal distribution: the chance of a z at least this large.

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
