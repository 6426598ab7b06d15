"""Is a Projection Kernel larger than chance? Against random subspaces, and against the model's own impossible pairs.

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
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from headspan.analysis.given import ScoresLike, given_pairings, given_scores
from headspan.analysis.random_subspaces import (  # noqa: F401  all of them can be had from here too
    Approximation,
    Moments,
    entry_density,
    moments,
    random_bases,
    random_quantile,
    sample_pk,
    squared_entry_density,
)
from headspan.analysis.tails import Tail, fit_tail
from headspan.errors import HeadspanError
from headspan.heads import PAIRINGS, Pairing, layers_of, pair_mask
from headspan.scores import ScoreMatrix, Scores
from headspan.system.arguments import checked
from headspan.system.ordering import descending
from headspan.system.progress import Update
from headspan.system.tabular import Tabular

Null = Literal["random", "reversed"]

DISCOVERY_RATE = 0.05  # the q that counts as significant wherever no other is asked for
_LEAST_SEEN = 0.5  # of the random mass, for a KL to be shown


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


class Divergence(NamedTuple):
    """KL(random ‖ observed), and how much of the random mass lies in the bins that it is summed over."""

    kl: float
    seen: float

    @property
    def shown(self) -> float:
        """The KL, or NaN where most of the random mass was left out: it would be small, or 0, far from chance."""
        return self.kl if self.seen >= _LEAST_SEEN else float("nan")


@checked
def kl_divergence(scores: Scores, pairing: str | Pairing) -> float:
    """KL(random ‖ observed) of the PK of forward pairs, over 255 bins between 0 and the largest possible PK.

    Bins empty on either side are left out, as in the paper, so a small value does not mean that the two agree: with
    few pairs it can be 0 for the pairing farthest from chance. ``summarise`` has distances that cannot mislead so.
    Where subspace dimensions differ between heads, the random mass is the average over the pairs.
    """
    return divergence(scores, pairing).kl


def divergence(scores: Scores, pairing: str | Pairing) -> Divergence:
    """The KL of ``kl_divergence`` with what it rests on."""
    from scipy.special import ndtr

    matrix = scores["pk", pairing].forward()
    rows, columns, values = matrix.pairs()
    if not len(values):
        raise HeadspanError(f"{matrix.pairing} has no forward pairs: KL needs heads in at least two layers")
    ranks, ranks2 = scores.ranks(matrix.pairing.source)[rows], scores.ranks(matrix.pairing.target)[columns]
    dimensions, counts = np.unique(np.stack([ranks, ranks2]), axis=1, return_counts=True)
    edges = np.linspace(0, np.minimum(dimensions[0], dimensions[1]).max(), 256)
    mean, variance = moments(scores.d_model, dimensions[0], dimensions[1])
    if np.any(variance == 0):
        raise HeadspanError(
            f"{matrix.pairing} has subspaces that are empty or fill the whole space, where PK cannot vary: no KL"
        )
    cumulative = ndtr((edges[:, None] - mean) / np.sqrt(variance)) @ (counts / counts.sum())
    expected = np.diff(cumulative)
    observed = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / len(values)
    both = (expected > 0) & (observed > 0)
    kl = float(np.sum(expected[both] * np.log(expected[both] / observed[both])))
    return Divergence(kl, float(expected[both].sum()))


class PairingSummary(NamedTuple):
    """One pairing against both nulls; ``reversed_significant`` is None where there is no reversed null.

    shift: mean distance of a pair from the random mean of its dimensions, in random standard deviations.
    above: share of pairs above the 99.9 % point of random subspaces; by chance 0.001.
    kl: the paper's divergence, NaN unless asked for and where it leaves out most of the random mass.
    """

    pairing: Pairing
    pairs: int
    mean: float
    sd: float
    random_mean: float
    random_sd: float
    shift: float
    above: float
    random_significant: int
    reversed_significant: int | None
    kl: float = float("nan")


def summarise(scores: Scores, q: float = DISCOVERY_RATE, kl: bool = False) -> list[PairingSummary]:
    """One line per pairing with PK scores: observed and random moments over forward pairs, discoveries at q.

    ``random_sd`` is the spread to expect over all pairs, the differences between subspace dimensions included.
    Pairings of nodes come last; no line of heads depends on them.
    """
    scores.check_all_pairs("a comparison with chance")
    nodes = [pairing for pairing in given_pairings("all", scores, "pk") if pairing.of_nodes]
    found = [summary_of(scores, pairing, q, kl) for pairing in (*PAIRINGS, *nodes) if ("pk", pairing) in scores]
    if not found:
        raise HeadspanError("the random baseline needs pk scores, which this result lacks: run headspan score again")
    return found


def summary_of(
    scores: Scores,
    pairing: Pairing,
    q: float = DISCOVERY_RATE,
    kl: bool = False,
    *,
    random_null: Significance | None = None,
    reversed_null: Significance | None = None,
) -> PairingSummary:
    """One line of ``summarise``; whoever has tested the pairing against a null already gives what was found."""
    rows, columns, values = scores["pk", pairing].forward().pairs()
    if not len(values):
        raise HeadspanError(f"{pairing} has no forward pairs: the baseline needs heads in at least two layers")
    values = values.astype(np.float64)
    ranks, ranks2 = scores.ranks(pairing.source)[rows], scores.ranks(pairing.target)[columns]
    random = moments(scores.d_model, ranks, ranks2)
    against_random = random_null or significance(scores, pairing)
    # PK that cannot vary is computed with rounding: it must not count as above its own value.
    above = (values > random_quantile(scores.d_model, ranks, ranks2)) & (random.variance > 0)
    if reversed_null is None and has_reverse(scores, "pk", pairing):
        reversed_null = significance(scores, pairing, null="reversed")
    return PairingSummary(
        pairing,
        len(values),
        float(values.mean()),
        float(values.std()),
        float(random.mean.mean()),
        float(np.sqrt(random.variance.mean() + random.mean.var())),
        float(against_random.z[rows, columns].mean()),
        float(above.mean()),
        int(np.count_nonzero(against_random.q[rows, columns] <= q)),
        None if reversed_null is None else reversed_null.count(q),
        divergence(scores, pairing).shown if kl else float("nan"),
    )


def has_reverse(scores: Scores, metric: str, pairing: Pairing) -> bool:
    """Whether a result holds what the reversed null of a pairing needs."""
    return not pairing.same_type and (metric, Pairing(pairing.target, pairing.source)) in scores


class Baseline(Tabular, list[PairingSummary]):
    """One line per pairing against chance."""

    with_kl = False

    def rows(self) -> list[dict[str, Any]]:
        """One record per pairing; without ``kl`` where it was not asked for."""
        records = [line._asdict() | {"pairing": str(line.pairing)} for line in self]
        return records if self.with_kl else [{n: v for n, v in record.items() if n != "kl"} for record in records]

    def _headline(self) -> str:
        return f"pk of forward pairs against chance, {len(self)} pairings"


@checked
def baseline(
    scores: ScoresLike, q: float = DISCOVERY_RATE, kl: bool = False, progress: Update | None = None
) -> Baseline:
    """How far are Projection Kernels from chance? One line per pairing, as `summarise` makes them.

    >>> str(baseline("demo")[0].pairing)
    'QQ'
    """
    found = Baseline(summarise(given_scores(scores, ["pk"], "all", progress), q, kl))
    found.with_kl = kl
    return found
