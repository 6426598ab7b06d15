"""Which pairs score more than chance: z, p and q against random subspaces and against impossible pairs.

Three nulls, for three questions:

``random``
    Both subspaces are uniform and independent in d dimensions, or in d − 1 if folding has centred both. Moments are
    exact, and p-values come from a beta distribution with the exact first three moments, which is the exact
    distribution for single directions. Trained weights are never like this (all heads share a few directions), so
    nearly every pair looks significant.
``reversed``
    A head cannot write into what an *earlier* head reads. Pairs in that impossible direction have the same heads,
    the same shared directions and the same distances between layers, but no information can flow along them.
    The p-value of a forward pair is its rank among them; beyond the largest 5 % of them it comes from a generalised
    Pareto tail where one fits. If whole layers score higher forwards than backwards, so do their pairs: the note
    says whether this is the case.
``within``
    Does this pair stand out among the heads of its own two layers? The effects of the two layers, the source and the
    target are removed first (:mod:`headspan.statistics.within_layers`), from forward and reversed pairs alike, and
    the residual of a forward pair is ranked among those of the reversed pairs. A trend of whole layers drops out, so
    this is evidence about two heads.

See docs/statistics.md for assumptions and calibration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from headspan.results.checks import damaged
from headspan.results.matrix import ScoreMatrix
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import ScoresLike, given_scores
from headspan.statistics.dimension import few, pair_dimension
from headspan.statistics.tails import Tail, fit_tail, p_among
from headspan.statistics.within_layers import Direction, direction_of, residual_z
from headspan.subspaces.metrics import METRICS, PK, metric_of, one_metric
from headspan.subspaces.random_subspaces import Approximation, Moments, RandomLaw, bounded_law, moments, random_law
from headspan.system.arguments import checked
from headspan.system.ordering import descending, shared_ranks
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Pairing, layers_of, one_pairing, pair_mask

Null = Literal["random", "reversed", "within"]

_ROUNDING = 1e-6
DISCOVERY_RATE = 0.05  # the default q at which pairs count as significant


@dataclass(frozen=True, repr=False, eq=False)
class Significance(Tabular):
    """z, p and q of every pair of one pairing: arrays shaped like ``matrix.values``, NaN where there is no pair.

    z: distance from the null mean in null standard deviations; under ``within``, of the residual.
    p: probability of a score at least this large under the null (one-sided).
    q: Benjamini–Hochberg adjusted p over the pairs of this pairing.
    tail: the fitted tail that gave the smallest p-values of a control group; None if they were counted.
    note: how the p-values of a control group were obtained, and whether its assumption holds.
    q_within: with the reversed null, the q of every pair under ``within``.
    direction: with the reversed null, the test of its assumption on whole layers.
    """

    null: Null
    matrix: ScoreMatrix
    z: np.ndarray
    p: np.ndarray
    q: np.ndarray
    tail: Tail | None = None
    note: str = ""
    q_within: np.ndarray | None = None
    direction: Direction | None = None

    def _check(self, path: Path) -> None:
        for name in ("z", "p", "q", "q_within"):
            values = getattr(self, name)
            if values is not None and values.shape != self.matrix.values.shape:
                raise damaged(path, f"its {name} has shape {values.shape}, expected {self.matrix.values.shape}")

    @checked
    def rows(self, k: int | None = None) -> list[dict[str, Any]]:
        """One record per pair, largest score first: pairing, rank, source, target, score, z, p, q; the first k.

        With the reversed null also q_within.
        """
        matrix = self.matrix
        names = ("z", "p", "q") if self.q_within is None else ("z", "p", "q", "q_within")
        rows, columns, values = matrix.pairs()
        order = descending(values)[:k]
        return [
            {
                "pairing": str(matrix.pairing),
                "rank": rank,
                "source": str(matrix.sources[int(i)]),
                "target": str(matrix.targets[int(j)]),
                "score": float(matrix.values[i, j]),
                **{name: float(getattr(self, name)[i, j]) for name in names},
            }
            for rank, i, j in zip(shared_ranks(values[order]).tolist(), rows[order], columns[order], strict=True)
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
        """The smallest false-discovery rate at which any pair is significant; NaN without pairs."""
        present = self.q[~np.isnan(self.q)]
        return float(present.min()) if present.size else float("nan")

    @checked
    def nothing(self, q: float) -> str:
        """The message for a q that no pair reaches, with the smallest q that has pairs."""
        pairing, least = self.matrix.pairing, self.smallest_q
        if np.isnan(least):
            return f"{pairing} has no {'forward pairs' if not len(self.matrix.pairs()[2]) else _NO_EVIDENCE}"
        return (
            f"no {pairing} pair has q ≤ {q:g} against the {self.null} null; the smallest q is {least:.3g}, which "
            f"{_pairs(self.count(least))}"
        )

    @checked
    def shared(self, q: float = DISCOVERY_RATE) -> int | None:
        """How many of the pairs above the reversed pairs also stand out within their two layers; None if untestable."""
        if self.q_within is None or np.isnan(self.q_within).all():
            return None
        with np.errstate(invalid="ignore"):
            return int(np.count_nonzero((self.q <= q) & (self.q_within <= q)))

    @checked
    def agreement(self, q: float = DISCOVERY_RATE) -> str:
        """A message on how far the reversed null and the null within layers agree; empty for other nulls."""
        if self.q_within is None:
            return ""
        return agreement(self.matrix.pairing, self.count(q), self.shared(q))


_NO_EVIDENCE = "head-specific evidence, because a layer has too few heads to compare"


def agreement(pairing: Pairing, above: int, shared: int | None) -> str:
    """The message of ``Significance.agreement`` from its counts."""
    start = f"{pairing}: {_pairs(above, 'is', 'are')} above the reversed pairs"
    if shared is None:
        return f"{start}; there is no {_NO_EVIDENCE}"
    if not above:
        return start
    found = (
        "none of them stands"
        if not shared
        else "it also stands"
        if above == 1
        else (f"{shared:,} of them also {'stands' if shared == 1 else 'stand'}")
    )
    return f"{start}; {found} out among the heads of the same two layers"


def _pairs(count: int, one: str = "has", more: str = "have") -> str:
    return f"{count:,} pairs {more}" if count > 1 else f"{'one' if count else 'no'} pair {one}"


@checked
def significance(
    scores: ScoresLike,
    pairing: str | Pairing | Iterable[str | Pairing],
    *,
    null: Null = "random",
    metric: str | Iterable[str] = PK,
    approximation: Approximation | None = None,
) -> Significance:
    """z, p and q for the pairs of one pairing under one of the three nulls.

    ``random`` is for ``pk`` only, over the paper's pair set; its p-values come from the beta distribution of
    `random_law`. The approximation ``loose``, kept for comparison, uses a normal distribution with the loose variance
    instead. ``reversed`` and ``within`` work for any similarity and also need the scores of the reversed pairing (KO
    for OK); the four same-type pairings have no reverse. Under ``within``, pairs are NaN if a layer has too few heads
    to compare.
    """
    one, metric = one_pairing(pairing), one_metric(metric)
    if approximation is not None and null != "random":
        raise HeadspanError(f"only the random null has an approximation, not {null}. Leave out `approximation`")
    if metric_of(metric).flow_only:
        raise HeadspanError(
            f"{metric} has no false-discovery rate: random subspaces say nothing about it, and pairs that do not write "
            "to each other have none. Compare it with the value expected without interaction"
        )
    scores = given_scores(scores, [metric], [one, Pairing(one.target, one.source)], whole="a false-discovery rate")
    matrix = scores[metric, one]
    if null != "random":
        return (_against_reversed if null == "reversed" else _within_layers)(*_both_directions(matrix, scores, null))
    if not metric_of(metric).random_null:
        known = ", ".join(name for name, known in METRICS.items() if known.random_null)
        raise HeadspanError(f"the random null is known for {known} only, not for {metric}. Choose the reversed null")
    return _against_random(matrix, scores, approximation or "tight")


def _against_random(matrix: ScoreMatrix, scores: Scores, approximation: Approximation) -> Significance:
    matrix = _compared(matrix)
    chances = list(_chances(scores, matrix, approximation))
    z = _random_z(matrix, chances)
    p = np.full(z.shape, np.nan)
    for part, random, law in chances:
        tail = law.upper_tail(matrix.values[part]) if approximation == "tight" else p_values(z[part])
        # Where PK is constant it always reaches its mean.
        p[part] = np.where((random.variance > 0) | np.isnan(tail), tail, 1.0)
    return Significance("random", matrix, z, p, benjamini_hochberg(p))


def z_scores(scores: Scores, pairing: str | Pairing, approximation: Approximation = "tight") -> np.ndarray:
    """Distance of every PK from its mean for random subspaces, in standard deviations; NaN where there is no pair."""
    matrix = _compared(scores[PK, pairing])
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
    """Parts of a matrix with the moments and distribution of PK by chance: first all pairs, then overrides for latents.

    Pairs of heads in one layer under latent attention have their own mean and spread; nothing else is known about them.
    """
    ranks, ranks2 = (few(scores.ranks(role)) for role in matrix.pairing)
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


def _inside_latents(scores: Scores, matrix: ScoreMatrix) -> dict[int, tuple[float, float]]:
    """Mean and standard deviation by chance of pairs in one latent, by layer."""
    try:
        chance: dict[str, Any] = scores.provenance.get("same_layer_chance") or {}
        found: dict[str, Any] = chance.get(str(matrix.pairing)) or {}
        known = {int(layer): (float(mean), float(sd)) for layer, (mean, sd) in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise HeadspanError("the result's chance levels of one layer are damaged. Score the model again") from None
    # Heads that fill their latent always have the same PK; samples of it differ only by rounding.
    return {layer: (mean, sd if sd > _ROUNDING * mean else 0.0) for layer, (mean, sd) in known.items()}


def p_values(z: ArrayLike) -> np.ndarray:
    """Upper tail of the normal distribution: the probability of a z at least this large, for the loose variance.

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
    order = np.argsort(values)[::-1]  # largest p first, so that minima accumulate downwards; equal p share one q
    adjusted = values[order] * len(values) / np.arange(len(values), 0, -1)
    sorted_back = np.empty_like(values)
    sorted_back[order] = np.minimum(np.minimum.accumulate(adjusted), 1.0)
    q[present] = sorted_back
    return q


def has_reverse(scores: Scores, metric: str, pairing: Pairing) -> bool:
    """Whether a result has the scores that the reversed null of a pairing needs."""
    return not pairing.same_type and (metric, Pairing(pairing.target, pairing.source)) in scores


def reversed_q(scores: Scores, metric: str, pairing: Pairing) -> np.ndarray | None:
    """q of every forward pair against the reversed pairs; None where a result has no reversed pairs to compare with."""
    if scores.screened or metric_of(metric).flow_only or not has_reverse(scores, metric, pairing):
        return None
    backward = scores[metric, Pairing(pairing.target, pairing.source)].forward().values.astype(np.float64).T
    control = np.sort(backward[~np.isnan(backward)])
    if len(control) < 2:
        return None
    values = scores[metric, pairing].forward().values.astype(np.float64)
    return benjamini_hochberg(p_among(control, values, fit_tail(control), "scores")[0])


def _both_directions(matrix: ScoreMatrix, scores: Scores, null: Null) -> tuple[ScoreMatrix, np.ndarray]:
    """The forward pairs, and the reversed pairs in the same layout: sources as rows, targets as columns."""
    pairing = matrix.pairing
    if pairing.same_type:
        raise HeadspanError(
            f"{pairing} has no {null} null: both sides have the same role, so the reversed pairs are the same "
            "pairs. Choose the random null"
        )
    back = Pairing(pairing.target, pairing.source)
    if (matrix.metric, back) not in scores:
        raise HeadspanError(
            f"the {null} null of {pairing} needs the {matrix.metric} scores of {back}, which this result lacks. "
            f"Score again with both pairings: {pairing} and {back}"
        )
    # All similarities are symmetric: XY with the source after the target equals YX with the source before it.
    backward = scores[matrix.metric, back].forward().values.astype(np.float64).T
    if np.count_nonzero(~np.isnan(backward)) < 2:
        raise HeadspanError(f"the {null} null needs heads in at least two layers, and this result has only one")
    return matrix.forward(), backward


def _against_reversed(matrix: ScoreMatrix, backward: np.ndarray) -> Significance:
    """Rank of every forward pair among the pairs in which the source comes after the target."""
    values = matrix.values.astype(np.float64)
    control = np.sort(backward[~np.isnan(backward)])
    p, tail, note = p_among(control, values, fit_tail(control), "scores")
    spread = control.std()
    z = (values - control.mean()) / spread if spread > 0 else np.where(np.isnan(values), np.nan, 0.0)
    direction = direction_of(_joined(values, backward), matrix.sources, matrix.targets)
    note = f"{note}; {direction.sentence}"
    q_within = _within_layers(matrix, backward).q
    return Significance("reversed", matrix, z, p, benjamini_hochberg(p), tail, note, q_within, direction)


def _within_layers(matrix: ScoreMatrix, backward: np.ndarray) -> Significance:
    """Rank of every forward pair's residual within its two layers, among the residuals of the reversed pairs."""
    z = residual_z(_joined(matrix.values, backward), matrix.sources, matrix.targets)
    forward, control = (z[~np.isnan(z) & ~np.isnan(pairs)] for pairs in (matrix.values, backward))
    z = np.where(np.isnan(matrix.values), np.nan, z)
    if not len(forward) or not len(control):
        z[:] = np.nan
        note = f"{matrix.pairing} has no {_NO_EVIDENCE}"
        return Significance("within", matrix, z, z.copy(), z.copy(), note=note)
    control = np.sort(control)
    p, tail, note = p_among(control, z, fit_tail(control, lighter=True), "residuals")
    missing = int(np.count_nonzero(~np.isnan(matrix.values))) - len(forward)
    if missing:
        note += f"; {_pairs(missing)} no {_NO_EVIDENCE}"
    return Significance("within", matrix, z, p, benjamini_hochberg(p), tail, note)


def _joined(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Both directions in one matrix; NaN only between heads of the same layer."""
    return np.where(np.isnan(forward), backward, forward.astype(np.float64))
